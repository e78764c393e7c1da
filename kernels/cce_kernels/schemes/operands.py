"""Operands of the schemes: e and c in the products' dtype, with rows that TMA reads fast.

Cost: nothing for an operand that fits; else it is read and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime.devices import without_values
from ..runtime.launch import quick
from ..runtime.tiles import aligned, by_eights, cdiv, fits_tma, in_eights, line_of, power_of_2

ROWS = 16  # of a program


@quick
@triton.jit(do_not_specialize=["N"])
def copied_kernel(
    x_ptr,  # (N, D), rows x_stride apart
    out_ptr,  # (N, D), rows out_stride apart, written
    x_stride,
    out_stride,
    N,
    D,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EIGHTS: tl.constexpr,  # see runtime/tiles.by_eights
):
    """out = x, rounded to out's dtype."""
    D, x_stride, out_stride = by_eights(D, EIGHTS), by_eights(x_stride, EIGHTS), by_eights(out_stride, EIGHTS)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    dims = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = (rows < N)[:, None] & (dims < D)[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_stride + dims[None, :], mask=mask)
    tl.store(out_ptr + rows[:, None] * out_stride + dims[None, :], x.to(out_ptr.dtype.element_ty), mask=mask)


def prepare(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x (R, K) itself if it has this dtype and `fits_tma`, else a copy that does."""
    if x.dtype == dtype and fits_tma(x):
        return x
    if x.stride(1) != 1 or without_values(x):  # torch copies columns faster
        return aligned(x.to(dtype))
    (n_rows, dim), line = x.shape, line_of(dtype)
    out = x.new_empty(n_rows, cdiv(dim, line) * line, dtype=dtype)
    block_d = min(256, power_of_2(dim))
    copied_kernel[(cdiv(n_rows, ROWS), cdiv(dim, block_d))](
        x, out, x.stride(0), out.stride(0), n_rows, dim, ROWS, block_d, in_eights(dim, x.stride(0), out.stride(0))
    )
    return out[:, :dim]
