"""The order of the rows in which those with a target come first, so that products stop before the ignored ones.

How many rows count is known on the device alone. So every kernel runs over positions in this order, reads the number of
rows that count, and ends there. Numbers of a row (its loss, its factor) stay in the rows' own order.

Cost: one program reads the targets twice; a few µs, and 0.1 ms for 10^6 rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...row_math import IGNORED, OUTSIDE
from ...runtime.launch import quick
from ...runtime.tiles import cdiv, power_of_2
from .columns import columns_of

BLOCK = 8192  # rows that the one program reads at a time


@dataclass(frozen=True)
class Live:
    """The rows of a chunk, those that count first.

    rows: (N,) int64, the row at each position. count: () int32, how many of them are not ignored.
    """

    rows: Tensor
    count: Tensor


@quick
@triton.jit(do_not_specialize=["stride", "N", "V", "ignore_index", "height", "chunks"])
def live_rows_kernel(
    targets_ptr,  # (N,) int64, stride apart
    columns_ptr,  # (N,) int64, each row's target column, written
    rows_ptr,  # (N,) int64, written: the rows, those that are not ignored first
    counts_ptr,  # (chunks,) int32, written: how many positions of each chunk count
    stride,
    N,
    V,
    ignore_index,
    height,  # positions of a chunk
    chunks,
    IGNORED: tl.constexpr,
    OUTSIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: count the rows that are not ignored, then give each row its position."""
    total = 0
    for first in range(0, N, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        column = columns_of(targets_ptr, rows, stride, N, V, ignore_index, IGNORED, OUTSIDE)
        tl.store(columns_ptr + rows, column, mask=rows < N)
        total += tl.sum(((column != IGNORED) & (rows < N)).to(tl.int32), axis=0)
    for chunk in range(chunks):
        tl.store(counts_ptr + chunk, tl.minimum(tl.maximum(total - chunk * height, 0), height))
    live_before, dead_before = 0, total
    for first in range(0, N, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        column = columns_of(targets_ptr, rows, stride, N, V, ignore_index, IGNORED, OUTSIDE)
        live = ((column != IGNORED) & (rows < N)).to(tl.int32)
        until = tl.cumsum(live, axis=0)  # rows that count, up to and with this one
        place = tl.where(live == 1, live_before + until - 1, dead_before + rows - first - until)
        tl.store(rows_ptr + place, rows.to(tl.int64), mask=rows < N)
        counted = tl.sum(live, axis=0)
        live_before += counted
        dead_before += BLOCK - counted


def live_rows(targets: Tensor, ignore_index: int, vocab: int, height: int, rows: Tensor, counts: Tensor) -> Tensor:
    """Each row's target column (N,) int64 (row_math.py); writes the rows' order.

    height: positions of a chunk. rows: (N,) int64, and counts: (chunks,) int32, written; see `Live`.
    """
    n_rows = targets.shape[0]
    columns = torch.empty(n_rows, dtype=torch.int64, device=targets.device)
    live_rows_kernel[(1,)](
        targets, columns, rows, counts, targets.stride(0), n_rows, vocab, ignore_index, height, cdiv(n_rows, height),
        IGNORED, OUTSIDE, min(BLOCK, max(128, power_of_2(n_rows))), num_warps=16,
    )  # fmt: skip
    return columns
