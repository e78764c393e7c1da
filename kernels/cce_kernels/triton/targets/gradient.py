"""The targets' part of both gradients, in fp32, where the products leave it out: p − 1 holds most of a row's gradient.

    dE_i += coefficient_i C_target        dC_v += Σ_{i: target_i = v} coefficient_i e_i

dC's sum runs over rows sorted by target, in runs of equal targets. So each row of dC has one owner at a time.

Cost: reads and writes N × D entries for each gradient. Memory: D fp32 numbers for every `PLACES` rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...runtime.launch import quick
from ...runtime.tiles import cdiv, power_of_2
from ..kahan import read_sum, write_sum
from .order import order_by_target

PLACES = 16  # rows, sorted by target, that one program adds up


@triton.jit
def targets_of_rows(
    rows, inside, dims, D, columns_ptr, coefficient_ptr, c_ptr, c_stride, TARGETS: tl.constexpr
):  # fmt: skip
    """Σ_k coefficient_ik C[columns_ik] of rows i, from columns and coefficients (N, TARGETS); negative for none."""
    total = _row_of_target(rows * TARGETS, inside, dims, D, columns_ptr, coefficient_ptr, c_ptr, c_stride)
    for k in range(1, TARGETS):
        total += _row_of_target(rows * TARGETS + k, inside, dims, D, columns_ptr, coefficient_ptr, c_ptr, c_stride)
    return total


@triton.jit
def _row_of_target(places, inside, dims, D, columns_ptr, coefficient_ptr, c_ptr, c_stride):
    coefficient = tl.load(coefficient_ptr + places, mask=inside, other=0.0)
    column = tl.load(columns_ptr + places, mask=inside, other=-1)
    c_mask = (column >= 0)[:, None] & (dims < D)[None, :]
    c = tl.load(c_ptr + column[:, None] * c_stride + dims[None, :], mask=c_mask, other=0.0).to(tl.float32)
    return c * coefficient[:, None]


@quick
@triton.jit(do_not_specialize=["N"])
def target_rows_kernel(
    c_ptr,  # (V, D), rows c_stride apart
    columns_ptr,  # (N,) int64, each row's target column, negative for none
    coefficient_ptr,  # (N,) fp32
    out_ptr,  # (N, D): a sum, written
    lost_ptr,  # (N, D) int8 or None: the sum's rounding error, written
    c_stride, N, D,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out[i] = coefficient_i C_target; 0 for a row without a target."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dims = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = (rows < N)[:, None] & (dims < D)[None, :]
    total = targets_of_rows(rows, rows < N, dims, D, columns_ptr, coefficient_ptr, c_ptr, c_stride, 1)
    offsets = rows.to(tl.int64)[:, None] * D + dims[None, :]
    lost_ptrs = None if lost_ptr is None else lost_ptr + offsets
    write_sum(total, out_ptr + offsets, lost_ptrs, mask)


@quick
@triton.jit(do_not_specialize=["N"])
def targets_kernel(
    e_ptr,  # (N, D), rows e_stride apart
    keys_ptr,  # (N,) int32, ascending: the rows' target columns, negative for none
    order_ptr,  # (N,) int64: the rows in the order of keys_ptr
    coefficient_ptr,  # (N,) fp32
    out_ptr,  # (V, D), added to
    spill_ptr,  # (programs, D) fp32: this program's part of a run that began in an earlier program, written
    e_stride, N, D,
    PLACES: tl.constexpr,  # rows of a program
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out[v] += Σ coefficient_i e_i over the rows whose target is v, for the runs that begin in this program.

    A run is a sequence of equal keys. Its rows in later programs go to spill_ptr.
    """
    start = tl.program_id(0) * PLACES
    places = start + tl.arange(0, PLACES)
    inside = places < N
    keys = tl.load(keys_ptr + places, mask=inside, other=-1)
    rows = tl.load(order_ptr + places, mask=inside, other=0)
    coefficient = tl.load(coefficient_ptr + rows, mask=inside, other=0.0)
    dims = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    e_mask = inside[:, None] & (dims < D)[None, :]
    e = tl.load(e_ptr + rows[:, None] * e_stride + dims[None, :], mask=e_mask, other=0.0)
    parts = e.to(tl.float32) * coefficient[:, None]
    earlier = tl.load(keys_ptr + start - 1, mask=start > 0, other=-1)
    last = earlier
    for i in range(tl.minimum(PLACES, N - start)):
        key = tl.load(keys_ptr + start + i)
        if (key >= 0) & (key != last):
            total = tl.sum(tl.where((keys == key)[:, None], parts, 0.0), axis=0)
            offsets = key.to(tl.int64) * D + dims
            total += read_sum(out_ptr + offsets, None, dims < D)
            write_sum(total, out_ptr + offsets, None, dims < D)
        last = key
    spilled = tl.sum(tl.where((keys == earlier)[:, None], parts, 0.0), axis=0)
    tl.store(spill_ptr + tl.program_id(0).to(tl.int64) * D + dims, spilled, mask=dims < D)


