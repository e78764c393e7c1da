"""The one public function: a linear layer and cross-entropy on top of it, without the N × V logits in
memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .arguments import as_integer, check_option, check_tensor
from .backends import refuse_device, without_values
from .filter_rule import FilterStats
from .operators import cross_entropy
from .options import Options
from .row_math import mean_metrics, reduce_loss

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
REDUCTIONS = ("mean", "sum", "none")
EPS = 2.0**-12  # of the paper

# What each name stands for; paper/…: the variants of Wijmans et al. 2024, named as in Apple's package.
PRESETS: dict[str, dict[str, Any]] = {
    "cce_kahan": {"accumulate": "kahan"},
    "cce_filter": {"accumulate": "kahan", "filter_eps": EPS, "filter_unbiased": True},
    "paper/cce": {"accumulate": "bf16", "filter_eps": EPS},
    "paper/cce_kahan": {"accumulate": "kahan", "filter_eps": EPS},
    "paper/cce_kahan_full_c": {"accumulate": "kahan", "filter_eps": EPS, "filter_c": False},
    "paper/cce_kahan_full_e": {"accumulate": "kahan", "filter_eps": EPS, "filter_e": False},
    "paper/cce_exact": {"accumulate": "fp32"},
}
_PRESET_DEFAULTS = {
    "filter_eps": None, "filter_unbiased": False, "filter_e": True, "filter_c": True, "accumulate": "kahan",
}  # fmt: skip


def linear_cross_entropy(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
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
    accumulate: str = "kahan",
    workspace_mib: float | None = None,
    main_grad_c: Tensor | None = None,
    return_lse: bool = False,
    return_metrics: bool = False,
    return_stats: bool = False,
    preset: str | None = None,
) -> Any:
    """Cross-entropy, in nats, of the logits softcap · tanh((logit_scale · e cᵀ + bias) / softcap).

    Differentiable in e, c and bias, once; each gradient comes back in its input's dtype. With retain_graph=True any
    number of backward passes can follow one another: where the first one uses up stored exponentials (planner.py), the
    later ones make the logits again, in as much workspace and a third more time. Under torch.compile a
    custom operator, without a graph break (and without the check of CPU targets), compiled anew for another number
    of rows. NVIDIA GPUs run Triton kernels, CPUs and other GPUs a blockwise torch path with the same results and memory
    bound (backends/__init__.py says which); TRITON_INTERPRET=1 runs the kernels on CPU tensors. Results are the same
    bit for bit from call to call. Nothing waits for the device.

    The signature is wide because every option is a keyword of its own, as in torch.nn.functional.cross_entropy.

    Args:
        e: (..., D) hidden states; c: (V, D) classifier; bf16, fp16 or fp32 each. Two dtypes are promoted to
            their common one (bf16 with fp32: all in fp32); under autocast both are taken in autocast's. fp32
            is multiplied in IEEE fp32. On a GPU, an input whose rows are not contiguous and 16-byte aligned
            is copied, as is one of another dtype than the products'.
        targets: (...) integers in [0, V). One outside raises on the CPU and makes the loss NaN on a GPU.
        bias: (V,) or None.
        ignore_index: targets with this value add nothing to loss and gradients.
        reduction: "mean" over the targets that are not ignored (0 if all are), "sum", or "none": row losses
            (...).
        shift: e at position t predicts the target at t + shift, along the last dimension of targets; row
            losses and LSE then have the shape of targets[..., shift:].
        softcap: positive, or None for none.
        label_smoothing: as in torch.nn.functional.cross_entropy.
        z_loss: adds z_loss · LSE², averaged like the loss.
        filter_eps: drop entries of (softmax − onehot) with a probability below it from the gradients, never
            the target's; None: exact gradients. Not together with label_smoothing.
        filter_unbiased: entries below filter_eps are not dropped, but estimated from a sample of columns (for e) and of
            rows (for c and bias), so that gradients are right on average (filter_rule.py). What is drawn follows from
            the targets, the sizes and the order of the entries' logits from the mean of e.
        filter_mass: largest softmax mass, in [0, 1), that may be dropped from a row: a call where filter_eps would
            drop more of any is computed exactly. 0: every one is, whatever filter_eps says.
        filter_e, filter_c: whether the filter applies to the gradient of e, and to those of c and bias. Only
            one of them costs one more product.
        accumulate: how a gradient is summed over chunks: "kahan" (its own dtype, and what rounding lost in 8
            bits beside it), "fp32", or "bf16" (its own dtype, plainly).
        workspace_mib: memory for the chunk of N × V numbers that exists at one time, in MiB; more is faster.
            Sums take 1 byte an entry of a 16-bit gradient besides (see accumulate), and a scheme whose sums and
            parts would take more than workspace_mib in their turn is not chosen. Default where three products
            suffice (planner.py): a third of the logits in 16 bits, 2 N V / 3 bytes, but at least 256 MiB where
            there are as many, and at most 2048 MiB; else 256 MiB, or 256 columns of N rows where these take more.
            Too little for the narrowest chunk is refused at the call, if a gradient is wanted. On CPU tensors it
            bounds all extra memory, in the forward pass too.
        main_grad_c: (V, D) fp32 buffer that c's gradient, if c requires one, is added to, unrounded; c itself then gets
            none.
        return_lse: also return the log-sum-exp of each row's logits, fp32, differentiable.
        return_metrics: also return a dict of 0-d device tensors, means over the targets that are not ignored:
            accuracy (the target's logit is larger than every other) and entropy (of the softmax, nats).
        return_stats: also return a dict of 0-d device tensors: entries_kept (share), dropped_mass_mean,
            dropped_mass_p99 and dropped_mass_max (over rows whose loss has a gradient), exact (0 or 1); see
            filtered.FilterStats. The backward pass fills them in; NaN until then, and under activation
            checkpointing, which hands backward to a second call. Breaks torch.compile's graph.
        preset: a name in PRESETS, in place of filter_eps, filter_unbiased, filter_e, filter_c and accumulate.

    Returns:
        loss (fp32); a tuple of it and of lse, metrics and stats as far as they are asked for, in this order.

    Raises:
        TypeError: an argument is no tensor, number, integer or bool where it must be one; the message starts with its
            name.
        ValueError: an argument has the wrong shape, dtype, layout, device or value; likewise.
        WorkspaceTooSmall: that of workspace_mib; its least_mib would do.
    """
    options = make_options(preset, {
        "softcap": softcap, "logit_scale": logit_scale, "label_smoothing": label_smoothing, "z_loss": z_loss,
        "filter_eps": filter_eps, "filter_unbiased": filter_unbiased, "filter_mass": filter_mass, "filter_e": filter_e,
        "filter_c": filter_c, "accumulate": accumulate, "workspace_mib": workspace_mib,
    })  # fmt: skip
    targets, ignore_index = check_inputs(e, c, targets, bias, main_grad_c, ignore_index, reduction, shift)

    if shift:  # move the targets, not the hidden states: no copy of e
        targets = shifted(targets, shift, ignore_index)
    shape, flat = targets.shape, targets.reshape(-1)
    stats = FilterStats.empty(e.device) if return_stats else None
    needs, main_grad_c = gradients_wanted(e, c, bias, main_grad_c)
    if flat.numel():
        loss, lse, metrics = cross_entropy(
            e.reshape(-1, e.shape[-1]), c, flat, bias, main_grad_c, stats, ignore_index, product_dtype(e, c),
            reduction, return_lse, return_metrics,
            needs, *options.values(),
        )  # fmt: skip
    else:  # a sum over nothing, differentiable in all the same
        lse = (e.sum() + c.sum() + (0 if bias is None else bias.sum())).float().expand(0)
        loss, _ = reduce_loss(lse, flat, ignore_index, reduction)
        metrics = lse.detach().expand(2, 0)

    last = shape[-1] - shift if shift else None
    if reduction == "none":
        loss = loss.reshape(shape)
        loss = loss[..., :last] if shift else loss
    lse = lse.reshape(shape)
    extras = ((lse[..., :last] if shift else lse),) if return_lse else ()
    if return_metrics:
        extras = (*extras, mean_metrics(metrics, flat, ignore_index))
    if stats is not None:
        extras = (*extras, FilterStats.report(stats))
    return (loss, *extras) if extras else loss


def product_dtype(e: Tensor, c: Tensor) -> torch.dtype:
    """What e and c are multiplied in."""
    device = e.device.type
    if not e.is_meta and torch.is_autocast_enabled(device):  # torch has no autocast on meta
        return torch.get_autocast_dtype(device)
    return torch.promote_types(e.dtype, c.dtype)


def gradients_wanted(
    e: Tensor, c: Tensor, bias: Tensor | None, main_grad_c: Tensor | None
) -> tuple[list[bool], Tensor | None]:
    """Whether gradients of e, c and bias are wanted; main_grad_c, unless c is to have no gradient."""
    wanted = torch.is_grad_enabled()
    needs = [wanted and x is not None and x.requires_grad for x in (e, c, bias)]
    return needs, main_grad_c if needs[1] else None


def make_options(preset: str | None, options: dict[str, Any]) -> Options:
    """The options of a call by name, and those that a preset stands for.

    Raises:
        TypeError: an option of the wrong type.
        ValueError: an unknown preset, an option that is given in both ways, or a value out of range or in a tensor.
    """
    for name, value in options.items():
        if isinstance(value, Tensor):
            raise ValueError(
                f"{name}: must be a number, as no gradient reaches it, got a tensor; give .item() of it, or e "
                "multiplied by a scale that is learned"
            )
        check_option(name, value)
    if preset is not None:
        if not isinstance(preset, str) or preset not in PRESETS:
            raise ValueError(f"preset: must be one of {', '.join(PRESETS)}, got {preset!r}")
        for name, default in _PRESET_DEFAULTS.items():
            if options.get(name, default) != default:
                raise ValueError(f"{name}: comes from preset={preset!r}; give one of the two")
        options = {**options, **_PRESET_DEFAULTS, **PRESETS[preset]}
    if options.get("filter_mass") == 0:  # nothing may be dropped
        options = {**options, "filter_eps": None, "filter_unbiased": False, "filter_mass": None}
    return Options(**options)


def check_inputs(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    main_grad_c: Tensor | None,
    ignore_index: int,
    reduction: str,
    shift: int,
    vocab: int | None = None,
) -> tuple[Tensor, int]:
    """Targets in int64 and ignore_index as a plain number; or the errors that `linear_cross_entropy` promises.

    vocab: what the targets lie in; None: c's rows.
    """
    for name, x in (("e", e), ("c", c), ("targets", targets), ("bias", bias), ("main_grad_c", main_grad_c)):
        if x is not None or name in ("e", "c", "targets"):
            check_tensor(name, x)
    ignore_index, shift = as_integer("ignore_index", ignore_index), as_integer("shift", shift)
    refuse_device(e)
    for name, x in (("e", e), ("c", c), ("bias", bias)):
        if x is not None and hasattr(x, "__tensor_flatten__"):
            raise ValueError(
                f"{name}: is a {type(x).__name__}, a tensor made of others; give a plain one: full_tensor() of a "
                "DTensor (or to_local() and vocabulary_parallel_linear_cross_entropy), clone() of an "
                "AsyncCollectiveTensor"
            )
        if x is not None and x.dtype not in DTYPES:
            raise ValueError(f"{name}: must be bfloat16, float16 or float32, got {x.dtype}")
        if x is not None and x.device != e.device:
            raise ValueError(f"{name}: is on {x.device}, e on {e.device}")
    if e.dim() < 1 or c.dim() != 2 or e.shape[-1] != c.shape[1] or 0 in c.shape:
        raise ValueError(f"c: must be (V, D) for e (..., D), none of them 0, got {_sizes(c)} for {_sizes(e)}")
    if targets.shape != e.shape[:-1]:
        raise ValueError(f"targets: must be {_sizes(e[..., 0])} like e without D, got {_sizes(targets)}")
    if targets.device != e.device:
        raise ValueError(f"targets: is on {targets.device}, e on {e.device}")
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise ValueError(f"targets: must be integers, got {targets.dtype}")
    if bias is not None and bias.shape != c.shape[:1]:
        raise ValueError(f"bias: must be (V,) = {_sizes(c[:, 0])}, got {_sizes(bias)}")
    if main_grad_c is not None:
        fits = main_grad_c.shape == c.shape and main_grad_c.dtype == torch.float32 and main_grad_c.is_contiguous()
        if not fits or main_grad_c.device != c.device:
            raise ValueError(f"main_grad_c: must be contiguous fp32 {_sizes(c)} on {c.device}, like c")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    if shift < 0 or (shift and (targets.dim() == 0 or shift > targets.shape[-1])):
        last = targets.shape[-1] if targets.dim() else 0
        raise ValueError(f"shift: must lie in [0, {last}], the last dimension of targets, got {shift}")
    # In 64 bits before anything is compared with ignore_index, which a narrower type may not hold.
    targets = targets.long()
    if targets.device.type == "cpu" and not torch.compiler.is_compiling() and not without_values(targets):
        vocab = c.shape[0] if vocab is None else vocab
        outside = (targets != ignore_index) & ((targets < 0) | (targets >= vocab))
        if outside.any():
            first = targets[outside][0].item()
            raise ValueError(f"targets: {first} lies outside [0, {vocab}) and is not ignore_index")
    return targets, ignore_index


def shifted(targets: Tensor, shift: int, ignore_index: int) -> Tensor:
    """Targets (..., T) int64 moved `shift` places to the front, ignore_index behind them."""
    return torch.cat((targets[..., shift:], torch.full_like(targets[..., :shift], ignore_index)), dim=-1)


def _sizes(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)
