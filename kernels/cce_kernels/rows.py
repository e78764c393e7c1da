"""The per-row arithmetic around the kernels, in torch: N numbers each, shared by every implementation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .options import Options


@dataclass(frozen=True)
class Rows:
    """Per row, fp32: log-sum-exp, target logit, mean logit (with label smoothing) (N,); metrics (2, N), if asked for:
    whether the target's logit is the largest (1 or 0), and the entropy of the softmax, in nats."""

    lse: Tensor
    z_target: Tensor
    z_mean: Tensor | None = None
    metrics: Tensor | None = None


def empty_metrics(like: Tensor, wanted: bool) -> Tensor | None:
    return like.new_empty((2, like.shape[0]), dtype=torch.float32) if wanted else None


def target_columns(targets: Tensor, ignore_index: int, vocab: int) -> Tensor:
    """Each row's target column (N,), or -1 where the row is ignored or the target lies outside the
    vocabulary."""
    inside = (targets != ignore_index) & (targets >= 0) & (targets < vocab)
    return torch.where(inside, targets, -1)


def assemble_loss(rows: Rows, targets: Tensor, columns: Tensor, ignore_index: int, o: Options) -> Tensor:
    """Row losses (N,): 0 where ignored, NaN where the target lies outside the vocabulary."""
    loss = rows.lse - rows.z_target
    if rows.z_mean is not None and o.label_smoothing:
        loss = loss + o.label_smoothing * (rows.z_target - rows.z_mean)
    if o.z_loss:
        loss = loss + o.z_loss * rows.lse.square()
    loss = torch.where(columns >= 0, loss, torch.nan)
    return torch.where(targets == ignore_index, 0.0, loss)


def mean_metrics(metrics: Tensor, targets: Tensor, ignore_index: int) -> dict[str, Tensor]:
    """Mean accuracy and entropy over the rows that are not ignored (0 if all are), 0-d."""
    counts = targets != ignore_index
    accuracy, entropy = torch.where(counts, metrics, 0.0).sum(dim=1) / counts.sum().clamp(min=1)
    return {"accuracy": accuracy, "entropy": entropy}


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
