"""`linear_cross_entropy`: a linear layer and its cross-entropy, without the N × V logits in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .arguments import PRESETS, checked
from .filter.rule import FilterStats
from .operators import cross_entropy
from .parallel.sharding import any_distributed
from .row_math import mean_metrics, of_targets

__all__ = ["PRESETS", "linear_cross_entropy"]


def linear_cross_entropy(
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
    softcap: float | None = None,
    logit_scale: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    filter_eps: float | None = None,
    filter_unbiased: bool = False,
    filter_mass: float | None = None,
    filter_e: bool = True,
    filter_c: bool = True,
    filter_if_faster: bool = False,
    accumulate: str = "kahan",
    workspace_mib: float | None = None,
    main_grad_c: Tensor | None = None,
    return_lse: bool = False,
    return_metrics: bool = False,
    return_stats: bool = False,
    preset: str | None = None,
) -> Any:
    """Cross-entropy, in nats, of the logits softcap · tanh((logit_scale · e cᵀ + bias) / softcap).

    Differentiable once in e, c and bias; each gradient has its input's dtype. retain_graph=True allows several
    backward passes. The first one may use up stored exponentials (planner.py). Later ones then recompute the logits,
    in the same workspace and in a third more time.

    NVIDIA GPUs run Triton kernels. CPUs and other GPUs run blockwise torch, with the same results and the same bound on
    memory (backends/__init__.py). TRITON_INTERPRET=1 runs the kernels on CPU tensors. Two calls give the same bits.
    Nothing waits for the device. A number that is added to all logits of a row costs no precision where products are
    in fp32 (docs/develop/kernel_methods.md, also for 16 bits).

    Under torch.compile the loss is a custom operator without a graph break. torch.compile compiles anew for another
    number of rows, and leaves out the check of CPU targets.

    DTensors: parallel/dtensors.py says where they are computed. A weight sharded by FSDP2 is gathered, and its gradient
    is averaged over the ranks and scattered. A weight sharded by rows under a DTensor e spreads the vocabulary. A
    DTensor e gives the loss of all ranks' rows, as a DTensor; targets and token_weights are then all ranks', too.

    The signature is wide because every option is a keyword of its own, as in torch.nn.functional.cross_entropy. The
    function is long because it describes each option here.

    Args:
        e: (..., D) hidden states, bf16, fp16 or fp32. c: (V, D) the linear layer's weight, one of the same dtypes. The
            products use the promoted dtype of both (bf16 and fp32 give fp32), or autocast's. fp32 is multiplied in
            IEEE fp32. On a GPU an input is copied if its dtype is not the products', if its rows are not contiguous,
            or if 16-bit rows do not begin at lines of 128 bytes (D not a multiple of 64).
        targets: (...) integers in [0, V). Another value raises an error on the CPU and makes the loss NaN on a GPU.
        bias: (V,) or None.
        token_weights: (...) like targets, bf16, fp16 or fp32, or None. Each row's loss, with label smoothing and
            z_loss, is multiplied by the weight of its target; with a shift these are token_weights[..., shift:].
            Weights may be negative. They get no gradient. Weights of ignored targets are not used. LSE and metrics
            have no weights.
        target_weights: (..., K), or None. targets are then (..., K): a row's loss is Σ_k w_k l_k, each l_k the loss
            with the target k alone. Without z_loss that is (Σ_k w_k) · LSE − Σ_k w_k · logit_k: soft labels, whose
            weights need not sum to 1. The mean is over the rows with a target that is not ignored. Weights may be
            negative, and get no gradient. Put the likeliest target of a row first: accuracy means the first one that
            is not ignored. Takes some 50 bytes a target beside the workspace. Cannot combine with filter_eps,
            token_weights, or a DTensor e.
        ignore_index: targets with this value add nothing to the loss and the gradients.
        reduction: "mean" over the targets that are not ignored (0 if all are), "sum", or "none" for the row losses
            (...). With token_weights w the mean of losses l is Σ w l / Σ w, both sums over the targets that are not
            ignored; it is 0 if Σ w is 0.
        shift: e at position t predicts the target at t + shift, along the last dimension of targets. Row losses and
            LSE then have the shape of targets[..., shift:].
        softcap: a positive number, or None for no softcap.
        logit_scale: what the products e cᵀ are multiplied by.
        label_smoothing: as in torch.nn.functional.cross_entropy.
        z_loss: adds z_loss · LSE² to each row's loss.
        filter_eps: entries of (softmax − onehot) with a probability below filter_eps are dropped from the gradients,
            except the target's. None gives exact gradients. Cannot combine with label_smoothing. Every call is
            filtered, unless filter_mass or filter_if_faster says otherwise.
        filter_unbiased: estimates the entries below filter_eps instead of dropping them, so that gradients are right on
            average (filter/rule.py). The gradient of e takes a sample of columns; the gradients of c and bias take a
            sample of rows. The sample depends on the targets, the sizes and the order of mean(e) cᵀ alone.
        filter_mass: the largest softmax mass, in [0, 1), that the filter may drop from a row. If any row would lose
            more, the whole call is exact. 0 makes every call exact.
        filter_e, filter_c: whether the filter applies to the gradient of e, and to the gradients of c and bias.
            Filtering only one costs one more product.
        filter_if_faster: filters only where the planner expects at least 15 % less time than for exact gradients.
            Otherwise the call is exact: it takes the time and memory of a call without filter_eps, and the statistics'
            `exact` is 1. The planner decides from shapes, dtypes, options and workspace_mib alone (planner.py). At the
            default filter_eps it filters bf16 calls with 49,152 entries or more and some thousands of rows, without
            bias and softcap. Devices without kernels and vocabularies over several GPUs are always exact.
        accumulate: how a gradient is summed over chunks (accumulator.py): "kahan", in its own dtype with 8 bits of
            rounding error beside each value; "fp32"; or "bf16", in its own dtype with plain rounding.
        workspace_mib: MiB for the chunk of N × V numbers that exists at one time. More memory is faster. A compensated
            sum takes 1 byte more for each entry of a 16-bit gradient (see accumulate). Three products are
            chosen only if their sums fit workspace_mib, too (planner.py). On CPU tensors workspace_mib bounds all extra
            memory, also in the forward pass. Defaults:
              * three products: a chunk's exponentials take at most 2048 MiB. Several chunks and their sums take at most
                2 N V bytes, the logits in 16 bits. Less memory is taken where that costs at most 4 % of the time
                (planner.py);
              * four products: 256 MiB, or 256 columns of N rows if these take more.
        main_grad_c: (V, D) fp32 buffer. c's gradient, if c requires one, is added to it unrounded; c.grad stays as it
            is.
        return_lse: also return each row's log-sum-exp of the logits, fp32, differentiable.
        return_metrics: also return a dict of 0-d device tensors, means over the targets that are not ignored, each with
            weight 1. accuracy: whether the target's logit is larger than every other. entropy: of the softmax, in nats.
        return_stats: also return a dict of 0-d device tensors, the filter's statistics (filter.rule.FilterStats):
            entries_kept, dropped_mass_mean, dropped_mass_p99, dropped_mass_max and exact. They are NaN until the
            backward pass fills them in. Under activation checkpointing they stay NaN, because backward belongs to a
            second call. Breaks torch.compile's graph.
        preset: a name in PRESETS; sets filter_eps, filter_unbiased, filter_e, filter_c, filter_if_faster and
            accumulate. "cce_filter" is about speed: it filters only if that is faster. "paper/..." filter always.

    Returns:
        The loss (fp32), or a tuple of the loss and each of lse, metrics and stats that is asked for, in this order.

    Raises:
        TypeError: an argument must be a tensor, number, integer or bool, and is not. The message starts with its name.
        ValueError: an argument has the wrong shape, dtype, layout, device or value. The message starts with its name.
        WorkspaceTooSmall: workspace_mib does not hold the narrowest chunk, and a gradient is wanted or torch computes
            the loss (on a CPU, for example). `least_mib` says what suffices.
        RuntimeError: the call is inside a torch.func transform; or, in a backward pass, its gradients are batched, or
            the derivative of a gradient is asked for.
    """
    numbers: dict[str, Any] = {
        "softcap": softcap, "logit_scale": logit_scale, "label_smoothing": label_smoothing, "z_loss": z_loss,
        "filter_eps": filter_eps, "filter_unbiased": filter_unbiased, "filter_mass": filter_mass, "filter_e": filter_e,
        "filter_c": filter_c, "filter_if_faster": filter_if_faster, "accumulate": accumulate,
        "workspace_mib": workspace_mib,
    }  # fmt: skip
    if any_distributed(e, c, targets, bias, token_weights, target_weights):
        from .parallel.dtensors import of_dtensors

        return of_dtensors(
            linear_cross_entropy, e, c, targets, bias, main_grad_c, ignore_index=ignore_index, reduction=reduction,
            shift=shift, token_weights=token_weights, target_weights=target_weights, return_lse=return_lse,
            return_metrics=return_metrics, return_stats=return_stats, preset=preset, **numbers,
        )  # fmt: skip
    inputs, call, shape = checked(
        e, c, targets, bias, token_weights, main_grad_c, numbers, preset=preset, ignore_index=ignore_index,
        reduction=reduction, shift=shift, return_lse=return_lse, return_metrics=return_metrics,
        return_stats=return_stats, target_weights=target_weights,
    )  # fmt: skip
    loss, lse, metrics = cross_entropy(inputs, call)
    loss = of_targets(loss, shape, shift) if reduction == "none" else loss
    extras: tuple[Any, ...] = (of_targets(lse, shape, shift),) if return_lse else ()
    if metrics is not None and return_metrics:
        extras = (*extras, mean_metrics(metrics.detach(), inputs.targets, call.ignore_index))
    if inputs.stats is not None:
        extras = (*extras, FilterStats.report(inputs.stats))
    return (loss, *extras) if extras else loss


def try_options(**options: Any) -> None:
    """Raise the error that `linear_cross_entropy` raises for wrong options, before there are any tensors."""
    row = torch.zeros(1, 8, dtype=torch.float32, device="cpu")
    linear_cross_entropy(row, row, torch.zeros(1, dtype=torch.long, device="cpu"), **options)
