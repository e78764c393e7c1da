"""What the Triton kernels share: tile sizes, TMA descriptors, the order of tiles, logits from products.

Sizes are not specialised on (do_not_specialize): TMA takes any, and a ragged batch shall not compile anew.
Only the width of a gradient is: it decides how wide the stores are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from .interpreter import INTERPRETED, mend

if INTERPRETED:
    mend()


# triton.cdiv and its like take 5 µs a call on the host, as much as a launch's arguments do.
def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The smallest that is not below n."""
    return 1 << (n - 1).bit_length()


TILE = 128  # rows of a tile of 16-bit operands
GROUP = 16  # row tiles that walk over the same columns together, so that both operands stay in L2


@dataclass(frozen=True)
class Tiles:
    """Tile of a product: rows × cols of output, `inner` of the summed dimension a step."""

    rows: int
    cols: int
    inner: int
    num_warps: int
    num_stages: int
    resident: int = 1  # programs on a multiprocessor at a time, for persistent kernels

    @property
    def launch(self) -> dict[str, int]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


@lru_cache
def tiles_for(dtype: torch.dtype, cols: int | None = None) -> Tiles:
    """Tiles for operands of `dtype`; `cols` narrows the tile for outputs of few columns.

    16 bits: 128 × 256 × 64 with two warpgroups, the shape that keeps Hopper's tensor cores busy: 128
    accumulator registers a thread, 48 KiB of shared memory a stage, 192 of 227 KiB for four.
    fp32 multiplies on the ordinary units (IEEE, never TF32): small tiles, so that the accumulators fit.
    """
    if dtype == torch.float32:
        return Tiles(64, 64, 32, 8, 2)
    width = 256 if cols is None else min(256, max(64, power_of_2(cols)))
    return Tiles(TILE, width, 64, 8 if width > 64 else 4, 4)


@lru_cache
def logits_tiles(dtype: torch.dtype, dim: int) -> Tiles:
    """Tiles of a product that is short (`dim` long) and followed by exponentials.

    Two programs a multiprocessor, of half the tile each, take the exponentials of one while the tensor cores work
    for the other; where the product is long, the large tile's smaller traffic weighs more (H200: 1024 and below).
    """
    if dtype == torch.float32:
        return tiles_for(dtype)
    return Tiles(TILE, 128, 64, 4, 3, resident=2) if dim <= 1024 else Tiles(TILE, 256, 64, 8, 3)


@lru_cache
def gradient_tiles(dtype: torch.dtype) -> Tiles:
    """Tiles of dL/dz: one stage fewer, as the result leaves through shared memory."""
    if dtype == torch.float32:
        return tiles_for(dtype)
    return Tiles(TILE, 256, 64, 8, 3)


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


def multiprocessors(x: Tensor) -> int:
    """Programs that a persistent kernel launches."""
    return _properties(x.device).multi_processor_count if x.is_cuda else 4


def compute_capability(x: Tensor) -> int:
    """Of the device that kernels on x are compiled for, 90 for Hopper; 0 in the interpreter."""
    if INTERPRETED:
        return 0
    if not x.is_cuda:
        return driver.active.get_current_target().arch
    return _compute_capability(x.device)


def launches_overlap(x: Tensor) -> bool:
    """Whether a kernel on x's device may begin before the one ahead of it is over (programmatic dependent launch)."""
    return compute_capability(x) >= 90


@lru_cache
def _compute_capability(device: torch.device) -> int:
    return 10 * _properties(device).major + _properties(device).minor


@lru_cache
def _properties(device: torch.device):
    return torch.cuda.get_device_properties(device)


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