@quick
@triton.jit(do_not_specialize=["N"])
def spilled_targets_kernel(keys_ptr, out_ptr, spill_ptr, N, D, PLACES: tl.constexpr, BLOCK_D: tl.constexpr):
    """Add the parts in spill_ptr to out: the program in which a run begins sums the parts of later programs.

    Arguments as for `targets_kernel`.
    """
    start = tl.program_id(0) * PLACES
    key = tl.load(keys_ptr + start + PLACES - 1, mask=start + PLACES < N, other=-1)  # its run may continue
    earlier = tl.load(keys_ptr + start - 1, mask=start > 0, other=-1)
    follows = tl.load(keys_ptr + start + PLACES, mask=start + PLACES < N, other=-1)
    if (key >= 0) & (key != earlier) & (key == follows):
        dims = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        total = tl.zeros((BLOCK_D,), dtype=tl.float32)
        program = tl.program_id(0) + 1
        more = 1
        while more > 0:
            programs = program + tl.arange(0, PLACES)
            at = programs * PLACES
            run = tl.load(keys_ptr + at, mask=at < N, other=-1) == key
            spill_ptrs = spill_ptr + programs.to(tl.int64)[:, None] * D + dims[None, :]
            total += tl.sum(tl.load(spill_ptrs, mask=run[:, None] & (dims < D)[None, :], other=0.0), axis=0)
            program += PLACES
            more = tl.min(run.to(tl.int32), axis=0)
        offsets = key.to(tl.int64) * D + dims
        total += read_sum(out_ptr + offsets, None, dims < D)
        write_sum(total, out_ptr + offsets, None, dims < D)


@quick
@triton.jit(do_not_specialize=["N", "first", "W"])
def added_kernel(
    x_ptr,  # (N, W), rows x_stride apart, added to
    columns_ptr,  # (N, TARGETS) int64, negative for none
    value_ptr,  # (N, TARGETS) fp32
    peak_ptr,  # () fp32, what the values are divided by
    x_stride,
    first,  # the column of x's first one
    N, W,
    TARGETS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x[i, columns_ik − first] += value_ik / peak, one k after the other. A row has one owner."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    peak = tl.load(peak_ptr)
    for k in range(TARGETS):
        column = tl.load(columns_ptr + rows * TARGETS + k, mask=rows < N, other=-1)
        here = (column >= first) & (column < first + W)
        value = tl.load(value_ptr + rows * TARGETS + k, mask=here, other=0.0) / peak
        x_ptrs = x_ptr + rows.to(tl.int64) * x_stride + column - first
        x = tl.load(x_ptrs, mask=here, other=0.0).to(tl.float32) + value
        tl.store(x_ptrs, x.to(x_ptr.dtype.element_ty), mask=here)


def add_at(x: Tensor, columns: Tensor, value: Tensor, peak: Tensor, first: int) -> None:
    """x (N, W), columns `first` to first + W of a matrix, gets value (N, K) fp32 / peak () at columns (N, K)."""
    n_rows, width = x.shape
    added_kernel[(cdiv(n_rows, 128),)](
        x, columns, value, peak, x.stride(0), first, n_rows, width, columns.shape[1], 128, num_warps=4
    )


def target_rows(c: Tensor, columns: Tensor, coefficient: Tensor, out: Tensor, lost: Tensor | None) -> None:
    """out (N, D) = coefficient (N,) · the target's row of c (V, D); lost: its rounding error, or None."""
    n_rows, dim = out.shape
    block_d = min(256, power_of_2(dim))
    target_rows_kernel[(cdiv(n_rows, 16), cdiv(dim, block_d))](
        c, columns, coefficient, out, lost, c.stride(0), n_rows, dim, 16, block_d
    )


def add_by_target(e: Tensor, columns: Tensor, coefficient: Tensor, out: Tensor) -> None:
    """out[v] += Σ coefficient_i e_i over the rows whose target is v. Rows with negative columns are left out."""
    n_rows, dim = e.shape
    keys, order = columns.new_empty(n_rows, dtype=torch.int32), torch.empty_like(columns)
    order_by_target(columns, keys, order)
    block_d = min(256, power_of_2(dim))  # dimensions of one warp, so that no sum crosses warps
    programs = cdiv(n_rows, PLACES)
    spill = torch.empty(programs, dim, dtype=torch.float32, device=e.device)
    grid = (programs, cdiv(dim, block_d))
    targets_kernel[grid](
        e, keys, order, coefficient, out, spill, e.stride(0), n_rows, dim, PLACES, block_d, num_warps=1
    )
    spilled_targets_kernel[grid](keys, out, spill, n_rows, dim, PLACES, block_d)
