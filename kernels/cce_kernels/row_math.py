"""The per-row arithmetic around the kernels, in torch: N numbers each, shared by every implementation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .options import Options

IGNORED, OUTSIDE = -1, -2  # in place of a column: the row does not count; its target is no entry of the vocabulary


@dataclass(frozen=True)
class Rows:
    """Per row, fp32: log-sum-exp; −log p of the target (0 where ignored, NaN where it lies outside the vocabulary);
    with label smoothing, target logit less mean logit (N,); metrics (2, N), if asked for: whether the target's logit
    is the largest (1 or 0), and the entropy of the softmax, in nats; with them, the largest logit but the target's."""

    lse: Tensor
    nll: Tensor
    z_above_mean: Tensor | None = None
    metrics: Tensor | None = None
    largest: Tensor | None = None


def empty_metrics(like: Tensor, wanted: bool) -> Tensor | None:
    return like.new_empty((2, like.shape[0]), dtype=torch.float32) if wanted else None


def target_columns(targets: Tensor, ignore_index: int, vocab: int) -> Tensor:
    """Each row's target column (N,), IGNORED or OUTSIDE."""
    columns = torch.where((targets >= 0) & (targets < vocab), targets, OUTSIDE)
    return torch.where(targets == ignore_index, IGNORED, columns)


def where_it_counts(x: Tensor, columns: Tensor) -> Tensor:
    """x (N,), 0 where the row is ignored, NaN where its target lies outside the vocabulary."""
    return torch.where(columns >= 0, x, torch.nan).masked_fill_(columns == IGNORED, 0.0)


def assemble_loss(rows: Rows, columns: Tensor, o: Options) -> Tensor:
    """Row losses (N,)."""
    loss = rows.nll
    if rows.z_above_mean is not None:
        loss = loss + where_it_counts(o.label_smoothing * rows.z_above_mean, columns)
    if o.z_loss:
        loss = loss + where_it_counts(o.z_loss * rows.lse.square(), columns)
    return loss


def mean_metrics(metrics: Tensor, targets: Tensor, ignore_index: int) -> dict[str, Tensor]:
    """Mean accuracy and entropy over the rows that are not ignored (0 if all are), 0-d."""
    counts = targets != ignore_index
    accuracy, entropy = torch.where(counts, metrics, 0.0).sum(dim=1) / counts.sum().clamp(min=1)
    return {"accuracy": accuracy, "entropy": entropy}


def reduce_loss(rows: Tensor, targets: Tensor, ignore_index: int, reduction: str) -> tuple[Tensor, Tensor | None]:
    """Rows (N,) as they are, their sum, or their mean over those that are not ignored (0 if all are); and, for a mean,
    what the sum was divided by."""
    if reduction == "none":
        return rows, None
    if reduction == "sum":
        return rows.sum(), None
    counts = torch.ne(targets, ignore_index, out=torch.empty_like(targets))  # 0 or 1: as a bool, sum() would copy it
    counted = counts.sum().clamp_(min=1)
    return rows.sum() / counted, counted


def row_coefficients(
    grad_loss: Tensor, grad_lse: Tensor | None, lse: Tensor, columns: Tensor, o: Options
) -> tuple[Tensor, Tensor]:
    """(a, b), both (N,), of the gradient a_i p_iv − b_i ((1 − s) [v = target] + s / V) with respect to z_iv.

    grad_loss: dL/d(row loss), (N,), or () if all rows have the same.
    """
    b = where_it_counts(grad_loss, columns)
    a = b * (1 + 2 * o.z_loss * lse) if o.z_loss else b
    return a if grad_lse is None else a + grad_lse, b
