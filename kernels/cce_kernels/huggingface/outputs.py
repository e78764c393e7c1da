"""What a patched model returns: the model's own output with predictions in place of logits."""

from __future__ import annotations

import importlib
from dataclasses import field, fields, make_dataclass
from typing import Any

import torch

NO_LOGITS = (
    "a model patched by cce_kernels computes its loss without logits; call it without labels to get them, or undo "
    "the patch with cce_kernels.unpatch(model)"
)


class NoPredictions(torch.Tensor):
    """An empty tensor in the place of predictions that nobody asked for. Its use raises an error.

    Trainer takes whatever the output holds beside the loss for predictions. Without this tensor, compute_metrics would
    silently get an empty tuple, or the hidden states.
    """

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        # What libraries do to every output: look at shape and dtype, and detach it (DeepSpeed's hooks).
        if getattr(function, "__name__", "") in ("__get__", "detach"):
            return super().__torch_function__(function, types, args, kwargs or {})
        raise ValueError(
            "predictions: a model patched by cce_kernels has no logits for compute_metrics; "
            "cce_kernels.patch(model, predictions=True) gives it the predicted tokens (B, T) in their place"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return "NoPredictions()"


NO_PREDICTIONS = torch.empty(0, dtype=torch.long, device="cpu").as_subclass(NoPredictions)
_CLASSES: dict[Any, Any] = {}


def output_classes(names: dict[str, Any]) -> None:
    """Make the classes of all outputs that a model's module names, because torch.compile cannot make a class."""
    base = importlib.import_module("transformers.utils").ModelOutput
    for kind in list(names.values()):
        if isinstance(kind, type) and issubclass(kind, base) and {"loss", "logits"} <= kind.__dict__.keys():
            output_class(kind)


def output_class(kind: Any) -> Any:
    """The class of a model's output with a field `predictions` in place of `logits`."""
    if kind not in _CLASSES:
        _CLASSES[kind] = _without_logits(kind)
    return _CLASSES[kind]


def _without_logits(kind: Any) -> Any:
    """The caller's model has imported transformers; this package does not by itself."""
    model_output = importlib.import_module("transformers.utils").ModelOutput

    def no_attribute(self: Any, name: str) -> Any:
        raise AttributeError(f"logits: {NO_LOGITS}" if name == "logits" else f"{type(self).__name__} has no {name}")

    def item(self: Any, key: Any) -> Any:
        if key == "logits" or not (isinstance(key, str) or key == 0):
            raise KeyError(f"{key}: take items by name; {NO_LOGITS}")
        return model_output.__getitem__(self, key)

    names = ["predictions" if x.name == "logits" else x.name for x in fields(kind)]
    return make_dataclass(
        f"{kind.__name__}WithoutLogits",
        [(name, Any, field(default=None)) for name in names],
        bases=(model_output,),
        namespace={"__getattr__": no_attribute, "__getitem__": item, "__module__": __name__},
    )
