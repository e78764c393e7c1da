"""What all Triton kernels share: tile sizes, TMA descriptors, the order of tiles.

A `Row` holds the tile sizes, warps and stages of the large kernels on all devices of an architecture whose shared
memory holds them. Only Hopper's row is measured (H200). The other rows are chosen to compile and to fit.
tests/kernels/devices compiles the kernels for compute capability 8.0, 8.6, 8.9, 9.0, 10.0 and 12.0, and compares their
shared memory with the device's limit.

Kernels do not specialise on sizes (do_not_specialize), so that a ragged batch does not compile anew. TMA takes any
size. The width of a gradient is the exception, because it decides how wide the stores are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from .devices import IN_INTERPRETER, REHEARSAL, Device, properties, target
from .interpreter import INTERPRETED, mend

if INTERPRETED:
    mend()


@dataclass(frozen=True)
class Tiles:
    """The tile of a product: rows × cols of the output, and `inner` of the summed dimension a step."""

    rows: int
    cols: int
    inner: int
    num_warps: int
    num_stages: int
    resident: int = 1  # programs of a persistent kernel on one multiprocessor at a time

    @property
    def launch(self) -> dict[str, int]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


@dataclass(frozen=True)
class Row:
    """Tiles of each kernel for 16-bit operands. Every kernel holds its tile in fp32 registers."""

    # Plain products (triton/matmul.py). A narrow output narrows the tile. A transposed product turns it upright,
    # 256 × 128, if fewer of its columns then lie beyond the output (tiles.transposed_tiles).
    product: Tiles
    # Transposed products that sum few rows. Two programs share a multiprocessor, so that one computes while the other
    # stores its tile.
    shallow: Tiles
    # Exponentials (triton/logits.py) for D up to 1024, and for larger D. The store stages half a tile in shared memory,
    # and the running sums of a row take registers.
    short_logits: Tiles
    logits: Tiles
    gradient: Tiles  # dL/dz (triton/logit_gradient.py). The store stages half a tile in shared memory


# 128 × 256 × 64 with two warpgroups keeps Hopper's tensor cores busy. A thread has 128 accumulator registers. A stage
# takes 48 KiB of shared memory, four take 192 of 227 KiB. For short D, two programs with half the tile share a
# multiprocessor: the tensor cores work for one while the other computes exponentials.
HOPPER = Row(
    product=Tiles(128, 256, 64, 8, 4),
    shallow=Tiles(128, 128, 64, 4, 3),
    short_logits=Tiles(128, 128, 64, 4, 3, resident=2),
    logits=Tiles(128, 256, 64, 8, 3),
    gradient=Tiles(128, 256, 64, 8, 3),
)
# Data-centre Blackwell holds accumulators in tensor memory. Triton 3.7's compiler fails on the metrics of a wider tile.
BLACKWELL = Row(
    product=Tiles(128, 256, 64, 8, 4),
    shallow=Tiles(128, 256, 64, 8, 4),
    short_logits=Tiles(128, 128, 64, 4, 2, resident=2),
    logits=Tiles(128, 128, 64, 4, 4),
    gradient=Tiles(128, 256, 64, 8, 3),
)
# Consumer Blackwell has TMA and 99 KiB of shared memory.
SMALL = Row(
    product=Tiles(128, 256, 64, 8, 3),
    shallow=Tiles(128, 256, 64, 8, 3),
    short_logits=Tiles(128, 256, 32, 8, 3),
    logits=Tiles(128, 256, 32, 8, 3),
    gradient=Tiles(128, 256, 32, 8, 3),
)
# Ampere and Ada have no TMA: Triton turns descriptors into pointers and keeps one stage, which takes 48 KiB.
BEFORE_TMA = HOPPER

# The Gluon kernels for Hopper (triton/hopper.py). Both rings hold the same bytes. Steps of 64 numbers read whole lines
# of 128 bytes. Steps of 32 read half lines and free a buffer sooner: on H100 and H200 they were faster at medium D, and
# on the H100 much slower at large D.
GLUON = Tiles(128, 256, 64, 4, 4)
GLUON_HALF_LINES = Tiles(128, 256, 32, 4, 8)
HALF_LINES = range(512, 1537)  # of D

# fp32 products run on the ordinary units (IEEE, never TF32). Small tiles make the accumulators fit.
FULL_PRECISION = Tiles(64, 64, 32, 8, 2)

LARGE_BYTES = 220 * 1024  # shared memory that the rows HOPPER and BLACKWELL need


def hopper_tiles(dim: int) -> Tiles:
    """Tiles of the Gluon kernels for rows of `dim` numbers."""
    return GLUON_HALF_LINES if dim in HALF_LINES else GLUON


@lru_cache
def row_for(device: Device) -> Row:
    """The table's row for a device."""
    if device.capability and device.capability < 90:
        return BEFORE_TMA
    if device.shared_memory < LARGE_BYTES:
        return SMALL
    return BLACKWELL if device.capability >= 100 else HOPPER


