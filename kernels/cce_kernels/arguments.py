"""The arguments of a call: presets and options, and checks. Each error message starts with the argument's name."""

from __future__ import annotations

import operator
from functools import lru_cache
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from .backends import refuse_device
from .filter.rule import FilterStats
from .options import NAMES, Call, Inputs, Options, Place
from .row_math import IGNORED, OUTSIDE, target_columns
from .runtime.devices import without_values

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
_OR_NONE = ("softcap", "filter_eps", "filter_mass", "workspace_mib")
FLAGS = ("filter_unbiased", "filter_e", "filter_c", "filter_if_faster")
Tensors = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]  # e, c, targets, bias and main_grad_c


def checked(
    e: Tensor, c: Tensor, targets: Tensor, bias: Tensor | None, token_weights: Tensor | None,
    main_grad_c: Tensor | None, options: dict[str, Any], *, preset: str | None = None, ignore_index: int = -100,
    reduction: str = "mean", shift: int = 0, return_lse: bool = False, return_metrics: bool = False,
    return_stats: bool = False, place: Place | None = None, target_weights: Tensor | None = None,
) -> tuple[Inputs, Call, torch.Size]:  # fmt: skip
    """The tensors of a call with rows in one dimension, all else about it, and the shape of the targets (...).

    The only visit to the checks. The arguments are those of `linear_cross_entropy`; options are the fields of
    `Options`, by name. Over several ranks (`place`) the row losses are reduced later (parallel/api.py).

    Raises:
        TypeError, ValueError, RuntimeError: as `linear_cross_entropy` says.
    """
    o = make_options(preset, options)
    if place is not None and o.filter_eps is not None:  # over shards a filter is never faster
        if not o.filter_if_faster:
            raise ValueError(
                "filter_eps: cannot combine with a vocabulary over several ranks; give preset='cce_filter', which is "
                "exact there, or no filter"
            )
        o = o.without_filter()
    check_flags(return_lse=return_lse, return_metrics=return_metrics, return_stats=return_stats)
    vocab = 0 if place is None else sum(place.shards)
    given, every_target, every_weight, weights = targets, None, None, None
    if target_weights is not None:
        _check_target_weights(e, targets, target_weights, token_weights, o)
        targets = targets[..., 0]
    targets, ignore_index = check_inputs((e, c, targets, bias, main_grad_c), ignore_index, reduction, shift, vocab)
    if token_weights is not None:
        check_weights("token_weights", token_weights, targets)
        weights = token_weights.float()
        weights = (shifted(weights, shift, 0) if shift else weights).reshape(-1).contiguous()
    if target_weights is not None:
        targets, every_target, every_weight = _first_targets(
            given, target_weights, ignore_index, shift, vocab or c.shape[0]
        )
        weights = every_weight.sum(dim=1)
    elif shift:  # moves the targets instead of e, which would need a copy of e
        targets = shifted(targets, shift, ignore_index)
    wanted = torch.is_grad_enabled()
    needs = wanted and e.requires_grad, wanted and c.requires_grad, wanted and bias is not None and bias.requires_grad
    uniform = reduction != "none" and not return_lse
    inputs = Inputs(
        e if e.dim() == 2 else e.reshape(-1, e.shape[-1]), c, targets if targets.dim() == 1 else targets.reshape(-1),
        None if bias is None else bias.contiguous(), main_grad_c if needs[1] else None,
        FilterStats.empty(e.device) if return_stats else None, weights, every_target, every_weight,
    )  # fmt: skip
    call = Call(
        o, _product_dtype(e, c), ignore_index, reduction if place is None else "none", uniform,
        return_lse if place is None else not uniform, return_metrics, needs, place,
    )  # fmt: skip
    return inputs, call, targets.shape


def _product_dtype(e: Tensor, c: Tensor) -> torch.dtype:
    """The dtype in which e and c are multiplied: autocast's, or the promoted dtype of both."""
    device = e.device.type
    if not e.is_meta and torch.is_autocast_enabled(device):  # torch has no autocast on meta
        return torch.get_autocast_dtype(device)
    return e.dtype if e.dtype == c.dtype else torch.promote_types(e.dtype, c.dtype)


