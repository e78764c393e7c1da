"""`patch` makes a causal language model of transformers or flash-linear-attention use `linear_cross_entropy`.

With labels, the patched forward runs the model's decoder, and gives its hidden states and the head's weight to the
loss. Without labels, as in generation, the model's own forward runs.

`patch` changes the model's class to a subclass with the same name and another forward, and stores the options on the
model. Copies, pickle, torch.save and spawned processes keep the class. The new forward reads the options at every call;
if there are none, it runs the original forward. So `unpatch` works even if a wrapper, such as accelerate's for mixed
precision, holds the patched forward.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable
from dataclasses import field, make_dataclass
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

from ..api import linear_cross_entropy
from .checks import check_class, check_model, innermost, source

# The supported classes (…ForCausalLM) of each package: a decoder `model`, a linear head `lm_head` on its last hidden
# state, and a cross-entropy. Each function returns what the class does to its logits, as options of
# linear_cross_entropy.
_PLAIN = "Gemma Glm4 Llama Mistral Olmo2 Olmo3 Phi Phi3 Qwen2 Qwen3 SmolLM3 Starcoder2"
_PLAIN_FLA = "DeltaNet GatedDeltaNet GatedDeltaProduct GLA GSA HGRN2 KDA RetNet RWKV6 Transformer"
SUPPORTED: dict[str, dict[str, Callable[[Any], dict[str, Any]]]] = {
    "transformers": {
        **dict.fromkeys(_PLAIN.split(), lambda model: {}),
        **dict.fromkeys(("Gemma2", "Gemma3"), lambda model: {"softcap": model.config.final_logit_softcapping}),
        **dict.fromkeys(("Cohere", "Cohere2"), lambda model: {"logit_scale": model.logit_scale}),
        "Granite": lambda model: {"logit_scale": 1 / model.config.logits_scaling},
    },
    "fla": dict.fromkeys(_PLAIN_FLA.split(), lambda model: {}),
}
# The options that patch takes. Other options follow from the model and its inputs, or would change the output.
OPTIONS = (
    "preset", "workspace_mib", "accumulate", "filter_eps", "filter_unbiased", "filter_mass", "filter_e", "filter_c",
    "filter_if_faster", "label_smoothing", "z_loss",
)  # fmt: skip
NO_LOGITS = (
    "a model patched by cce_kernels computes its loss without logits; call it without labels to get them, or undo "
    "the patch with cce_kernels.unpatch(model)"
)
_STATE = "_cce_options"  # the attribute with a patched model's options


def patch(model: Any, **options: Any) -> Any:
    """Let `model(…, labels=labels)` compute its loss with `linear_cross_entropy`, without logits in memory.

    The loss is the model's own. Labels (B, T) are shifted by one, and -100 is ignored. The loss is the mean, or the sum
    divided by `num_items_in_batch` if that is given (transformers' Trainer gives it). Bias, softcap and logit scale are
    the model's. transformers' `shift_labels` and `ignore_index` work, too. The output holds loss, past_key_values,
    hidden_states and attentions; asking it for logits raises an error. Calls without labels work as before. Copies,
    pickle and torch.save keep the patch.

    Args:
        model: a causal language model of a class in SUPPORTED, not yet wrapped or compiled. Changed in place.
        options: the options of `linear_cross_entropy` that OPTIONS names.

    Returns:
        model.

    Raises:
        TypeError: the class is not supported, or an option has the wrong type.
        ValueError: the model's loss, head or forward is not its class's, or an option is wrong. The patched forward
            raises it, too, if loss, head or forward was changed after patch, or if a call with labels asks for logits
            or a tuple.
    """
    if _STATE in getattr(model, "__dict__", {}):
        raise ValueError("model: is patched already; undo that first with cce_kernels.unpatch(model)")
    # A model made by `type(patched)(config)` has the patched class, but no options yet.
    kind = vars(type(model)).get("_cce_kind", type(model))
    package, name = kind.__module__.split(".")[0], kind.__name__.removesuffix("ForCausalLM")
    if name == kind.__name__ or name not in SUPPORTED.get(package, {}):
        supported = "; ".join(f"{package}: {', '.join(names)}" for package, names in SUPPORTED.items())
        raise TypeError(
            f"model: {kind.__module__}.{kind.__qualname__} is not supported; give the model itself, before it is "
            f"wrapped or compiled, as …ForCausalLM of {supported}"
        )
    if surplus := options.keys() - set(OPTIONS):
        raise ValueError(f"{min(surplus)}: patch takes only {', '.join(OPTIONS)}")
    row, target = torch.zeros(1, 8, device="cpu"), torch.zeros(1, device="cpu", dtype=torch.long)
    linear_cross_entropy(row, row, target, **options)  # raises on a wrong option now, not at the first step
    check_class(kind)
    check_model(model, kind)

    model.__class__ = _patched_class(kind)
    vars(model)[_STATE] = options
    if not is_patched(model):
        unpatch(model)
        raise ValueError(
            f"model: its forward is replaced already, by {source(model.forward)}; patch first, or undo that "
            "(accelerate replaces it for a device_map of several devices and for offloading: load the model on one)"
        )
    return model


def unpatch(model: Any) -> Any:
    """Undo `patch` and return the model.

    A wrapper that was put over the patched forward since, by accelerate for example, stays, and calls the model's own
    forward.

    Raises:
        ValueError: the model is not patched, or another library has changed its class since.
    """
    if _STATE not in getattr(model, "__dict__", {}):
        raise ValueError(f"model: a {type(model).__name__} that cce_kernels.patch has not patched; nothing to undo")
    if "_cce_kind" not in vars(type(model)):
        raise ValueError(
            f"model: its class was changed to {type(model).__name__} after patch (FSDP2 does so); unpatch first"
        )
    del vars(model)[_STATE]
    model.__class__ = type(model)._cce_kind
    return model


def is_patched(model: Any) -> bool:
    """Whether `model(…, labels=labels)` computes its loss with this package. Takes the model itself, as `patch` does.

    False if another tool has put its own forward over patch's, as TRL's SFTTrainer does. Wrappers of torch (autocast,
    torch.compile) and accelerate do not count, because they call patch's forward.
    """
    return (
        _STATE in getattr(model, "__dict__", {}) and innermost(model.forward) is _patched_class(model._cce_kind).forward
    )


class _Patched:
    """The mixin that `_patched_class` puts before the model's class."""

    _cce_kind: Any

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle through `_rebuild`, because the patched class cannot be imported."""
        reduced: Any = super().__reduce_ex__(protocol)
        return (_rebuild, (self._cce_kind,), *reduced[2:])

    def __setattr__(self, name: str, value: Any) -> None:
        """Warn if a new forward hides patch's, which is then never called again and could not raise an error."""
        was_patched = name == "forward" and is_patched(self)
        super().__setattr__(name, value)
        if was_patched and not is_patched(self):
            warnings.warn(
                f"{source(value)} replaces the forward of a model patched by cce_kernels, and computes the model's "
                "loss from now on (cce_kernels.is_patched returns False)",
                stacklevel=2,
            )


def _rebuild(kind: Any) -> Any:
    """An uninitialised instance of kind's patched class."""
    patched = _patched_class(kind)
    return patched.__new__(patched)


@cache
def _patched_class(kind: Any) -> Any:
    """A subclass of kind. Its forward computes our loss if the model has options, and is kind's own if not.

    It has kind's name, which transformers writes into config.json, and kind's module, whose source transformers reads.
    """
    check_class(kind)
    original, signature = kind.forward, inspect.signature(kind.forward)
    package, name = kind.__module__.split(".")[0], kind.__name__.removesuffix("ForCausalLM")
    logit_options, output_class = SUPPORTED[package][name], _output_class()

    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        options = vars(self).get(_STATE)
        call = signature.bind(self, *args, **kwargs).arguments
        call.update(call.pop("kwargs", {}))
        if options is None or call.get("labels") is None:
            return original(self, *args, **kwargs)
        check_model(self, kind)
        if kind.forward is not original:
            check_class(kind)
        return output_class(**_loss_and_states(call, logit_options(self), options))

    forward.__signature__ = signature  # type: ignore[attr-defined]  # Trainer reads the signature
    del forward.__wrapped__  # accelerate's unwrap_model would remove a function with this attribute
    return type(kind.__name__, (_Patched, kind), {
        "__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__,
        "_cce_kind": kind, "forward": forward,
    })  # fmt: skip


def _loss_and_states(call: dict[str, Any], logits: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The fields of the output: loss, past_key_values, hidden_states and attentions.

    Args:
        call: the forward's arguments by name, including self.
        logits: what the model does to its logits, as options of linear_cross_entropy.
        options: patch's options.
    """
    model = call.pop("self")
    keep = [call.pop(name, None) for name in ("logits_to_keep", "num_logits_to_keep")]
    if any(isinstance(x, Tensor) or x for x in keep):
        raise ValueError(f"logits_to_keep: cannot be given with labels: {NO_LOGITS}")
    as_dict = call.pop("return_dict", None)
    if not (model.config.return_dict if as_dict is None else as_dict):
        raise ValueError(f"return_dict: must be True with labels, a tuple would hold logits: {NO_LOGITS}")
    targets, items, shift, ignore_index = call.pop("labels"), call.pop("num_items_in_batch", None), 1, -100
    if not model._cce_kind.__module__.startswith("fla."):  # FLA's forward would pass these to its layers
        ignore_index = call.pop("ignore_index", ignore_index)
        if (shifted := call.pop("shift_labels", None)) is not None:
            targets, shift = shifted, 0

    states, head = model.model(**call, return_dict=True), model.lm_head
    hidden, bias = states.last_hidden_state, head.bias
    if bias is not None and "logit_scale" in logits:  # models scale e cᵀ + bias, linear_cross_entropy e cᵀ alone
        bias = bias.float() * logits["logit_scale"]
    targets = targets.to(hidden.device)
    loss = linear_cross_entropy(
        hidden, head.weight, targets, bias=bias, shift=shift, ignore_index=ignore_index,
        reduction="mean" if items is None else "sum", **logits, **options,
    )  # fmt: skip
    if items is None:  # without any target torch's mean is NaN, linear_cross_entropy's 0
        loss = torch.where((targets[..., shift:] != ignore_index).any(), loss, torch.nan)
    else:
        loss = loss / (items.to(loss.device) if isinstance(items, Tensor) else items)
    kept = ("past_key_values", "hidden_states", "attentions")
    return {"loss": loss, **{name: getattr(states, name, None) for name in kept}}


@cache
def _output_class() -> Any:
    """A ModelOutput without logits. The caller's model has imported transformers; this package does not by itself."""

    def no_attribute(self: Any, name: str) -> Any:
        raise AttributeError(f"logits: {NO_LOGITS}" if name == "logits" else f"{type(self).__name__} has no {name}")

    def item(self: Any, key: Any) -> Any:
        if key == "logits" or not (isinstance(key, str) or key == 0):
            raise KeyError(f"{key}: take items by name; {NO_LOGITS}")
        return model_output.__getitem__(self, key)

    model_output = importlib.import_module("transformers.utils").ModelOutput
    names = ("loss", "past_key_values", "hidden_states", "attentions")
    return make_dataclass(
        "CausalLMOutputWithoutLogits",
        [(name, Any, field(default=None)) for name in names],
        bases=(model_output,),
        namespace={"__getattr__": no_attribute, "__getitem__": item, "__module__": __name__},
    )
