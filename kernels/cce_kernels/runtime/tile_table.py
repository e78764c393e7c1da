"""Tiles of the large kernels on every architecture: the one place that says how large, in how many warps and stages.

A row serves all devices of its kind whose shared memory holds it. tests/kernels/devices/test_architectures.py compiles
every kernel for compute capability 8.0, 8.6, 8.9, 9.0, 10.0 and 12.0 and compares with what a program may have there.
Only Hopper's row is measured (H200); the others are chosen to compile and to fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .devices import Device


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


@dataclass(frozen=True)
class Row:
    """Tiles for operands of 16 bits.

    product: of A B, fp32 in registers; as wide as the output where that is narrower.
    short_logits: of exponentials where D is at most 1024. logits: where it is longer. Half a tile is staged on its way
        to memory, and the running sums of a row take registers.
    gradient: of dL/dz; staged likewise.
    """

    product: Tiles
    short_logits: Tiles
    logits: Tiles
    gradient: Tiles


# 128 × 256 × 64 with two warpgroups keeps Hopper's tensor cores busy: 128 accumulator registers a thread, 48 KiB of
# shared memory a stage, 192 of 227 KiB for four. Where D is short, two programs a multiprocessor of half the tile each
# take the exponentials of one while the tensor cores work for the other.
HOPPER = Row(
    product=Tiles(128, 256, 64, 8, 4),
    short_logits=Tiles(128, 128, 64, 4, 3, resident=2),
    logits=Tiles(128, 256, 64, 8, 3),
    gradient=Tiles(128, 256, 64, 8, 3),
)
# Data-centre Blackwell: accumulators lie in tensor memory. Triton 3.7's compiler fails on the wide tile's metrics.
BLACKWELL = Row(
    product=Tiles(128, 256, 64, 8, 4),
    short_logits=Tiles(128, 128, 64, 4, 2, resident=2),
    logits=Tiles(128, 128, 64, 4, 4),
    gradient=Tiles(128, 256, 64, 8, 3),
)
# Consumer Blackwell: TMA, and 99 KiB.
SMALL = Row(
    product=Tiles(128, 256, 64, 8, 3),
    short_logits=Tiles(128, 256, 32, 8, 3),
    logits=Tiles(128, 256, 32, 8, 3),
    gradient=Tiles(128, 256, 32, 8, 3),
)
# Ampere and Ada have no TMA: Triton makes pointers of the descriptors and keeps one stage, 48 KiB.
BEFORE_TMA = HOPPER

# Hopper's own kernels (hopper.py). Small steps take 1.09 of the time of large ones at D = 256, 0.90 at 512, 0.94 to
# 0.98 beyond: as many bytes in smaller steps, each of which is fetched anew the sooner.
GLUON_SHORT = Tiles(128, 256, 64, 4, 4)
GLUON_LONG = Tiles(128, 256, 32, 4, 8)

# fp32 multiplies on the ordinary units (IEEE, never TF32): small tiles, so that the accumulators fit.
FULL_PRECISION = Tiles(64, 64, 32, 8, 2)

LARGE_BYTES = 220 * 1024  # of shared memory, for the rows of Hopper and Blackwell


@lru_cache
def row_for(device: Device) -> Row:
    """The row of the table for a device."""
    if device.capability and device.capability < 90:
        return BEFORE_TMA
    if device.shared_memory < LARGE_BYTES:
        return SMALL
    return BLACKWELL if device.capability >= 100 else HOPPER