# ------------------------------------------------------------------------------------------------------------ options
def make_options(preset: str | None, options: dict[str, Any]) -> Options:
    """The options of a call: those given by name, and those of the preset.

    Raises:
        TypeError: an option is unknown or has the wrong type.
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
        if name not in NAMES:  # of the functions that take options as keywords
            raise TypeError(f"{name}: is no option; the options are {', '.join(NAMES)}")
        if isinstance(value, Tensor):
            raise ValueError(
                f"{name}: must be a number, because options get no gradient; got a tensor. Give its .item(). A "
                "learned scale must be multiplied into e"
            )
        if name in FLAGS:
            check_flags(**{name: value})
        elif name != "accumulate" and not (value is None and name in _OR_NONE):
            if isinstance(value, bool) or not isinstance(value, Real):
                kind = "a number or None" if name in _OR_NONE else "a number"
                raise TypeError(f"{name}: must be {kind}, got {_kind(value)}")
            if type(value) not in (float, int):  # of NumPy, or a fraction
                options[name] = float(value)
    if preset is not None:
        if not isinstance(preset, str) or preset not in PRESETS:
            raise ValueError(f"preset: must be one of {', '.join(PRESETS)}, got {preset!r}")
        for name in ("filter_eps", *FLAGS, "accumulate"):
            if options.get(name, default := getattr(Options, name)) != default:
                raise ValueError(f"{name}: comes from preset={preset!r}; give one of the two")
        options = {**options, **PRESETS[preset]}
    if options.get("filter_mass") == 0:  # nothing may be dropped: the call is exact
        none = {"filter_eps": None, "filter_unbiased": False, "filter_mass": None, "filter_if_faster": False}
        options = {**options, **none}
    return Options(**options)


_known_options = lru_cache(maxsize=1024, typed=True)(_checked_options)  # the checks take as long as a small kernel


# ------------------------------------------------------------------------------------------------------------- tensors
def check_inputs(tensors: Tensors, ignore_index: int, reduction: str, shift: int, vocab: int) -> tuple[Tensor, int]:
    """Check e, c, targets, bias and main_grad_c; return the targets in int64 and ignore_index as an int.

    vocab: the vocabulary size, all shards together; 0 for the number of c's rows.

    Inputs like those of an earlier call pass at once, because the checks take as long as a small kernel. Inputs on the
    CPU are checked each time, because their targets' values are, too.

    Raises:
        TypeError, ValueError, RuntimeError: as `linear_cross_entropy` says.
    """
    if torch.compiler.is_compiling():
        return _check_inputs(tensors, ignore_index, reduction, shift, vocab)
    refuse_transforms()
    rest, targets = (type(ignore_index), reduction, type(shift), shift), tensors[2]
    try:
        like = (*[None if x is None else _metadata(x) for x in tensors], *rest)
        passed = like in _PASSED and -(2**63) <= ignore_index < 2**63  # _PASSED holds calls with an int alone
    except (AttributeError, RuntimeError, TypeError):  # no tensor, or a nested one; the checks say what is wrong
        return _check_inputs(tensors, ignore_index, reduction, shift, vocab)
    if passed:
        return targets if targets.dtype == torch.int64 else targets.long(), ignore_index
    checked = _check_inputs(tensors, ignore_index, reduction, shift, vocab)
    if targets.is_cuda and type(ignore_index) is int:
        if len(_PASSED) >= MOST_PASSED:
            _PASSED.clear()
        _PASSED.add(like)
    return checked


MOST_PASSED = 1024
_PASSED: set[tuple] = set()  # the metadata of inputs that have passed all checks


def _metadata(x: Tensor) -> tuple:
    """All that the checks read of a tensor on a GPU."""
    return type(x), x.shape, x.dtype, x.device, x.layout, x.is_contiguous()


def _check_inputs(tensors: Tensors, ignore_index: int, reduction: str, shift: int, vocab: int) -> tuple[Tensor, int]:
    """All checks of `check_inputs`."""
    e, c, targets, bias, main_grad_c = tensors
    for name, x in (("e", e), ("c", c), ("targets", targets), ("bias", bias), ("main_grad_c", main_grad_c)):
        if x is not None or name in ("e", "c", "targets"):
            check_tensor(name, x)
    ignore_index, shift = as_integer("ignore_index", ignore_index), as_integer("shift", shift)
    refuse_device(e)
    for name, x in (("e", e), ("c", c), ("bias", bias)):
        if x is None:
            continue
        if hasattr(x, "__tensor_flatten__"):
            quantised = type(x).dequantize is not Tensor.dequantize
            remedy = "its dequantize()" if quantised else (
                "a plain tensor: full_tensor() of a DTensor (or to_local() and "
                "vocabulary_parallel_linear_cross_entropy), clone() of an AsyncCollectiveTensor"
            )  # fmt: skip
            raise ValueError(f"{name}: is a {type(x).__name__}, a tensor subclass; give {remedy}")
        if x.dtype not in DTYPES:
            remedy = "; dequantize it" if x.itemsize == 1 else ""
            raise ValueError(f"{name}: must be bfloat16, float16 or float32, got {x.dtype}{remedy}")
        if x.device != e.device:
            raise ValueError(f"{name}: is on {x.device}, e on {e.device}")
    if e.dim() < 1 or c.dim() != 2 or e.shape[-1] != c.shape[1] or 0 in c.shape:
        raise ValueError(f"c: must be (V, D) for e (..., D), none of them 0, got {_sizes(c)} for {_sizes(e)}")
    if targets.shape != e.shape[:-1]:
        several = "; several targets a row need target_weights" if targets.shape[:-1] == e.shape[:-1] else ""
        raise ValueError(f"targets: must be {_sizes(e[..., 0])} like e without D, got {_sizes(targets)}{several}")
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
    check_reduction_and_shift(reduction, shift, targets)
    targets = targets.long()  # first, because a narrower dtype may not hold ignore_index
    _refuse_outside(targets, ignore_index, vocab or c.shape[0])
    return targets, ignore_index


def _refuse_outside(targets: Tensor, ignore_index: int, vocab: int) -> None:
    """Raise a ValueError for a target outside the vocabulary, on the CPU."""
    if targets.device.type == "cpu" and not torch.compiler.is_compiling() and not without_values(targets):
        outside = (targets != ignore_index) & ((targets < 0) | (targets >= vocab))
        if outside.any():
            first = targets[outside][0].item()
            raise ValueError(f"targets: {first} lies outside [0, {vocab}) and is not ignore_index={ignore_index}")


def _check_target_weights(e: Any, targets: Any, target_weights: Any, token_weights: Any, o: Options) -> None:
    """Raise an error if several targets a row and their weights do not fit, or meet what they cannot combine with."""
    check_tensor("e", e)
    check_tensor("targets", targets)
    check_tensor("target_weights", target_weights)
    if targets.dim() != e.dim() or targets.shape[:-1] != e.shape[:-1] or not targets.shape[-1]:
        raise ValueError(
            f"targets: must be {_sizes(e[..., 0])} and K with target_weights, at least one a row, got {_sizes(targets)}"
        )
    check_weights("target_weights", target_weights, targets)
    if token_weights is not None:
        raise ValueError(
            "token_weights: cannot combine with target_weights; give target_weights * token_weights[..., None]"
        )
    if o.filter_eps is not None:
        raise ValueError("target_weights: cannot combine with a filter (filter_eps); give preset='cce_kahan'")


def _first_targets(
    targets: Tensor, weights: Tensor, ignore_index: int, shift: int, vocab: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's first target (...) that is not ignored; all targets' columns (N, K), that one first; their weights.

    An ignored target has the weight 0, and one outside the vocabulary NaN.
    """
    targets, weights = targets.long(), weights.float()
    _refuse_outside(targets, ignore_index, vocab)
    if shift:
        targets, weights = shifted(targets.mT, shift, ignore_index).mT, shifted(weights.mT, shift, 0).mT
    first = (targets != ignore_index).int().argmax(dim=-1)
    k = targets.shape[-1]
    places = torch.arange(k, device=targets.device).expand_as(targets)
    places = places.scatter(-1, first[..., None], 0)  # the first target there changes places with this one
    places[..., 0] = first
    targets, weights = targets.gather(-1, places), weights.gather(-1, places)
    columns = target_columns(targets, ignore_index, vocab)
    weights = weights.masked_fill(columns == IGNORED, 0.0).masked_fill(columns == OUTSIDE, torch.nan)
    return targets[..., 0], columns.reshape(-1, k).contiguous(), weights.reshape(-1, k).contiguous()


