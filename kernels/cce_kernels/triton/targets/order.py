"""The rows sorted by their target, so that each entry of the vocabulary finds its rows.

Up to MOST_COUNTED rows, one launch counts for each row how many come before it. That is N² comparisons, few beside the
N D V multiply-adds of a product. torch.sort takes six launches, which a small problem would wait for, and which cannot
be repeated (runtime/program.py). Longer columns take torch.sort. Both sorts are stable, so their results are equal.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...runtime.launch import quick
from ...runtime.tiles import cdiv

MOST_COUNTED = 16384
ROWS, BLOCK = 8, 512  # rows of a program; rows that it compares them with at a time


@quick
@triton.jit(do_not_specialize=["N", "tiles"])
def target_order_kernel(
    columns_ptr,  # (N,) int64, each row's target column, negative for none
    keys_ptr,  # (N,) int32, written: the target columns in ascending order
    order_ptr,  # (N,) int64, written: the rows in that order
    bounds_ptr,  # (tiles + 1,) int32, written: where in keys_ptr the targets of each tile begin; or None
    N, tiles,
    TILE: tl.constexpr,  # tokens of the vocabulary in a tile
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count what comes before each row, and before the first entry of each tile.

    A row's place in the order is the number of pairs (target, row) that are smaller than its own. A pair is one int64.
    """
    row_programs = tl.cdiv(N, ROWS)
    program = tl.program_id(0)
    of_rows = program < row_programs
    rows = tl.where(of_rows, program, program - row_programs) * ROWS + tl.arange(0, ROWS)
    column = tl.load(columns_ptr + rows, mask=of_rows & (rows < N), other=0)
    own = tl.where(of_rows, (column << 32) + rows, rows.to(tl.int64) * TILE << 32)
    before = tl.zeros((ROWS,), dtype=tl.int32)
    for first in range(0, N, BLOCK):
        others = first + tl.arange(0, BLOCK)
        pairs = (tl.load(columns_ptr + others, mask=others < N, other=2**31 - 1) << 32) + others
        before += tl.sum((pairs[None, :] < own[:, None]).to(tl.int32), axis=1)
    if of_rows:
        tl.store(keys_ptr + before, column.to(tl.int32), mask=rows < N)
        tl.store(order_ptr + before, rows.to(tl.int64), mask=rows < N)
    elif bounds_ptr is not None:
        tl.store(bounds_ptr + rows, before, mask=rows <= tiles)


def order_by_target(columns: Tensor, keys: Tensor, order: Tensor, bounds: Tensor | None = None, tile: int = 1) -> None:
    """Sort the rows by target: write `keys`, `order` and, for tiles of `tile` entries, `bounds`; see the kernel."""
    n_rows, tiles = columns.shape[0], -1 if bounds is None else bounds.shape[0] - 1
    if n_rows <= MOST_COUNTED:
        target_order_kernel[(cdiv(n_rows, ROWS) + cdiv(tiles + 1, ROWS),)](
            columns, keys, order, bounds, n_rows, tiles, tile, ROWS, BLOCK
        )
        return
    torch.sort(columns.to(torch.int32), stable=True, out=(keys, order))
    if bounds is not None:
        edges = torch.arange(0, (tiles + 1) * tile, tile, dtype=keys.dtype, device=keys.device)
        torch.searchsorted(keys, edges, out_int32=True, out=bounds)