# Plain Python, because triton.cdiv and triton.next_power_of_2 take 5 µs a call on the host, as long as a launch.
def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least n."""
    return 1 << (n - 1).bit_length()


SHORT = 1024  # the largest D for which logits take small tiles (H200)
SHALLOW = 768  # the most rows that a transposed product sums with `shallow` tiles (H100)
WASTE = 1.04  # a transposed product's tiles turn upright if wide ones cover this many times as many columns (H100)
GROUP = 16  # row tiles that run over the same columns together, so that both operands stay in L2


def inner_of(dtype: torch.dtype) -> int:
    """The part of the summed dimension that a small kernel multiplies in one step."""
    return FULL_PRECISION.inner if dtype == torch.float32 else 64


def tiles_for(x: Tensor, cols: int) -> Tiles:
    """Tiles of a product whose operands are like x, with an output of `cols` columns."""
    return _product_tiles(x.dtype, cols, device_of(x))


def transposed_tiles(x: Tensor, cols: int, depth: int) -> Tiles:
    """The same for a product aᵀ b that sums `depth` rows. The tile's rows do not depend on `depth`."""
    return _transposed_tiles(x.dtype, cols, depth <= SHALLOW, device_of(x))


@lru_cache
def _product_tiles(dtype: torch.dtype, cols: int, device: Device) -> Tiles:
    if dtype == torch.float32:
        return FULL_PRECISION
    tiles = row_for(device).product
    width = min(tiles.cols, max(64, power_of_2(cols)))
    return replace(tiles, cols=width, num_warps=tiles.num_warps if width > 64 else 4)


@lru_cache
def _transposed_tiles(dtype: torch.dtype, cols: int, shallow: bool, device: Device) -> Tiles:
    tiles = _product_tiles(dtype, cols, device)
    half = tiles.cols // 2
    if dtype == torch.float32:
        return tiles
    if cdiv(cols, tiles.cols) * tiles.cols >= WASTE * cdiv(cols, half) * half:
        return replace(tiles, rows=2 * tiles.rows, cols=half)
    return row_for(device).shallow if shallow and cols > tiles.cols else tiles


def logits_tiles(x: Tensor) -> Tiles:
    """Tiles of the kernel that takes exponentials of logits, for rows x (N, D)."""
    if x.dtype == torch.float32:
        return FULL_PRECISION
    row = row_for(device_of(x))
    return row.short_logits if x.shape[1] <= SHORT else row.logits


def gradient_tiles(x: Tensor) -> Tiles:
    """Tiles of the kernel that writes dL/dz, for operands like x."""
    return FULL_PRECISION if x.dtype == torch.float32 else row_for(device_of(x)).gradient


def fits_tma(x: Tensor) -> bool:
    """Whether TMA reads x (R, K) fast.

    TMA needs unit column stride, and a base and rows at multiples of 16 bytes. Rows of 16-bit numbers that straddle
    lines make TMA slow.
    """
    # Allocations are aligned, so the offset of x in its storage tells whether the base is.
    based = x.storage_offset() % (16 // x.itemsize) == 0
    return x.stride(1) == 1 and x.stride(0) % line_of(x.dtype) == 0 and x.stride(0) >= x.shape[1] and based


def line_of(dtype: torch.dtype) -> int:
    """What the numbers of a row must be a multiple of: a line of 128 bytes for 16-bit numbers, else 16 bytes."""
    return (128 if dtype.itemsize == 2 else 16) // dtype.itemsize


def aligned(x: Tensor) -> Tensor:
    """x (R, K) itself if TMA reads it fast, else a copy whose rows begin at lines of 128 bytes."""
    if fits_tma(x):
        return x
    (rows, dim), line = x.shape, line_of(x.dtype)
    return x.new_empty(rows, cdiv(dim, line) * line)[:, :dim].copy_(x)


def device_of(x: Tensor) -> Device:
    """The device that kernels on x are compiled for: x's GPU, the interpreter, or the target that the driver names."""
    if x.is_cuda:
        return properties(x.device)
    if REHEARSAL.device is not None:
        return properties(REHEARSAL.device)
    return IN_INTERPRETER if INTERPRETED else target(driver.active.get_current_target().arch)


def multiprocessors(x: Tensor) -> int:
    """Streaming multiprocessors of x's device: the programs of a persistent kernel."""
    return device_of(x).multiprocessors


def launches_overlap(x: Tensor) -> bool:
    """Whether a kernel on x's device may begin before the previous one ends (programmatic dependent launch)."""
    return device_of(x).capability >= 90


def in_eights(*sizes: int) -> bool:
    """Whether all sizes are multiples of 8, and one of them is no multiple of 16 (`by_eights`)."""
    return all(size % 8 == 0 for size in sizes) and any(size % 16 for size in sizes)


@triton.jit
def by_eights(size, EIGHTS: tl.constexpr):
    """The size. The compiler then knows that it is a multiple of 8, if EIGHTS (`in_eights`).

    Triton itself looks for multiples of 16 alone. Rows of another length are read and written one number at a time.
    """
    if EIGHTS:
        size = size // 8 * 8
    return size


@triton.jit
def grouped(unit, n_rows, n_cols, GROUP: tl.constexpr):
    """(row, column) of tile number `unit` of n_rows × n_cols tiles: GROUP rows at a time, column by column."""
    group_size = GROUP * n_cols
    first = unit // group_size * GROUP
    height = tl.minimum(n_rows - first, GROUP)
    within = unit % group_size
    return first + within % height, within // height