def shifted(targets: Tensor, shift: int, ignore_index: int) -> Tensor:
    """Targets (..., T) int64 moved `shift` places to the front; the last `shift` become ignore_index."""
    return torch.cat((targets[..., shift:], torch.full_like(targets[..., :shift], ignore_index)), dim=-1)


def refuse_transforms(*gradients: Tensor | None) -> None:
    """Raise a RuntimeError inside a transform of torch.func, and for batched gradients.

    A kernel cannot read the memory of their tensors.
    """
    functorch = torch._C._functorch
    batched = any(x is not None and functorch.is_legacy_batchedtensor(x) for x in gradients)
    if batched or functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(
            "cce_kernels: torch.func transforms (vmap, grad, jvp, …) and batched gradients (is_grads_batched) are not "
            "supported; give all rows to one call, and take gradients with backward() or torch.autograd.grad"
        )


# ------------------------------------------------------------------------------------------- checks that others share
def check_reduction_and_shift(reduction: Any, shift: int, targets: Tensor) -> None:
    """Raise a ValueError if there is no such reduction, or if shift moves the targets (...) too far."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    last = targets.shape[-1] if targets.dim() else 0
    if not 0 <= shift <= last:
        raise ValueError(f"shift: must lie in [0, {last}], the last dimension of targets, got {shift}")


def check_weights(name: str, x: Any, targets: Tensor) -> None:
    """Raise an error if x cannot be weights of targets."""
    check_tensor(name, x)
    if x.dtype not in DTYPES:
        raise ValueError(f"{name}: must be bfloat16, float16 or float32, got {x.dtype}")
    if x.requires_grad:
        raise ValueError(f"{name}: requires a gradient, but gets none; give {name}.detach()")
    if x.shape != targets.shape:
        raise ValueError(f"{name}: must be {_sizes(targets)} like targets, got {_sizes(x)}")
    if x.device != targets.device:
        raise ValueError(f"{name}: is on {x.device}, targets on {targets.device}")


def check_tensor(name: str, x: Any) -> None:
    """Raise a TypeError if x is no tensor, and a ValueError if x is nested, sparse or otherwise not strided."""
    if not isinstance(x, Tensor):
        remedy = "; give its weight" if isinstance(x, nn.Module) else ""
        raise TypeError(f"{name}: must be a tensor, got {_kind(x)}{remedy}")
    if x.is_nested:
        raise ValueError(f"{name}: is a nested tensor; give its values, or a padded tensor with ignored targets")
    if x.layout is not torch.strided:
        raise ValueError(f"{name}: must be a dense tensor, got one of layout {x.layout}; give its to_dense()")


def as_integer(name: str, x: Any) -> int:
    """x as an int. Raises a TypeError for other types (None, True, 2.0), a ValueError for what does not fit int64."""
    try:
        if isinstance(x, bool):
            raise TypeError
        found = operator.index(x)
    except TypeError:
        raise TypeError(f"{name}: must be an integer, got {_kind(x)}") from None
    if not -(2**63) <= found < 2**63:
        raise ValueError(f"{name}: must fit 64 bits, got {found}")
    return found


def check_flags(**flags: Any) -> None:
    """Raise a TypeError if a value is neither True nor False."""
    for name, x in flags.items():
        if not isinstance(x, bool):
            raise TypeError(f"{name}: must be True or False, got {_kind(x)}")


def _sizes(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def _kind(x: Any) -> str:
    """How a message names x: by its value if it is a number, string or None, else by its type."""
    return repr(x) if x is None or isinstance(x, bool | int | float | str) else type(x).__name__
