"""`linear_cross_entropy`: a linear layer and its cross-entropy, without the N × V logits in memory."""

from __future__ import annotations

from functools import lru_cache
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
EPS = 2.0**-12  # the paper's filter threshold

# The options of each preset. The presets under paper/ are the variants of Wijmans et al. 2024, named as in Apple's
# package.
PRESETS: dict[str, dict[str, Any]] = {
    "cce_kahan": {"accumulate": "kahan"},
    "cce_filter": {"accumulate": "kahan", "filter_eps": EPS, "filter_unbiased": True, "filter_if_faster": True},
    "paper/cce": {"accumulate": "bf16", "filter_eps": EPS},
    "paper/cce_kahan": {"accumulate": "kahan", "filter_eps": EPS},
    "paper/cce_kahan_full_c": {"accumulate": "kahan", "filter_eps": EPS, "filter_c": False},
    "paper/cce_kahan_full_e": {"accumulate": "kahan", "filter_eps": EPS, "filter_e": False},
    "paper/cce_exact": {"accumulate": "fp32"},
}
_PRESET_DEFAULTS = {
    "filter_eps": None, "filter_unbiased": False, "filter_e": True, "filter_c": True, "filter_if_faster": False,
    "accumulate": "kahan",
}  # fmt: skip


def linear_cross_entropy(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    token_weights: Tensor | None = None,
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
    Nothing waits for the device.

    Under torch.compile the loss is a custom operator without a graph break. torch.compile compiles anew for another
    number of rows, and leaves out the check of CPU targets.

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
            average (filter_rule.py). The gradient of e takes a sample of columns; the gradients of c and bias take a
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
        return_stats: also return a dict of 0-d device tensors, the filter's statistics (filter_rule.FilterStats):
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
        WorkspaceTooSmall: workspace_mib does not hold the narrowest chunk, and a gradient is wanted. `least_mib` says
            what suffices.
    """
    options = make_options(preset, {
        "softcap": softcap, "logit_scale": logit_scale, "label_smoothing": label_smoothing, "z_loss": z_loss,
        "filter_eps": filter_eps, "filter_unbiased": filter_unbiased, "filter_mass": filter_mass, "filter_e": filter_e,
        "filter_c": filter_c, "filter_if_faster": filter_if_faster, "accumulate": accumulate,
        "workspace_mib": workspace_mib,
    })  # fmt: skip
    targets, ignore_index = check_inputs(e, c, targets, bias, main_grad_c, ignore_index, reduction, shift)
    weights = None if token_weights is None else weights_of_rows(token_weights, targets, shift)

    if shift:  # moves the targets instead of e, which would need a copy of e
        targets = shifted(targets, shift, ignore_index)
    shape, flat = targets.shape, targets if targets.dim() == 1 else targets.reshape(-1)
    stats = FilterStats.empty(e.device) if return_stats else None
    needs, main_grad_c = gradients_wanted(e, c, bias, main_grad_c)
    if flat.numel():
        loss, lse, metrics = cross_entropy(
            e if e.dim() == 2 else e.reshape(-1, e.shape[-1]), c, flat, bias, main_grad_c, stats, weights,
            ignore_index, product_dtype(e, c), reduction, return_lse, return_metrics, needs, *options.values(),
        )  # fmt: skip
    else:  # no rows: zeros that still depend on every input, so that autograd gives each one a gradient
        lse = (e.sum() + c.sum() + (0 if bias is None else bias.sum())).float().expand(0)
        loss, _ = reduce_loss(lse, flat, reduction)
        metrics = lse.detach().expand(2, 0)

    last = shape[-1] - shift if shift else None
    if reduction == "none":
        loss = loss.reshape(shape)
        loss = loss[..., :last] if shift else loss
    extras: tuple[Any, ...] = (lse.reshape(shape)[..., :last],) if return_lse else ()
    if metrics is not None and return_metrics:
        extras = (*extras, mean_metrics(metrics, flat, ignore_index))
    if stats is not None:
        extras = (*extras, FilterStats.report(stats))
    return (loss, *extras) if extras else loss


def product_dtype(e: Tensor, c: Tensor) -> torch.dtype:
    """The dtype in which e and c are multiplied: autocast's, or the promoted dtype of both."""
    device = e.device.type
    if not e.is_meta and torch.is_autocast_enabled(device):  # torch has no autocast on meta
        return torch.get_autocast_dtype(device)
    return torch.promote_types(e.dtype, c.dtype)


def gradients_wanted(
    e: Tensor, c: Tensor, bias: Tensor | None, main_grad_c: Tensor | None
) -> tuple[list[bool], Tensor | None]:
    """Whether gradients of e, c and bias are wanted; and main_grad_c, or None where c needs no gradient."""
    wanted = torch.is_grad_enabled()
    needs = [wanted and x is not None and x.requires_grad for x in (e, c, bias)]
    return needs, main_grad_c if needs[1] else None


def make_options(preset: str | None, options: dict[str, Any]) -> Options:
    """The options of a call: those given by name, and those of the preset.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: the preset is unknown, an option is given by name and by the preset, or a value is out of range or a
            tensor.
    """
    if not torch.compiler.is_compiling():
        try:
            return _known_options(preset, **options)
        except TypeError:  # from the checks, which raise it again; or a value that cannot be hashed, which they name
            pass
    return _checked_options(preset, **options)


def _checked_options(preset: str | None, **options: Any) -> Options:
    for name, value in options.items():
        if isinstance(value, Tensor):
            raise ValueError(
                f"{name}: must be a number, because options get no gradient; got a tensor. Give its .item(). A "
                "learned scale must be multiplied into e"
            )
        check_option(name, value)
    if preset is not None:
        if not isinstance(preset, str) or preset not in PRESETS:
            raise ValueError(f"preset: must be one of {', '.join(PRESETS)}, got {preset!r}")
        for name, default in _PRESET_DEFAULTS.items():
            if options.get(name, default) != default:
                raise ValueError(f"{name}: comes from preset={preset!r}; give one of the two")
        options = {**options, **_PRESET_DEFAULTS, **PRESETS[preset]}
    if options.get("filter_mass") == 0:  # nothing may be dropped: the call is exact
        none = {"filter_eps": None, "filter_unbiased": False, "filter_mass": None, "filter_if_faster": False}
        options = {**options, **none}
    return Options(**options)


_known_options = lru_cache(maxsize=1024, typed=True)(_checked_options)  # the checks take as long as a small kernel


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
    """Check the inputs; return the targets in int64 and ignore_index as an int.

    vocab: number of vocabulary entries; None for the number of c's rows.

    Raises:
        TypeError, ValueError: as `linear_cross_entropy` says.
    """
    for name, x in (("e", e), ("c", c), ("targets", targets), ("bias", bias), ("main_grad_c", main_grad_c)):
        if x is not None or name in ("e", "c", "targets"):
            check_tensor(name, x)
    ignore_index, shift = as_integer("ignore_index", ignore_index), as_integer("shift", shift)
    refuse_device(e)
    for name, x in (("e", e), ("c", c), ("bias", bias)):
        if x is not None and hasattr(x, "__tensor_flatten__"):
            raise ValueError(
                f"{name}: is a {type(x).__name__}, a tensor subclass; give a plain tensor: full_tensor() of a "
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
    # Widened first, because a narrower dtype may not hold ignore_index.
    targets = targets.long()
    if targets.device.type == "cpu" and not torch.compiler.is_compiling() and not without_values(targets):
        vocab = c.shape[0] if vocab is None else vocab
        outside = (targets != ignore_index) & ((targets < 0) | (targets >= vocab))
        if outside.any():
            first = targets[outside][0].item()
            raise ValueError(f"targets: {first} lies outside [0, {vocab}) and is not ignore_index")
    return targets, ignore_index


def shifted(targets: Tensor, shift: int, ignore_index: int) -> Tensor:
    """Targets (..., T) int64 moved `shift` places to the front; the last `shift` become ignore_index."""
    return torch.cat((targets[..., shift:], torch.full_like(targets[..., :shift], ignore_index)), dim=-1)


def weights_of_rows(token_weights: Tensor | None, targets: Tensor, shift: int) -> Tensor | None:
    """The weight of each row's loss, (N,) fp32 contiguous, checked; or None.

    Raises:
        TypeError, ValueError: token_weights is no tensor, or does not fit targets, or requires a gradient.
    """
    if token_weights is None:
        return None
    check_tensor("token_weights", token_weights)
    if token_weights.dtype not in DTYPES:
        raise ValueError(f"token_weights: must be bfloat16, float16 or float32, got {token_weights.dtype}")
    if token_weights.shape != targets.shape:
        raise ValueError(f"token_weights: must be {_sizes(targets)} like targets, got {_sizes(token_weights)}")
    if token_weights.device != targets.device:
        raise ValueError(f"token_weights: is on {token_weights.device}, targets on {targets.device}")
    if token_weights.requires_grad:
        raise ValueError("token_weights: requires a gradient, but gets none; give token_weights.detach()")
    weights = token_weights.float()
    return (shifted(weights, shift, 0) if shift else weights).reshape(-1).contiguous()


def _sizes(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)
