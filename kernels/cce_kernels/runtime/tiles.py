"""What the Triton kernels share: the tiles of an operand (from tile_table.py), TMA descriptors, the order of tiles,
logits from products.

Sizes are not specialised on (do_not_specialize): TMA takes any, and a ragged batch shall not compile anew.
Only the width of a gradient is: it decides how wide the stores are.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from .devices import IN_INTERPRETER, Device, properties, target
from .interpreter import INTERPRETED, mend
from .tile_table import FULL_PRECISION, Tiles, row_for

if INTERPRETED:
    mend()


# triton.cdiv and its like take 5 µs a call on the host, as much as a launch's arguments do.
def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The smallest that is not below n."""
    return 1 << (n - 1).bit_length()


SHORT = 1024  # dimensions at most where logits take small tiles (H200)
GROUP = 16  # row tiles that walk over the same columns together, so that both operands stay in L2


def inner_of(dtype: torch.dtype) -> int:
    """What small kernels take of the summed dimension a step."""
    return FULL_PRECISION.inner if dtype == torch.float32 else 64


def tiles_for(x: Tensor, cols: int) -> Tiles:
    """Tiles of a product of operands like x; an output of few columns narrows them."""
    return _product_tiles(x.dtype, cols, device_of(x))


@lru_cache
def _product_tiles(dtype: torch.dtype, cols: int, device: Device) -> Tiles:
    if dtype == torch.float32:
        return FULL_PRECISION
    tiles = row_for(device).product
    width = min(tiles.cols, max(64, power_of_2(cols)))
    return replace(tiles, cols=width, num_warps=tiles.num_warps if width > 64 else 4)


def logits_tiles(x: Tensor) -> Tiles:
    """Tiles of a product of rows like x (N, D), followed by exponentials."""
    if x.dtype == torch.float32:
        return FULL_PRECISION
    row = row_for(device_of(x))
    return row.short_logits if x.shape[1] <= SHORT else row.logits


def gradient_tiles(x: Tensor) -> Tiles:
    """Tiles of dL/dz, from a product of operands like x."""
    return FULL_PRECISION if x.dtype == torch.float32 else row_for(device_of(x)).gradient


def aligned(x: Tensor) -> Tensor:
    """x (R, K) itself if TMA can read it (16-byte rows and base, unit column stride), else a copy that it
    can."""
    unit = 16 // x.itemsize
    # The base is at fault only where x starts within another tensor: its offset there tells.
    based = x.storage_offset() % unit == 0
    if x.stride(1) == 1 and x.stride(0) % unit == 0 and x.stride(0) >= x.shape[1] and based:
        return x
    rows, dim = x.shape
    return x.new_empty(rows, cdiv(dim, unit) * unit)[:, :dim].copy_(x)


class Descriptor(TensorDescriptor):
    """One whose tensor is known to fit: Triton's checks take most of the time to make one."""

    def __post_init__(self) -> None:
        pass


def descriptor(x: Tensor, rows: int, cols: int) -> TensorDescriptor:
    """TMA descriptor of x for blocks rows × cols; what a block reads beyond x is zero, and is not written."""
    return Descriptor(x, x.shape, x.stride(), [rows, cols])


def device_of(x: Tensor) -> Device:
    """The device that kernels on x are compiled for: x's, or the driver's where x is not on one."""
    if x.is_cuda:
        return properties(x.device)
    return IN_INTERPRETER if INTERPRETED else target(driver.active.get_current_target().arch)


def multiprocessors(x: Tensor) -> int:
    """Programs that a persistent kernel launches."""
    return device_of(x).multiprocessors


def launches_overlap(x: Tensor) -> bool:
    """Whether a kernel on x's device may begin before the one ahead of it is over (programmatic dependent launch)."""
    return device_of(x).capability >= 90


@triton.jit
def grouped(unit, n_rows, n_cols, GROUP: tl.constexpr):
    """(row, column) of the unit-th of n_rows × n_cols tiles: groups of GROUP rows, column by column
    within."""
    group_size = GROUP * n_cols
    first = unit // group_size * GROUP
    height = tl.minimum(n_rows - first, GROUP)
    within = unit % group_size
    return first + within % height, within // height


@triton.jit
def tanh(x):
    """tanh in fp32 to about one rounding: a series near 0, where the quotient of exponentials cancels."""
    size = tl.abs(x)
    decay = tl.exp(-2 * size)
    quotient = (1 - decay) / (1 + decay)
    square = x * x
    series = x * (1 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315))))
    return tl.where(size < 0.2, series, tl.where(x < 0, -quotient, quotient))


@triton.jit
def softcapped(z, softcap):
    return softcap * tanh(z / softcap)


@triton.jit
def finish_logits(acc, cols, bias_ptr, V, logit_scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """softcap · tanh((logit_scale · acc + bias) / softcap), fp32, of columns cols."""
    z = acc * logit_scale
    if bias_ptr is not None:
        z += tl.load(bias_ptr + cols, mask=cols < V, other=0.0).to(tl.float32)[None, :]
    if HAS_SOFTCAP:
        z = softcapped(z, softcap)
    return z
