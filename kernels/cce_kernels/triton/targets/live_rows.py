"""The order of the rows in which those with a target come first, so that products stop before the ignored ones.

How many rows count is known on the device alone. So every kernel runs over positions in this order, reads the number of
rows that count, and ends there. Numbers of a row (its loss, its factor) stay in the rows' own order.

Cost: one program reads the target columns twice; a few µs, and 0.1 ms for 10^6 rows. Where a row is ignored, `gather`
copies e's rows in this order.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ...row_math import IGNORED
from ...runtime.launch import quick
from ...runtime.tiles import cdiv, power_of_2

BLOCK, SHORT = 8192, 1024  # rows that the one program of `live_rows` reads at a time: of up to SHORT rows, SHORT
ROWS = 16  # rows that a program of `gather` copies


@dataclass(frozen=True)
class Live:
    """The rows of a chunk, those that count first; without tensors, all rows in their own order."""

    rows: Tensor | None = None  # (N,) int64, the row at each position
    count: Tensor | None = None  # () int32, how many of them are not ignored
    some: Tensor | None = None  # () int32, whether any row of the call is ignored. If not, each is at its own position
    first: int = 0  # the chunk's first position


ALL = Live()


@quick
@triton.jit(do_not_specialize=["N", "height", "chunks"])
def live_rows_kernel(
    columns_ptr,  # (N,) int64, each row's target column
    rows_ptr,  # (N,) int64, written: the rows, those that are not ignored first
    counts_ptr,  # (chunks + 1,) int32, written: how many positions of each chunk count; whether any row is ignored
    N,
    height,  # positions of a chunk
    chunks,
    IGNORED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: count the rows that are not ignored, then give each row its position."""
    total = 0
    for first in range(0, N, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        column = tl.load(columns_ptr + rows, mask=rows < N, other=IGNORED)
        total += tl.sum((column != IGNORED).to(tl.int32), axis=0)
    for chunk in range(chunks):
        tl.store(counts_ptr + chunk, tl.minimum(tl.maximum(total - chunk * height, 0), height))
    tl.store(counts_ptr + chunks, (total < N).to(tl.int32))
    live_before, dead_before = 0, total
    for first in range(0, N, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        column = tl.load(columns_ptr + rows, mask=rows < N, other=IGNORED)
        live = (column != IGNORED).to(tl.int32)
        until = tl.cumsum(live, axis=0)  # rows that count, up to and with this one
        place = tl.where(live == 1, live_before + until - 1, dead_before + rows - first - until)
        tl.store(rows_ptr + place, rows.to(tl.int64), mask=rows < N)
        counted = tl.sum(live, axis=0)
        live_before += counted
        dead_before += BLOCK - counted


@quick
@triton.jit(do_not_specialize=["N"])
def gather_kernel(
    x_ptr,  # (rows, D), rows x_stride apart
    rows_ptr,  # (N,) int64
    count_ptr,  # () int32: how many of the N positions count
    some_ptr,  # () int32: where 0, there is nothing to do; or None
    out_ptr,  # (N, D), rows out_stride apart, written
    x_stride, out_stride, N, D,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out[i] = x[rows[i]]; 0 at positions that do not count."""
    count = tl.load(count_ptr)
    if some_ptr is not None:
        N *= tl.load(some_ptr)
    first = tl.program_id(0) * BLOCK_N
    if first < N:
        places = first + tl.arange(0, BLOCK_N)
        rows = tl.load(rows_ptr + places, mask=places < N, other=0)
        for d in range(0, D, BLOCK_D):
            dims = d + tl.arange(0, BLOCK_D)
            mask = (places < N)[:, None] & (dims < D)[None, :]
            read = mask & (places < count)[:, None]
            x = tl.load(x_ptr + rows[:, None] * x_stride + dims[None, :], mask=read, other=0.0)
            tl.store(out_ptr + places.to(tl.int64)[:, None] * out_stride + dims[None, :], x, mask=mask)


def live_rows(columns: Tensor, height: int, rows: Tensor, counts: Tensor) -> None:
    """Write the rows' order, `rows` and `counts`, for chunks of `height` positions; see the kernel."""
    n_rows = columns.shape[0]
    live_rows_kernel[(1,)](
        columns, rows, counts, n_rows, height, cdiv(n_rows, height), IGNORED,
        BLOCK if n_rows > SHORT else SHORT, num_warps=16,
    )  # fmt: skip


def gather(x: Tensor, live: Live, out: Tensor, always: bool) -> None:
    """Copy the chunk's rows of x (rows, D) to out (N, D). always: also where no row is ignored."""
    n_rows, dim = out.shape
    gather_kernel[(cdiv(n_rows, ROWS),)](
        x, live.rows, live.count, None if always else live.some, out, x.stride(0), out.stride(0), n_rows, dim,
        ROWS, min(256, power_of_2(dim)),
    )  # fmt: skip
