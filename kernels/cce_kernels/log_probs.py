"""What trainers ask of logits beside the loss: log-probabilities of tokens and entropies; the most probable tokens."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from .arguments import check_flags, check_tensor, checked
from .operators import cross_entropy
from .options import MIB
from .parallel.sharding import any_distributed
from .row_math import of_targets


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
    cost at most 3 % more time (H200, six shapes). An entropy with a gradient takes four products (planner.py); if the
    forward pass has stored exponentials, they are not used.

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
        WorkspaceTooSmall, RuntimeError: as in `linear_cross_entropy`.
    """
    numbers: dict[str, Any] = {
        "softcap": softcap, "logit_scale": logit_scale, "accumulate": accumulate, "workspace_mib": workspace_mib,
    }  # fmt: skip
    if any_distributed(e, c, targets, bias):
        from .parallel.dtensors import of_dtensors

        return of_dtensors(
            linear_log_probs, e, c, targets, bias, main_grad_c, ignore_index=ignore_index, shift=shift, spread=False,
            temperature=temperature, return_entropy=return_entropy, **numbers,
        )  # fmt: skip
    inputs, call, shape = checked(
        e, c, targets, bias, None, main_grad_c, numbers, ignore_index=ignore_index, reduction="none", shift=shift
    )
    check_flags(return_entropy=return_entropy)
    if isinstance(temperature, bool) or not isinstance(temperature, Real):
        raise TypeError(f"temperature: must be a number, got {type(temperature).__name__}")
    if not 0 < temperature < inf:
        raise ValueError(f"temperature: must be positive and finite, got {temperature}")
    if temperature != 1:  # softcap · tanh(x / softcap) / T = softcap / T · tanh((x / T) / (softcap / T))
        t, o = float(temperature), call.options
        o = replace(o, logit_scale=o.logit_scale / t, softcap=None if o.softcap is None else o.softcap / t)
        call = call._replace(options=o)
        inputs = inputs._replace(bias=None if bias is None else bias.float() / t)
    losses, _, metrics = cross_entropy(inputs, call._replace(with_metrics=return_entropy))
    log_probs = of_targets(-losses, shape, shift)
    if metrics is None or not return_entropy:
        return log_probs
    return log_probs, of_targets(metrics[1].masked_fill(inputs.targets == call.ignore_index, 0), shape, shift)


@torch.no_grad()
def predicted_tokens(
    e: Tensor, c: Tensor, *, bias: Tensor | None = None, logit_scale: float = 1.0, workspace_mib: float = 64
) -> Tensor:
    """The tokens with the largest logits logit_scale · e cᵀ + bias, without all logits in memory.

    A softcap does not change which logit is largest. The logits are torch's product in the dtype in which
    `linear_cross_entropy` multiplies; where several entries have the same rounded logit, one of them is returned.

    Args:
        e: (..., D) hidden states. c: (V, D) the linear layer's weight. bias: (V,) or None. Their dtypes are those of
            `linear_cross_entropy`; e or c of another dtype than the product's is copied.
        logit_scale: what the products e cᵀ are multiplied by.
        workspace_mib: MiB for the logits of a block of rows. A block has at least one row.

    Returns:
        Token ids (...), int64.

    Raises:
        TypeError, ValueError: an argument has the wrong type or value. The message starts with its name.
    """
    check_tensor("e", e)
    if any_distributed(c, bias):
        from .parallel.dtensors import plain_heads

        c, bias = plain_heads(c, bias, None)
    inputs, call, shape = checked(
        e, c, e.new_zeros(e.shape[:-1], dtype=torch.long), bias, None, None,
        {"logit_scale": logit_scale, "workspace_mib": workspace_mib},
    )  # fmt: skip
    options, dtype = call.options, call.dtype
    rows, weight = inputs.e.to(dtype), c.to(dtype)
    entry = dtype.itemsize + (0 if bias is None else 4)  # a bias is added in fp32
    size = max(1, int((options.workspace_mib or 64) * MIB) // (len(weight) * entry))
    found = rows.new_empty(len(rows), dtype=torch.long)
    for block, out in zip(rows.split(size), found.split(size), strict=True):
        logits = block @ weight.T
        if bias is not None:
            logits = logits.float().mul_(options.logit_scale).add_(bias)
        elif options.logit_scale < 0:
            logits.neg_()
        torch.argmax(logits, dim=-1, out=out)
        del logits  # before the next block's
    return found.view(shape)
