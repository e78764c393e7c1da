"""The reference in plain torch: it stores all logits, takes any precision, and is differentiable.

With z = softcap · tanh((scale · E Cᵀ + bias) / softcap) and LSE_i = log Σ_v exp z_iv, a row's loss is

    LSE_i − (1 − s) z_i,target − s · mean_v z_iv + z_loss · LSE_i²          (s: label smoothing)

times the row's weight. Of several targets a row, each with a weight, it is the weighted sum. A filter changes gradients
alone. It weights the entries of dL/dz as filter/rule.py says, and keeps the target's entry.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .arguments import as_integer, check_reduction_and_shift
from .filter.rule import Rule, mean_logits
from .options import Options
from .row_math import Rows, assemble_loss, reduce_loss, target_columns, where_it_counts


def reference_linear_cross_entropy(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    token_weights: Tensor | None = None,
    target_weights: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    shift: int = 0,
    dtype: torch.dtype = torch.float64,
    **options,
) -> tuple[Tensor, Tensor]:
    """Loss and log-sum-exp as `cce_kernels.linear_cross_entropy` defines them, in `dtype`, with N × V memory.

    Args:
        e: (..., D). c: (V, D). targets: (...), integers. bias: (V,) or None. token_weights: (...) or None.
            target_weights: (..., K) or None; targets are then (..., K).
        dtype: the dtype of all computation. Gradients have the inputs' own dtypes.
        options: the fields of `Options`.

    Returns:
        loss (a scalar, or (...) for reduction="none") and lse (...), both in `dtype`. With a shift, (...) is the shape
        of targets[..., shift:].

    Raises:
        TypeError, ValueError: reduction, shift or an option has a wrong type or value.
    """
    if target_weights is not None:
        each = [
            reference_linear_cross_entropy(
                e, c, t, bias=bias, token_weights=w, ignore_index=ignore_index, reduction="none", shift=shift,
                dtype=dtype, **options,
            )
            for t, w in zip(targets.unbind(-1), target_weights.unbind(-1), strict=True)
        ]  # fmt: skip
        rows = torch.stack([of_target for of_target, _ in each]).sum(dim=0)
        counts = (targets != ignore_index).any(dim=-1)[..., shift:].sum().clamp(min=1)
        return rows if reduction == "none" else rows.sum() / (counts if reduction == "mean" else 1), each[0][1]
    o, shift = Options(**options), as_integer("shift", shift)
    check_reduction_and_shift(reduction, shift, targets)
    if shift:
        e, targets = e[..., :-shift, :], targets[..., shift:]
        token_weights = None if token_weights is None else token_weights[..., shift:]
    shape = targets.shape
    e, targets = e.reshape(-1, e.shape[-1]).to(dtype), targets.reshape(-1).long()
    c = c.to(dtype)
    columns = target_columns(targets, ignore_index, c.shape[0])

    # z_e carries the gradient of e, and z_c the gradients of c and bias, because each side has a filter of its own.
    z_e = _logits(e, c.detach(), None if bias is None else bias.detach().to(dtype), o)
    z_c = _logits(e.detach(), c, None if bias is None else bias.to(dtype), o)
    if o.filter_eps is not None:
        p = torch.softmax(z_e.detach(), dim=1)
        entries = torch.arange(c.shape[0], device=c.device)
        is_target = columns[:, None] == entries
        with torch.no_grad():
            rule = Rule.of(columns, mean_logits(e, c, bias, columns, o), o)
        if o.filter_mass is not None:
            stays = rule.keeps(p, entries) | is_target
            dropped = torch.where(stays, 0, p).sum(dim=1)
            rule = rule.exact_if(rule.drops_more(dropped, o.filter_mass))
        weights = rule.weights_e(p, entries, e.shape[1], c.shape[0]), rule.weights_c(p, entries)
        for z, filtered, weight in zip((z_e, z_c), (o.filter_e, o.filter_c), weights, strict=True):
            if filtered and z.requires_grad:
                factor = torch.where(is_target, 1, weight / p.clamp(min=torch.finfo(dtype).tiny))
                z.register_hook(lambda grad, factor=factor: grad * factor)
    z = z_e + (z_c - z_c.detach())

    lse = torch.logsumexp(z, dim=1)
    z_target = z.gather(1, columns.clamp(min=0)[:, None]).squeeze(1)
    # The loss's value comes from the logits without the target's. If the model is sure, lse − z_target keeps no digit.
    others = z.detach().scatter(1, columns.clamp(min=0)[:, None], -torch.inf).logsumexp(dim=1)
    loss = lse - z_target
    precise = torch.logaddexp(others - z_target.detach(), torch.zeros_like(others))
    nll = where_it_counts(loss + (precise - loss.detach()), columns)
    rows = assemble_loss(Rows(lse, nll, z_target - z.mean(dim=1)), columns, o)
    of_rows = None if token_weights is None else token_weights.reshape(-1).to(dtype)
    loss, _ = reduce_loss(rows, columns, reduction, of_rows)
    return loss.reshape(shape if reduction == "none" else ()), lse.reshape(shape)


def _logits(e: Tensor, c: Tensor, bias: Tensor | None, o: Options) -> Tensor:
    z = o.logit_scale * (e @ c.T)
    if bias is not None:
        z = z + bias
    return z if o.softcap is None else o.softcap * torch.tanh(z / o.softcap)
