"""`linear_log_probs`: log-probabilities of given tokens and entropies, for trainers of policies (GRPO, DPO)."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from numbers import Real
from typing import Any

from torch import Tensor

from .api import check_inputs, gradients_wanted, make_options, product_dtype, shifted
from .operators import cross_entropy, cross_entropy_and_entropy


def linear_log_probs(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    return_entropy: bool = False,
    ignore_index: int = -100,
    shift: int = 0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    accumulate: str = "kahan",
    workspace_mib: float | None = None,
    main_grad_c: Tensor | None = None,
) -> Any:
    """The targets' log-probabilities, in nats, under softmax(z / temperature), without the logits z in memory.

    z is what `linear_cross_entropy` calls the logits. A log-probability is minus the row loss, and costs as much: the
    results, the dtypes and the memory are those of linear_cross_entropy(reduction="none"). Entropies that are only read
    cost as much as its metrics. An entropy with a gradient takes four products (planner.py); if the forward pass has
    stored exponentials, they are not used.

    Args:
        e, c, targets, bias, ignore_index, shift, softcap, logit_scale, accumulate, workspace_mib, main_grad_c: as in
            `linear_cross_entropy`.
        temperature: positive and finite; the logits are divided by it, after the bias and the softcap.
        return_entropy: also return the entropy of each row's softmax.

    Returns:
        The log-probabilities, fp32, of the shape of targets[..., shift:]; or a tuple of these and the entropies, in
        nats, fp32, of the same shape. Both are differentiable once in e, c and bias. Ignored targets have 0 for both,
        and no gradient.

    Raises:
        TypeError, ValueError: an argument has the wrong type or value. The message starts with its name.
        WorkspaceTooSmall: as in `linear_cross_entropy`.
    """
    o = make_options(None, {
        "softcap": softcap, "logit_scale": logit_scale, "accumulate": accumulate, "workspace_mib": workspace_mib,
    })  # fmt: skip
    if isinstance(temperature, bool) or not isinstance(temperature, Real):
        raise TypeError(f"temperature: must be a number, got {type(temperature).__name__}")
    if not 0 < temperature < inf:
        raise ValueError(f"temperature: must be positive and finite, got {temperature}")
    targets, ignore_index = check_inputs(e, c, targets, bias, main_grad_c, ignore_index, "none", shift)
    if temperature != 1:  # softcap · tanh(x / softcap) / T = softcap / T · tanh((x / T) / (softcap / T))
        t = float(temperature)
        o = replace(o, logit_scale=o.logit_scale / t, softcap=None if o.softcap is None else o.softcap / t)
        bias = None if bias is None else bias.float() / t
    if shift:
        targets = shifted(targets, shift, ignore_index)
    shape, flat = targets.shape, targets.reshape(-1)
    if not flat.numel():
        nothing = (e.sum() + c.sum() + (0 if bias is None else bias.sum())).float().expand(shape)
        return (nothing, nothing) if return_entropy else nothing
    needs, main_grad_c = gradients_wanted(e, c, bias, main_grad_c)
    function = cross_entropy_and_entropy if return_entropy else cross_entropy
    losses, _, entropies = function(
        e.reshape(-1, e.shape[-1]), c, flat, bias, main_grad_c, None, None, ignore_index, product_dtype(e, c), "none",
        False, return_entropy, needs, *o.values(),
    )  # fmt: skip
    last = shape[-1] - shift if shift else None
    log_probs = -losses.reshape(shape)[..., :last] if shift else -losses.reshape(shape)
    if not return_entropy:
        return log_probs
    entropies = entropies.reshape(shape)
    return log_probs, entropies[..., :last] if shift else entropies
