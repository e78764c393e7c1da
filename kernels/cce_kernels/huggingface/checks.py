"""Whether a model is what `patch` takes it for: nothing stands between its hidden states and its loss but one product
with a weight and its class's cross-entropy.

`patch` computes the loss from the head's weight, so that whatever else a user or a library has put there would be
passed over: it is refused, by patch and at every call.
"""

from __future__ import annotations

import sys
from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

_LINEAR_FORWARD = nn.Linear.forward
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_GLOBAL_HOOKS = [getattr(torch_module, f"_global{name}") for name in _HOOKS]  # for every module


def check_class(kind: Any) -> None:
    """ValueError if a model class's forward is no longer its package's own, as Liger's kernels replace it."""
    own = (kind.__module__.split(".")[0], "transformers", "torch")
    function: Any = kind.forward
    while function is not None:
        if _package(function) not in own:
            raise ValueError(
                f"model: {kind.__name__}.forward was replaced by {source(function)}; patch needs the class's own"
            )
        function = getattr(function, "__wrapped__", None)


def check_model(model: Any, kind: Any) -> None:
    """ValueError if the model's head is more than a product with its weight, or its loss is not that of its class.

    kind: its class before patch; FSDP2 gives it yet another one.
    """
    _check_head(model.lm_head)
    if kind.__module__.startswith("fla."):
        own = model.criterion is None and not getattr(model.config, "use_l2warp", False)
        own = own and "_compute_logits_and_loss" not in vars(model)
    else:
        losses = sys.modules["transformers.loss.loss_utils"]
        own = model.loss_function is losses.ForCausalLMLoss and _package(losses.fixed_cross_entropy) == "transformers"
    if not own:
        raise ValueError("model: has a loss_function, criterion or use_l2warp of its own, which patch would pass over")


def _check_head(head: Any) -> None:
    if type(head) is not nn.Linear:
        raise ValueError(
            f"model: its head is a {type(head).__module__}.{type(head).__qualname__}, not a torch.nn.Linear; leave the "
            "head out of adapters (LoRA), quantisation and parametrizations"
        )
    if "forward" in vars(head) or nn.Linear.forward is not _LINEAR_FORWARD:
        raise ValueError(
            f"model: the forward of its head was replaced by {source(head.forward)}, which patch would pass over "
            "(accelerate does so for a device_map of several devices and for offloading: keep the model on one)"
        )
    for name in ("weight", "bias"):
        if type(getattr(head, name)) not in (nn.Parameter, Tensor, type(None)):
            raise ValueError(
                f"model: the {name} of its head is a {type(getattr(head, name)).__name__}, it must be a plain tensor; "
                "leave the head out of quantisation and sharding of its own"
            )
    if any(getattr(head, name) for name in _HOOKS) or any(map(_alters, _GLOBAL_HOOKS)):
        raise ValueError(
            "model: its head has forward or backward hooks (as pruning, spectral_norm and weight_norm put there), "
            "which patch would pass over; remove them"
        )


def _alters(hooks: dict[int, Any]) -> bool:
    """Whether there are other hooks than torch's own, which only watch (FlopCounterMode)."""
    return any(_package(hook) != "torch" for hook in hooks.values())


def innermost(forward: Any) -> Any:
    """The function under wrappers by torch and accelerate, which call what they wrap (autocast, torch.compile).

    Others may not: TRL's `functools.wraps` the class's forward and calls the decoder.
    """
    while True:
        if isinstance(forward, MethodType):
            forward = forward.__func__
        elif _package(forward) in ("torch", "accelerate") and hasattr(forward, "__wrapped__"):
            forward = forward.__wrapped__
        else:
            return forward


def source(function: Any) -> str:
    """Where a function is defined: `__module__` and `__qualname__` of a wrapper say where the wrapped one is."""
    function = _plain(function)
    code = getattr(function, "__code__", None)
    return f"{_module(function)}.{code.co_qualname if code else type(function).__qualname__}"


def _package(function: Any) -> str:
    return _module(_plain(function)).split(".")[0]


def _module(function: Any) -> str:
    """Of a function, or else of an object's class."""
    return getattr(function, "__globals__", {}).get("__name__") or type(function).__module__


def _plain(function: Any) -> Any:
    """The function in a method or a partial."""
    while isinstance(function, MethodType | partial):
        function = function.__func__ if isinstance(function, MethodType) else function.func
    return function
