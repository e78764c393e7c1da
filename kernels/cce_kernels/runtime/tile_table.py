"""The tile sizes, warps and stages of the large kernels on every architecture.

A row of the table serves all devices of its architecture whose shared memory holds it. Only Hopper's row is measured
(H200). The other rows are chosen to compile and to fit. tests/kernels/devices compiles the kernels for compute
capability 8.0, 8.6, 8.9, 9.0, 10.0 and 12.0, and compares their shared memory with the device's limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .devices import Device


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
    """Tiles of each kernel for 16-bit operands. Every kernel holds its tile in fp32 registers.

    product: plain products (kernels/matmul.py). A narrow output narrows the tile. A transposed product turns the tile
        upright, 256 × 128, if fewer of its columns then lie beyond the output (tiles.transposed_tiles).
    shallow: transposed products that sum few rows. Two programs share a multiprocessor, so that one computes while the
        other stores its tile.
    short_logits, logits: exponentials (kernels/logits.py) for D up to 1024, and for larger D. The store stages half a
        tile in shared memory, and the running sums of a row take registers.
    gradient: dL/dz (kernels/logit_gradient.py). The store stages half a tile in shared memory.
    """

    product: Tiles
    shallow: Tiles
    short_logits: Tiles
    logits: Tiles
    gradient: Tiles


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

# The Gluon kernels for Hopper (kernels/hopper.py). Both rings hold the same bytes. Steps of 64 numbers read whole lines
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
