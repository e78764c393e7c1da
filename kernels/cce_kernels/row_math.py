"""Arithmetic on numbers of each row, (N,) tensors, in torch. Every backend uses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .options import Options

Dtypes = tuple[torch.dtype | None, torch.dtype | None, torch.dtype | None]  # of the gradients of e, c and bias
# A row's "target column" is its target, or one of two negative numbers.
IGNORED, OUTSIDE = -1, -2  # the target is ignore_index; the target lies outside the vocabulary


@dataclass(frozen=True)
class Rows:
    """Statistics of each row, fp32."""

    lse: Tensor  # (N,) log-sum-exp of the logits
    nll: Tensor  # (N,) −log p of the target; 0 for ignored rows, NaN for a target outside the vocabulary
    z_above_mean: Tensor | None = None  # (N,) target logit minus mean logit, for label smoothing
    metrics: Tensor | None = None  # (2, N) whether the target's logit is the largest (1 or 0); entropy in nats
    largest: Tensor | None = None  # (N,) the largest logit except the target's, if metrics are wanted
    # (N,) what lse lost by rounding, which is more than p may lose where the logits have a common offset
    lost: Tensor | None = None


class Operands(NamedTuple):
    """What the gradients of logits are computed from, in the products' dtype; see `row_coefficients`."""

    e: Tensor  # (N, D)
    c: Tensor  # (V, D)
    bias: Tensor | None  # (V,) contiguous
    columns: Tensor  # (N,) int64, each row's target column, negative for none
    lse: Tensor  # (N,) fp32
    a: Tensor  # (N,) fp32, and b: the coefficients of the logits' gradient
    b: Tensor


def empty_metrics(like: Tensor, wanted: bool) -> Tensor | None:
    """Memory for `Rows.metrics` of like's rows, or None."""
    return like.new_empty((2, like.shape[0]), dtype=torch.float32) if wanted else None


def target_columns(targets: Tensor, ignore_index: int, vocab: int) -> Tensor:
    """Each row's target column (N,): a column, IGNORED or OUTSIDE."""
    columns = torch.where((targets >= 0) & (targets < vocab), targets, OUTSIDE)
    return torch.where(targets == ignore_index, IGNORED, columns)


def where_it_counts(x: Tensor, columns: Tensor) -> Tensor:
    """x (N,) with 0 for ignored rows and NaN for rows whose target lies outside the vocabulary."""
    return torch.where(columns >= 0, x, torch.nan).masked_fill_(columns == IGNORED, 0.0)


def assemble_loss(rows: Rows, columns: Tensor, o: Options) -> Tensor:
    """Row losses (N,): −log p, label smoothing and z_loss."""
    loss = rows.nll
    if rows.z_above_mean is not None:
        loss = loss + where_it_counts(o.label_smoothing * rows.z_above_mean, columns)
    if o.z_loss:
        loss = loss + where_it_counts(o.z_loss * rows.lse.square(), columns)
    return loss


def without_rows(e: Tensor, c: Tensor, bias: Tensor | None, main_grad_c: Tensor | None) -> Tensor:
    """Results of a call without rows, (0,) fp32, whose gradients are 0. With main_grad_c, c gets none."""
    inputs = (e, c if main_grad_c is None else None, bias)
    found = torch.cat([x[:0].reshape(-1).float() for x in inputs if x is not None])
    return found if main_grad_c is None else found.requires_grad_()


def of_targets(x: Tensor, shape: torch.Size, shift: int) -> Tensor:
    """Results of all rows (N,) in the targets' shape (..., T), without the `shift` last positions: (..., T − shift)."""
    x = x.reshape(shape)
    return x[..., : shape[-1] - shift] if shift else x


def weighted(x: Tensor, columns: Tensor, weights: Tensor | None) -> Tensor:
    """x (N,) times weights (N,), which count as 0 for ignored rows. x if weights is None."""
    return x if weights is None else x * weights.masked_fill(columns == IGNORED, 0.0)


def nonzero_divisor(total: Tensor) -> Tensor:
    """A weighted mean's divisor () from the sum of the weights (): infinity for 0, so that loss and gradients are 0."""
    return total.masked_fill(total == 0, torch.inf)


def mean_metrics(metrics: Tensor, targets: Tensor, ignore_index: int) -> dict[str, Tensor]:
    """Mean accuracy and entropy over the rows that are not ignored, 0-d; 0 if all rows are ignored."""
    counts = targets != ignore_index
    accuracy, entropy = torch.where(counts, metrics, 0.0).sum(dim=1) / counts.sum().clamp(min=1)
    return {"accuracy": accuracy, "entropy": entropy}


def reduce_loss(
    rows: Tensor, columns: Tensor, reduction: str, weights: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The row losses (N,), their sum, or their mean over the rows that are not ignored (0 if all are ignored).

    weights: (N,) fp32 or None, what each row's loss is multiplied by; a weighted mean is divided by their sum. The
    second value is the mean's divisor, () int64, or fp32 with weights; or None.
    """
    rows = weighted(rows, columns, weights)
    if reduction == "none":
        return rows, None
    if reduction == "sum":
        return rows.sum(), None
    if weights is None:
        counted = (columns != IGNORED).sum().clamp_(min=1)
    else:
        counted = nonzero_divisor(weights.masked_fill(columns == IGNORED, 0.0).sum())
    return rows.sum() / counted, counted


def mean_gradient(grad_loss: Tensor, counted: Tensor) -> Tensor:
    """dL/d(each row's weighted loss), () fp32, from dL/dloss () and the divisor of `reduce_loss` (), for a mean."""
    return grad_loss / counted


def row_coefficients(
    grad_loss: Tensor, grad_lse: Tensor | None, lse: Tensor, columns: Tensor, o: Options, lost: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The coefficients (a, b), each (N,), of the logits' gradient.

        dL/dz_iv = a_i exp(z_iv − lse_i) − b_i ((1 − s) [v = target_i] + s / V)            (s: label smoothing)

    a = (b (1 + 2 z_loss lse) + dL/dLSE) exp(−lost). b is dL/d(row loss), but 0 for ignored rows and NaN for rows whose
    target lies outside the vocabulary.

    grad_loss: dL/d(row loss), (N,), or () if all rows have the same. grad_lse: dL/dLSE, (N,), or None. lost: as in
    `Rows`.
    """
    b = where_it_counts(grad_loss, columns)
    a = b * (1 + 2 * o.z_loss * lse) if o.z_loss else b
    a = a if grad_lse is None else a + grad_lse
    return a if lost is None else a * torch.exp(-lost), b
