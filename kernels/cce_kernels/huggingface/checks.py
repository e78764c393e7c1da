"""Checks that a model is what `patch` assumes: hidden states, one product with the head's weight, its class's loss.

`patch` computes the loss from hidden states and the head's weight. It would silently skip whatever else a user or a
library has put between them. So such a model is refused, by patch and at every call.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from .deferred import of_zero3

_LINEAR_FORWARD = nn.Linear.forward
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_GLOBAL_HOOKS = [getattr(torch_module, f"_global{name}") for name in _HOOKS]  # for every module


def imported(module: str, distribution: str) -> Any:
    """A module of another library. Raises a ModuleNotFoundError with the command that installs it, or a newer one."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}; pip install -U {distribution}", name=error.name) from None


def check_structure(model: Any, kind: Any) -> None:
    """Raise a TypeError if a model cannot go from a head to its class's cross-entropy. Its first call says the rest."""
    here = f"model: {kind.__module__}.{kind.__qualname__} is not supported"
    bases = [f"{base.__module__}.{base.__name__}" for base in kind.__mro__]
    if "transformers.modeling_utils.PreTrainedModel" not in bases:
        raise TypeError(f"{here}; give the model of transformers or FLA itself, before it is wrapped or compiled")
    if model.get_output_embeddings() is None:
        raise TypeError(f"{here}: it has no head; give a model that has one (…ForCausalLM), before it is wrapped")
    if not of_fla(kind) and "__class__" in inspect.unwrap(kind.forward).__code__.co_freevars:
        raise TypeError(f"{here}: its forward calls super(); write out what it calls")


def of_fla(kind: Any) -> bool:
    """Whether a class computes logits and loss as FLA's do, in one method."""
    return hasattr(kind, "_compute_logits_and_loss")


def check_class(kind: Any) -> None:
    """Raise a ValueError if a class's forward is no longer its package's own. Liger, for example, replaces it."""
    own = (kind.__module__.split(".")[0], "transformers", "torch")
    function: Any = kind.forward
    while function is not None:
        if _package(function) not in own:
            raise ValueError(
                f"model: {kind.__name__}.forward was replaced by {source(function)}; patch needs the class's own"
            )
        function = getattr(function, "__wrapped__", None)


def check_model(model: Any, kind: Any) -> None:
    """Raise a ValueError if the model's head is more than a product with its weight, or its loss not its class's.

    kind: the model's class before patch. (FSDP2 may have given the model another class since.)
    """
    _check_head(model.get_output_embeddings())
    if of_fla(kind):
        own = getattr(model, "criterion", None) is None and not getattr(model.config, "use_l2warp", False)
        own = own and "_compute_logits_and_loss" not in vars(model)
    else:
        losses = sys.modules["transformers.loss.loss_utils"]
        own = model.loss_function is losses.ForCausalLMLoss and _package(losses.fixed_cross_entropy) == "transformers"
    if not own:
        raise ValueError(
            "model: has a loss_function, criterion or use_l2warp of its own, which patch would skip; remove it"
        )


def _check_head(head: Any) -> None:
    """Raise a ValueError unless the head is a plain nn.Linear without hooks and with plain tensors.

    FSDP2 may have sharded it: then its class and its tensors are FSDP2's, and its hooks torch's. Or ZeRO-3: then its
    hooks are DeepSpeed's, and the loss is computed between them.
    """
    sharded = _of_fsdp2(type(head))
    if type(head) is not nn.Linear and not sharded:
        raise ValueError(
            f"model: its head is a {type(head).__module__}.{type(head).__qualname__}, not a torch.nn.Linear; leave the "
            "head out of adapters (LoRA), quantisation and parametrizations"
        )
    if "forward" in vars(head) or nn.Linear.forward is not _LINEAR_FORWARD:
        raise ValueError(
            f"model: the forward of its head was replaced by {source(head.forward)}, which patch would skip "
            "(accelerate replaces it for a device_map of several devices and for offloading: keep the model on one)"
        )
    for name in ("weight", "bias"):
        kind = type(getattr(head, name))
        if kind not in (nn.Parameter, Tensor, type(None)) and not (sharded and kind.__name__ == "DTensor"):
            raise ValueError(
                f"model: the {name} of its head is a {kind.__name__}, it must be a plain tensor; "
                "quantisation and sharding must leave the head out"
            )
    hooks = [getattr(head, name) for name in _HOOKS]
    known = sharded or of_zero3(head)
    if any(map(_alters, hooks) if known else hooks) or any(map(_alters, _GLOBAL_HOOKS)):
        raise ValueError(
            "model: its head has forward or backward hooks (pruning, spectral_norm and weight_norm add such), "
            "which patch would skip; remove them"
        )


def _of_fsdp2(kind: type) -> bool:
    """Whether a class is nn.Linear with FSDP2's methods, which `fully_shard` makes of it."""
    names = [f"{base.__module__.split('.')[0]}.{base.__name__}" for base in kind.__bases__]
    return names == ["torch.FSDPModule", "torch.Linear"]


def _alters(hooks: dict[int, Any]) -> bool:
    """Whether any hook is neither torch's, which only watches (FlopCounterMode), nor ZeRO-3's, which gathers."""
    return any(_package(hook) not in ("torch", "deepspeed") for hook in hooks.values())


def innermost(forward: Any) -> Any:
    """The function inside wrappers of torch (autocast, torch.compile) and accelerate, which call what they wrap.

    Other wrappers may not call it. TRL's, for example, uses `functools.wraps` on the forward but calls the decoder.
    """
    while True:
        if isinstance(forward, MethodType):
            forward = forward.__func__
        elif _package(forward) in ("torch", "accelerate") and hasattr(forward, "__wrapped__"):
            forward = forward.__wrapped__
        else:
            return forward


def source(function: Any) -> str:
    """Where a function is defined. (A wrapper's `__module__` and `__qualname__` are those of the wrapped function.)"""
    function = _plain(function)
    code = getattr(function, "__code__", None)
    return f"{_module(function)}.{code.co_qualname if code else type(function).__qualname__}"


def _package(function: Any) -> str:
    """The package in which a function is defined."""
    return _module(_plain(function)).split(".")[0]


def _module(function: Any) -> str:
    """The module in which a function, or an object's class, is defined."""
    return getattr(function, "__globals__", {}).get("__name__") or type(function).__module__


def _plain(function: Any) -> Any:
    """The function inside methods and partials."""
    while isinstance(function, MethodType | partial):
        function = function.__func__ if isinstance(function, MethodType) else function.func
    return function
