"""Rows of a matrix times their factors, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..runtime.launch import quick
from ..runtime.tiles import cdiv, power_of_2

ROWS = 16  # of a program


@quick
@triton.jit(do_not_specialize=["N"])
def scaled_rows_kernel(
    x_ptr,  # (N, D), rows x_stride apart
    factor_ptr,  # (N,) fp32
    out_ptr,  # (N, D), rows out_stride apart, written
    x_stride,
    out_stride,
    N,
    D,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out_i = factor_i · x_i."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dims = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = (rows < N)[:, None] & (dims < D)[None, :]
    factor = tl.load(factor_ptr + rows, mask=rows < N, other=0.0)
    x = tl.load(x_ptr + rows.to(tl.int64)[:, None] * x_stride + dims[None, :], mask=mask, other=0.0)
    out = x.to(tl.float32) * factor[:, None]
    tl.store(out_ptr + rows.to(tl.int64)[:, None] * out_stride + dims[None, :], out.to(x.dtype), mask=mask)


def scaled_rows(x: Tensor, factor: Tensor, home: Tensor | None = None) -> Tensor:
    """Rows of x (N, D) times their factors (N,) fp32, in x's dtype.

    home: memory for the result, contiguous and at least as large. None: memory of its own, where each row begins at a
    line of 128 bytes.
    """
    n_rows, dim = x.shape
    if home is None:
        out = x.new_empty(n_rows, cdiv(dim, 64) * 64)[:, :dim]
    else:
        out = home.view(-1).view(x.dtype)[: n_rows * dim].view(n_rows, dim)
    block_d = min(256, power_of_2(dim))
    scaled_rows_kernel[(cdiv(n_rows, ROWS), cdiv(dim, block_d))](
        x, factor, out, x.stride(0), out.stride(0), n_rows, dim, ROWS, block_d
    )
    return out
