"""The per-row arithmetic around the kernels, in torch: N numbers each, shared by every implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from .options import Options


def target_columns(targets: Tensor, ignore_index: int, vocab: int) -> Tensor:
    """Each row's target column (N,), or -1 where the row is ignored or the target lies outside the
    vocabulary."""
    inside = (targets != ignore_index) & (targets >= 0) & (targets < vocab)
    return torch.where(inside, targets, -1)


def assemble_loss(
    lse: Tensor,
    z_target: Tensor,
    z_mean: Tensor | None,
    targets: Tensor,
    columns: Tensor,
    ignore_index: int,
    o: Options,
) -> Tensor:
    """Row losses (N,): 0 where ignored, NaN where the target lies outside the vocabulary."""
    loss = lse - z_target
    if z_mean is not None and o.label_smoothing:
        loss = loss + o.label_smoothing * (z_target - z_mean)
    if o.z_loss:
        loss = loss + o.z_loss * lse.square()
    loss = torch.where(columns >= 0, loss, torch.nan)
    return torch.where(targets == ignore_index, 0.0, loss)


def reduce_loss(rows: Tensor, targets: Tensor, ignore_index: int, reduction: str, shape: torch.Size) -> Tensor:
    """Rows (N,) to a sum, a mean over the rows that are not ignored (0 if all are), or `shape`."""
    if reduction == "none":
        return rows.reshape(shape)
    total = rows.sum()
    if reduction == "sum":
        return total
    return total / (targets != ignore_index).sum().clamp(min=1)


def row_weights(grad_loss: Tensor | float, targets: Tensor, columns: Tensor, ignore_index: int) -> Tensor:
    """dL/d(row's loss) (N,) as it applies: 0 where ignored, NaN where the target lies outside the vocabulary."""
    weights = torch.where(columns >= 0, grad_loss, torch.nan)
    return torch.where(targets == ignore_index, 0.0, weights)


def row_coefficients(
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    lse: Tensor,
    targets: Tensor,
    columns: Tensor,
    ignore_index: int,
    o: Options,
) -> tuple[Tensor, Tensor]:
    """(a, b), both (N,), of the gradient a_i p_iv − b_i ((1 − s) [v = target] + s / V) with respect to
    z_iv."""
    b = row_weights(grad_loss, targets, columns, ignore_index)
    a = b * (1 + 2 * o.z_loss * lse) if o.z_loss else b
    return a if grad_lse is None else a + grad_lse, b
