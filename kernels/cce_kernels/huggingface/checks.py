"""Checks that a model is what `patch` assumes: hidden states, one product with the head's weight, its class's loss.

`patch` computes the loss from hidden states and the head's weight. It would silently skip whatever else a user or a
library has put between them. So such a model is refused, by patch and at every call.
"""

from __future__ import annotations

import inspect
import sys
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from .deferred import DeferredLogits, LogitsNeeded, View, of_zero3

_LINEAR_FORWARD = nn.Linear.forward
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_GLOBAL_HOOKS = [getattr(torch_module, f"_global{name}") for name in _HOOKS]  # for every module


def check_structure(model: Any, kind: Any) -> None:
    """Raise a TypeError unless a model's forward goes from a linear head to its class's cross-entropy.

    The forward is tried with no decoder and two tokens.
    """
    here = f"model: {kind.__module__}.{kind.__qualname__} is not supported"
    if not any(f"{base.__module__}.{base.__name__}" == _BASE for base in kind.__mro__):
        raise TypeError(f"{here}; give the model of transformers or FLA itself, before it is wrapped or compiled")
    head = model.get_output_embeddings()
    if head is None:
        raise TypeError(f"{here}: it has no head; give a model that has one (…ForCausalLM), before it is wrapped")
    if not isinstance(head, nn.Linear):
        return  # check_model says what is wrong with a head
    if of_fla(kind):
        return
    if "__class__" in inspect.unwrap(kind.forward).__code__.co_freevars:
        raise TypeError(f"{here}: its forward calls super(); write out what it calls")
    view = _Trial(model, {})
    zero = torch.zeros(1, 2, device=head.weight.device, dtype=torch.long)
    try:
        kind.forward(view, input_ids=zero, labels=zero)
    except LogitsNeeded as error:
        raise TypeError(f"{here}: {str(error).removeprefix('model: ')}") from None
    except Exception:  # more than the trial's decoder gives; the first call of the real one decides
        return
    if not view.lost:
        raise TypeError(f"{here}: its forward computes no loss from its head's logits")


def of_fla(kind: Any) -> bool:
    """Whether a class computes logits and loss as FLA's do, in one method."""
    return hasattr(kind, "_compute_logits_and_loss")


_BASE = "transformers.modeling_utils.PreTrainedModel"


class _Trial(View):
    """A view whose decoder gives zeros, and whose loss is zero."""

    lost = False  # whether the forward has asked for the loss

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        return _TrialDecoder(value, self._head.weight) if isinstance(value, nn.Module) else value

    def _loss(self, logits: Any, *_: Any, **__: Any) -> Tensor:
        if not isinstance(logits, DeferredLogits):
            raise LogitsNeeded("computes its logits elsewhere than in its head")
        self.lost = True
        return torch.zeros(())


class _TrialDecoder:
    """A module that gives zeros, and so do all modules inside. (Bart calls `self.model.decoder`.)"""

    def __init__(self, module: nn.Module, weight: Tensor) -> None:
        """weight: the head's."""
        self._module, self._weight = module, weight

    def __call__(self, *_: Any, **__: Any) -> Any:
        weight = self._weight
        return _TrialOutput((torch.zeros(1, 2, weight.shape[1], device=weight.device, dtype=weight.dtype),))

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return _TrialDecoder(value, self._weight) if isinstance(value, nn.Module) else value


class _TrialOutput(tuple):
    """The hidden states, as first item and by name, and None for every other name."""

    def __getattr__(self, name: str) -> Any:
        return self[0] if name == "last_hidden_state" else None


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
