"""`linear_cross_entropy` in a causal language model of transformers or flash-linear-attention, in one line.

With labels, the patched forward runs the model's decoder and hands its hidden states and the head's weight to the
loss; without them, as in generation, the model's own forward runs.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import field, make_dataclass
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from .linear_cross_entropy import linear_cross_entropy

# By package: classes (…ForCausalLM) with a decoder, a linear head on its last hidden state, a cross-entropy and
# nothing else, and what they do to the logits in between, as options of linear_cross_entropy.
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
# The others follow from the model and the inputs of its forward, or change what it returns.
OPTIONS = (
    "preset", "workspace_mib", "accumulate", "filter_eps", "filter_unbiased", "filter_mass", "filter_e", "filter_c",
    "label_smoothing", "z_loss",
)  # fmt: skip
NO_LOGITS = (
    "a model patched by cce_kernels computes its loss without logits; call it without labels to get them, or undo "
    "the patch with cce_kernels.unpatch(model)"
)


def patch(model: Any, **options: Any) -> Any:
    """Let `model(…, labels=labels)` compute its loss by `linear_cross_entropy`, with no logits in memory.

    The loss is the model's own: labels (B, T) shifted by one, -100 ignored; the mean, or the sum divided by
    `num_items_in_batch` where that is given, as by transformers' Trainer; bias, softcap and logit scale as the model
    has them. transformers' `shift_labels` and `ignore_index` work too. The output holds loss, past_key_values,
    hidden_states and attentions; asking it for logits raises. Calls without labels are as before.

    Args:
        model: a causal language model of a class in SUPPORTED, not yet wrapped or compiled. Changed in place.
        options: those of `linear_cross_entropy` that OPTIONS names.

    Returns:
        model.

    Raises:
        TypeError: a class that is not supported.
        ValueError: a model with another loss, head or forward than its class has, or a wrong option; from the
            patched forward, where it is asked for logits or a tuple together with labels.
    """
    kind = type(model)
    package, name = kind.__module__.split(".")[0], kind.__name__.removesuffix("ForCausalLM")
    if name == kind.__name__ or name not in SUPPORTED.get(package, {}):
        supported = "; ".join(f"{package}: {', '.join(names)}" for package, names in SUPPORTED.items())
        raise TypeError(
            f"model: {kind.__module__}.{kind.__name__} is not supported; give the model itself, before it is wrapped "
            f"or compiled, as …ForCausalLM of {supported}"
        )
    if "forward" in vars(model):
        raise ValueError("model: its forward is replaced already; undo that first (cce_kernels.unpatch, if by patch)")
    if surplus := options.keys() - set(OPTIONS):
        raise ValueError(f"{min(surplus)}: patch takes only {', '.join(OPTIONS)}")
    _check_loss(model)
    _check_head(model.get_output_embeddings())
    row, target = torch.zeros(1, 8, device="cpu"), torch.zeros(1, device="cpu", dtype=torch.long)
    linear_cross_entropy(row, row, target, **options)  # a wrong option fails here, not at the first step

    original, logit_options, output_class = kind.forward, SUPPORTED[package][name], _output_class()
    signature = inspect.signature(original)

    @wraps(original)  # Trainer reads the signature
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = signature.bind(self, *args, **kwargs).arguments
        call.update(call.pop("kwargs", {}))
        if call.get("labels") is None:
            return original(self, *args, **kwargs)
        return output_class(**_loss_and_states(call, **logit_options(self), **options))

    forward.patched_by = __name__  # type: ignore[attr-defined]
    model.forward = MethodType(forward, model)
    return model


def unpatch(model: Any) -> Any:
    """Undo `patch` and return the model; ValueError if its forward is not patch's."""
    if getattr(vars(model).get("forward"), "patched_by", None) != __name__:
        raise ValueError("model: its forward is not the one that cce_kernels.patch put there")
    del model.forward
    return model


def _loss_and_states(call: dict[str, Any], **options: Any) -> dict[str, Any]:
    """What the output holds, for a forward's arguments by name, self among them."""
    model = call.pop("self")
    keep = [call.pop(name, None) for name in ("logits_to_keep", "num_logits_to_keep")]
    if any(isinstance(x, Tensor) or x for x in keep):
        raise ValueError(f"logits_to_keep: cannot be given with labels: {NO_LOGITS}")
    as_dict = call.pop("return_dict", None)
    if not (model.config.return_dict if as_dict is None else as_dict):
        raise ValueError(f"return_dict: must be True with labels, a tuple would hold logits: {NO_LOGITS}")
    labels, shifted, items = (call.pop(name, None) for name in ("labels", "shift_labels", "num_items_in_batch"))
    ignore_index = call.pop("ignore_index", -100)

    states, head = model.get_decoder()(**call, return_dict=True), model.get_output_embeddings()
    _check_head(head)
    hidden, targets = states.last_hidden_state, labels if shifted is None else shifted
    loss = linear_cross_entropy(
        hidden, head.weight, targets.to(hidden.device), bias=head.bias, shift=int(shifted is None),
        ignore_index=ignore_index, reduction="mean" if items is None else "sum", **options,
    )  # fmt: skip
    if items is not None:
        loss = loss / (items.to(loss.device) if isinstance(items, Tensor) else items)
    kept = ("past_key_values", "hidden_states", "attentions")
    return {"loss": loss, **{name: getattr(states, name, None) for name in kept}}


def _check_head(head: Any) -> None:
    """Adapters, quantised and sharded heads compute something else than a product with one weight."""
    if type(head) is not nn.Linear or hasattr(head.weight, "full_tensor"):
        raise ValueError(
            f"model: its head is {type(head).__name__} with a {type(head.weight).__name__}, it must be torch.nn.Linear "
            "with a whole weight; leave the head out of adapters, quantisation and sharding of its own"
        )


def _check_loss(model: Any) -> None:
    """Losses that are more than their class's cross-entropy."""
    if type(model).__module__.startswith("fla."):
        own = model.criterion is not None or getattr(model.config, "use_l2warp", False)
    else:
        own = getattr(model.loss_function, "__name__", None) != "ForCausalLMLoss"
    if own:
        raise ValueError("model: has a loss_function, criterion or use_l2warp of its own, which patch would pass over")


def _output_class() -> Any:
    """A ModelOutput with no logits. The caller's model has imported transformers; this package never does."""

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
