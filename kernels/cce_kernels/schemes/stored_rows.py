"""Rows of operands: copied where TMA needs it, times their factors before dC's product; and what finishes dE.

Cost: each kernel reads and writes a few N × D numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime.devices import without_values
from ..runtime.launch import quick
from ..runtime.tiles import aligned, by_eights, cdiv, fits_tma, in_eights, line_of, power_of_2
from ..triton.kahan import read_sum, write_sum
from ..triton.targets.gradient import targets_of_rows
from ..triton.targets.live_rows import ALL, Live

ROWS = 16  # of a program


@quick
@triton.jit(do_not_specialize=["N"])
def scaled_rows_kernel(
    x_ptr,  # (N, D), rows x_stride apart
    factor_ptr,  # (N,) fp32; None for ones
    live_ptr,  # (N,) int64 or None: the row of x and factor at each position of out (live_rows.py)
    count_ptr,  # () int32, given with live_ptr: how many positions count; the others get 0
    out_ptr,  # (N, D), rows out_stride apart, written
    x_stride, out_stride, N, D,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    EIGHTS: tl.constexpr,  # see runtime/tiles.by_eights
):  # fmt: skip
    """out_i = factor_i · x_i, rounded to out's dtype."""
    D, x_stride, out_stride = by_eights(D, EIGHTS), by_eights(x_stride, EIGHTS), by_eights(out_stride, EIGHTS)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dims = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = (rows < N)[:, None] & (dims < D)[None, :]
    of_rows = rows
    live = rows < N
    if live_ptr is not None:
        of_rows = tl.load(live_ptr + rows, mask=rows < N, other=0)
        live &= rows < tl.load(count_ptr)
    if factor_ptr is not None:
        factor = tl.load(factor_ptr + of_rows, mask=live, other=0.0)
    x_mask = live[:, None] & (dims < D)[None, :]
    x = tl.load(x_ptr + of_rows.to(tl.int64)[:, None] * x_stride + dims[None, :], mask=x_mask, other=0.0)
    if factor_ptr is not None:
        x = x.to(tl.float32) * factor[:, None]
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * out_stride + dims[None, :]
    tl.store(out_ptrs, x.to(out_ptr.dtype.element_ty), mask=mask)


def _scale(x: Tensor, factor: Tensor | None, live: Live, out: Tensor) -> Tensor:
    n_rows, dim = out.shape
    block_d = min(256, power_of_2(dim))
    scaled_rows_kernel[(cdiv(n_rows, ROWS), cdiv(dim, block_d))](
        x, factor, live.rows, live.count, out, x.stride(0), out.stride(0), n_rows, dim, ROWS, block_d,
        in_eights(dim, x.stride(0), out.stride(0)),
    )  # fmt: skip
    return out


def prepare(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x (R, K) itself if it has this dtype and `fits_tma`, else a copy that does."""
    if x.dtype == dtype and fits_tma(x):
        return x
    if x.stride(1) != 1 or without_values(x):  # torch copies columns faster
        return aligned(x.to(dtype))
    (n_rows, dim), line = x.shape, line_of(dtype)
    return _scale(x, None, ALL, x.new_empty(n_rows, cdiv(dim, line) * line, dtype=dtype)[:, :dim])


def scaled_rows(x: Tensor, factor: Tensor, home: Tensor | None, live: Live) -> Tensor:
    """Rows of x (N, D) times their factors (N,) fp32, in x's dtype.

    live: the rows of the result. Positions that do not count hold 0. home: memory for it, see `rows_like`.
    """
    return _scale(x, factor, live, rows_like(x, len(x if live.rows is None else live.rows), home))


def rows_like(x: Tensor, n_rows: int, home: Tensor | None) -> Tensor:
    """Memory for n_rows rows like x's: the first rows of `home`, or rows that begin at lines of 128 bytes.

    home: like x, or contiguous and at least as large.
    """
    dim = x.shape[1]
    if home is None:
        return x.new_empty(n_rows, cdiv(dim, 64) * 64)[:, :dim]
    if home.dtype == x.dtype:
        return rows_of(slice(0, n_rows), home)
    return home.view(-1).view(x.dtype)[: n_rows * dim].view(n_rows, dim)


@quick
@triton.jit(do_not_specialize=["N", "splits"])
def hidden_kernel(
    part_ptr,  # (splits, N, D), splits part_stride apart: parts of w C
    lost_ptr,  # (N, D) int8 or None: rounding error of w C, with one split
    c_ptr,  # (V, D), rows c_stride apart
    columns_ptr,  # (N, TARGETS) int64, each row's target columns, negative for none
    factor_ptr,  # (N,) fp32, what w C is multiplied by
    coefficient_ptr,  # (N, TARGETS) fp32, what the targets' rows of C are multiplied by
    left_ptr,  # (N,) fp32, and the next: `RankOne`; or both None
    right_ptr,  # (D,) fp32
    scale_ptr,  # () fp32, dL/dloss; None if factor and coefficient hold it
    out_ptr,  # (N, D), written; the same memory as part_ptr's with one split
    c_stride, part_stride, N, D, splits,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    EIGHTS: tl.constexpr,  # see runtime/tiles.by_eights
    TARGETS: tl.constexpr,
):  # fmt: skip
    """dE = scale · (factor · (w C) + coefficient · C_target + left · right)."""
    D, c_stride, part_stride = by_eights(D, EIGHTS), by_eights(c_stride, EIGHTS), by_eights(part_stride, EIGHTS)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dims = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = (rows < N)[:, None] & (dims < D)[None, :]
    offsets = rows.to(tl.int64)[:, None] * D + dims[None, :]
    lost_ptrs = None if lost_ptr is None else lost_ptr + offsets
    total = read_sum(part_ptr + offsets, lost_ptrs, mask)
    part_ptrs = part_ptr + offsets
    for _ in range(splits - 1):
        part_ptrs += part_stride.to(tl.int64)
        total += tl.load(part_ptrs, mask=mask, other=0.0).to(tl.float32)
    of_targets = targets_of_rows(rows, rows < N, dims, D, columns_ptr, coefficient_ptr, c_ptr, c_stride, TARGETS)
    factor = tl.load(factor_ptr + rows, mask=rows < N, other=0.0)
    total = total * factor[:, None] + of_targets
    if right_ptr is not None:
        left = tl.load(left_ptr + rows, mask=rows < N, other=0.0)
        total += left[:, None] * tl.load(right_ptr + dims, mask=dims < D, other=0.0)[None, :]
    if scale_ptr is not None:
        total *= tl.load(scale_ptr)
    write_sum(total, out_ptr + offsets, None, mask)


# A slice takes some µs on the host, also one that covers everything.
def rows_of(part: slice, x: Tensor) -> Tensor:
    """The rows `part` of x."""
    return x if part.start == 0 and part.stop == x.shape[0] else x[part]
