"""Label smoothing without a softcap: its part of dL/dz, −b_i s / V in every column, is a matrix of rank one.

    mean_v z_iv = scale · e_i · (Σ_v C_v) / V + mean(bias)
    dE_i −= scale · b_i (s / V) Σ_v C_v        dC_v −= scale · (s / V) Σ_i b_i e_i

So neither the loss nor the gradients need a sum over the logits. triton/matmul.py adds these terms in fp32 before it
rounds a gradient. A softcap's slope differs by entry, so that a softcap needs the sums (logits.py) and four products.

Cost: reads C once for its sum, and e once for each of the two sums over e.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..options import Options
from ..row_math import where_it_counts
from ..runtime.launch import quick
from ..runtime.tiles import cdiv, multiprocessors

ROWS, COLS = 64, 128  # of a block


@quick
@triton.jit(do_not_specialize=["R", "rows_per_part"])
def column_sum_kernel(
    x_ptr,  # (R, K), rows x_stride apart
    weight_ptr,  # (R,) fp32 or None
    out_ptr,  # (parts, K) fp32, written
    x_stride, R, K, rows_per_part,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """out[part] = Σ weight_i x_i over the part's rows."""
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    first = tl.program_id(1) * rows_per_part
    total = tl.zeros((COLS,), dtype=tl.float32)
    for row in range(first, tl.minimum(first + rows_per_part, R), ROWS):
        rows = row + tl.arange(0, ROWS)
        mask = (rows < R)[:, None] & (cols < K)[None, :]
        x = tl.load(x_ptr + rows.to(tl.int64)[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            x *= tl.load(weight_ptr + rows, mask=rows < R, other=0.0)[:, None]
        total += tl.sum(x, axis=0)
    tl.store(out_ptr + tl.program_id(1).to(tl.int64) * K + cols, total, mask=cols < K)


@quick
@triton.jit(do_not_specialize=["N"])
def row_products_kernel(
    e_ptr,  # (N, D), rows e_stride apart
    vector_ptr,  # (D,) fp32
    out_ptr,  # (N,) fp32, written
    e_stride, N, D,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """out_i = e_i · vector."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    for first in range(0, D, COLS):
        cols = first + tl.arange(0, COLS)
        mask = (rows < N)[:, None] & (cols < D)[None, :]
        e = tl.load(e_ptr + rows.to(tl.int64)[:, None] * e_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(e * tl.load(vector_ptr + cols, mask=cols < D, other=0.0)[None, :], axis=1)
    tl.store(out_ptr + rows, total, mask=rows < N)


def column_sum(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """Σ weight_i x_i (K,) fp32 over the rows of x (R, K). weight: (R,) fp32, or None for ones."""
    n_rows, width = x.shape
    wanted = cdiv(4 * multiprocessors(x), cdiv(width, COLS))  # parts, to occupy every multiprocessor
    rows_per_part = cdiv(cdiv(n_rows, wanted), ROWS) * ROWS
    parts = cdiv(n_rows, rows_per_part)
    out = torch.empty(parts, width, dtype=torch.float32, device=x.device)
    column_sum_kernel[(cdiv(width, COLS), parts)](
        x, weight, out, x.stride(0), n_rows, width, rows_per_part, ROWS, COLS, num_warps=4
    )
    return out.sum(dim=0)


def above_mean_logit(z_target: Tensor, e: Tensor, c_sum: Tensor, bias: Tensor | None, vocab: int, o: Options) -> Tensor:
    """z_target (N,) fp32, a logit of each row of e (N, D), minus the row's mean logit, (N,) fp32. No softcap.

    c_sum: (D,), the sum of C's `vocab` rows. bias: (V,) or None. An offset of the bias cancels before anything is
    rounded.
    """
    out = torch.empty(e.shape[0], dtype=torch.float32, device=e.device)
    row_products_kernel[(cdiv(e.shape[0], ROWS),)](
        e, c_sum, out, e.stride(0), e.shape[0], e.shape[1], ROWS, COLS, num_warps=4
    )
    if bias is not None:
        z_target = (z_target.double() - bias.mean(dtype=torch.float64)).float()
    return z_target - out * (o.logit_scale / vocab)


def smoothed_share(
    grad_loss: Tensor, columns: Tensor, weights: Tensor | None, vocab: int, o: Options
) -> Tensor:  # fmt: skip
    """−scale · b_i s / V (N,) fp32: what label smoothing adds to dL/d(e · c) in every column.

    grad_loss: dL/d(row loss), () or (N,). weights: (N,) fp32 or None, what each row's loss is multiplied by.
    """
    grad_loss = grad_loss.float() if weights is None else grad_loss.float() * weights
    return where_it_counts(grad_loss, columns).mul_(-o.logit_scale * o.label_smoothing / vocab)
