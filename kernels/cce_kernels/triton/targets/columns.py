"""Each row's target column in one launch; row_math.target_columns takes six for the same."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...row_math import IGNORED, OUTSIDE
from ...runtime.launch import quick
from ...runtime.tiles import cdiv

BLOCK = 1024


@triton.jit
def columns_of(
    targets_ptr, rows, stride, N, V, ignore_index, IGNORED: tl.constexpr, OUTSIDE: tl.constexpr
):  # fmt: skip
    """The target columns of `rows` from the targets (N,), stride apart: a column, IGNORED or OUTSIDE."""
    target = tl.load(targets_ptr + rows.to(tl.int64) * stride, mask=rows < N, other=0)
    column = tl.where((target >= 0) & (target < V), target, OUTSIDE)
    return tl.where(target == ignore_index, IGNORED, column)


@quick
@triton.jit(do_not_specialize=["stride", "N", "V", "ignore_index"])
def columns_kernel(
    targets_ptr,  # (N,) int64, stride apart
    columns_ptr,  # (N,) int64, written
    stride,
    N,
    V,
    ignore_index,
    IGNORED: tl.constexpr,
    OUTSIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write every row's target column."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = columns_of(targets_ptr, rows, stride, N, V, ignore_index, IGNORED, OUTSIDE)
    tl.store(columns_ptr + rows, column, mask=rows < N)


def target_columns(targets: Tensor, ignore_index: int, vocab: int) -> Tensor:
    """Each row's target column (N,) int64: a column, IGNORED or OUTSIDE (row_math.py)."""
    n_rows = targets.shape[0]
    columns = torch.empty(n_rows, dtype=torch.int64, device=targets.device)
    columns_kernel[(cdiv(n_rows, BLOCK),)](
        targets, columns, targets.stride(0), n_rows, vocab, ignore_index, IGNORED, OUTSIDE, BLOCK
    )
    return columns
