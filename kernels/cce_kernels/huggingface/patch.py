"""`patch` makes a causal language model of transformers or flash-linear-attention use `linear_cross_entropy`.

With labels, the patched forward runs the model's own forward on a view of the model (deferred.py). The view's head
computes no logits, and the view's loss takes hidden states and the head's weight. FLA's models need no view, because
they compute logits and loss in one method. Without labels, as in generation, the model's own forward runs unchanged.

`patch` changes the model's class to a subclass with the same name and another forward, and stores the options on the
model, where the forward reads them at every call. So copies and pickles keep the patch, and `unpatch` works even if a
wrapper, such as accelerate's for mixed precision, holds the patched forward.
"""

from __future__ import annotations

import inspect
import warnings
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

from ..api import try_options
from .checks import check_class, check_model, check_structure, innermost, of_fla, source
from .deferred import DeferredLogits, LogitsNeeded, View
from .outputs import NO_LOGITS, NO_PREDICTIONS, output_class, output_classes

# The options that patch takes. Other options follow from the model and its inputs, or would change the output.
OPTIONS = (
    "preset", "workspace_mib", "accumulate", "filter_eps", "filter_unbiased", "filter_mass", "filter_e", "filter_c",
    "filter_if_faster", "label_smoothing", "z_loss",
)  # fmt: skip
_STATE = "_cce_options"  # the attribute with a patched model's options
_PREDICTS = "_cce_predictions"  # the attribute that says whether evaluation returns predictions


def patch(model: Any, *, predictions: bool = False, **options: Any) -> Any:
    """Let `model(…, labels=labels)` compute its loss with `linear_cross_entropy`, without logits in memory.

    The loss is the model's own. Labels (B, T) are shifted by one, and -100 is ignored. The loss is the mean, or the sum
    divided by `num_items_in_batch` if that is given (transformers' Trainer gives it). Bias, softcap, logit scale and
    the auxiliary loss of experts are the model's. transformers' `shift_labels` and `ignore_index` work, too. The output
    holds what the model's own output holds, without logits; asking it for logits raises an error. Calls without labels
    work as before. Copies, pickle and torch.save keep the patch.

    Args:
        model: a causal language model of transformers or FLA, not yet wrapped or compiled. Changed in place. Its class
            does not matter, its structure does: a torch.nn.Linear as head, whose output its forward at most scales and
            caps before the class's cross-entropy (`loss_function`).
        predictions: whether evaluation (no gradients, `model.eval()`) also returns `predictions` (B, T), the tokens
            with the largest logits. Trainer's compute_metrics gets them in place of logits. They take one more product
            with the head. Without this option, compute_metrics raises an error.
        options: the options of `linear_cross_entropy` that OPTIONS names.

    Returns:
        model.

    Raises:
        TypeError: the model is of another kind, or an option has the wrong type.
        ValueError: the model's loss, head or forward is not its class's, or an option is wrong. The patched forward
            raises it, too, if it does more with its logits than described, if loss, head or forward was changed after
            patch, or if a call with labels asks for logits or a tuple.
    """
    if _STATE in getattr(model, "__dict__", {}):
        raise ValueError("model: is patched already; undo that first with cce_kernels.unpatch(model)")
    # A model made by `type(patched)(config)` has the patched class, but no options yet.
    kind = vars(type(model)).get("_cce_kind", type(model))
    if surplus := options.keys() - set(OPTIONS):
        raise ValueError(f"{min(surplus)}: patch takes only {', '.join(OPTIONS)} and predictions")
    if not isinstance(predictions, bool):
        raise TypeError(f"predictions: must be True or False, got {predictions!r}")
    try_options(**options)
    check_structure(model, kind)
    check_class(kind)
    check_model(model, kind)

    model.__class__ = _patched_class(kind)
    vars(model)[_STATE], vars(model)[_PREDICTS] = options, predictions
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
    del vars(model)[_STATE], vars(model)[_PREDICTS]
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


class _PatchedFla(_Patched):
    """The mixin for FLA's classes, whose forwards get loss and logits from one method."""

    def _compute_logits_and_loss(
        self: Any, hidden_states: Tensor, labels: Tensor | None = None, logits_to_keep: Any = 0, *,
        shift_labels: Tensor | None = None, num_items_in_batch: Any = None, **own: Any,
    ) -> tuple[Any, Any]:  # fmt: skip
        options = vars(self).get(_STATE)
        if options is None or (labels is None and shift_labels is None):
            return self._cce_kind._compute_logits_and_loss(
                self, hidden_states, labels, logits_to_keep, shift_labels=shift_labels,
                num_items_in_batch=num_items_in_batch, **own,
            )  # fmt: skip
        logits = DeferredLogits(hidden_states, self.get_output_embeddings())
        return logits.loss(labels, shift_labels, -100, num_items_in_batch, options), logits


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
    output_classes(inspect.unwrap(original).__globals__)

    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        options = vars(self).get(_STATE)
        call = signature.bind(self, *args, **kwargs).arguments
        call.update(call.pop("kwargs", {}))
        if options is None or call.get("labels") is None:
            if options is not None and call.get("num_items_in_batch") is not None and not torch.compiler.is_compiling():
                warnings.warn(_LABELS_TAKEN, stacklevel=2)
            return original(self, *args, **kwargs)
        check_model(self, kind)
        if kind.forward is not original:
            check_class(kind)
        _refuse_logits(self, call)
        view = self if of_fla(kind) else View(self, options)
        output = original(view, *args, **kwargs)
        if not isinstance(output.get("logits"), DeferredLogits):
            raise LogitsNeeded("returns other logits than those of its loss")
        if not (of_fla(kind) or view.lost):
            raise LogitsNeeded("computes no loss from its head's logits")
        predictions = None
        # Not in nn.DataParallel's replicas, which cannot gather NO_PREDICTIONS.
        if not (self.training or torch.is_grad_enabled() or getattr(self, "_is_replica", False)):
            predictions = output["logits"].predictions() if vars(self)[_PREDICTS] else NO_PREDICTIONS
        fields = {name: value for name, value in output.items() if name != "logits"}
        return output_class(type(output))(**fields, predictions=predictions)

    forward.__signature__ = signature  # type: ignore[attr-defined]  # Trainer reads the signature
    del forward.__wrapped__  # accelerate's unwrap_model would remove a function with this attribute
    return type(kind.__name__, (_PatchedFla if of_fla(kind) else _Patched, kind), {
        "__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__,
        "_cce_kind": kind, "forward": forward,
    })  # fmt: skip


_LABELS_TAKEN = (
    "a model patched by cce_kernels was called with num_items_in_batch and without labels, so that its logits are "
    "computed: Trainer takes the labels away for label_smoothing_factor and compute_loss_func. For label smoothing "
    "call cce_kernels.patch_trainer(trainer)"
)


def _refuse_logits(model: Any, call: dict[str, Any]) -> None:
    """Raise a ValueError if a call with labels asks for logits."""
    for name in ("logits_to_keep", "num_logits_to_keep"):
        if isinstance(call.get(name), Tensor) or call.get(name):
            raise ValueError(f"logits_to_keep: cannot be given with labels: {NO_LOGITS}")
    as_dict = call.get("return_dict")
    if not (model.config.return_dict if as_dict is None else as_dict):
        raise ValueError(f"return_dict: must be True with labels, a tuple would hold logits: {NO_LOGITS}")


def patch_trainer(trainer: Any, **options: Any) -> Any:
    """Patch a Trainer's model so that all of the Trainer's loss comes from `linear_cross_entropy`.

    Trainer computes label smoothing from logits, outside of the model. Here `label_smoothing_factor` goes into the
    model's loss, for training and evaluation. compute_metrics gets predicted tokens (B, T) in place of logits.

    Args:
        trainer: a transformers Trainer, before train() or evaluate(). Changed in place. Its model may be a PEFT model.
        options: as in `patch`.

    Returns:
        trainer.

    Raises:
        TypeError: as in `patch`, or trainer is no Trainer.
        ValueError: as in `patch`; or the model is patched already, or the Trainer has a loss of its own
            (compute_loss_func), or takes argmax of logits (preprocess_logits_for_metrics).
    """
    if not hasattr(trainer, "compute_metrics"):
        raise TypeError(
            f"trainer: must be a transformers Trainer, got a {type(trainer).__name__}; a model takes cce_kernels.patch"
        )
    model = trainer.model.get_base_model() if hasattr(trainer.model, "get_base_model") else trainer.model
    if is_patched(model):
        raise ValueError("trainer: its model is patched already; call cce_kernels.unpatch first")
    for name in ("compute_loss_func", "preprocess_logits_for_metrics"):
        if getattr(trainer, name, None) is not None:
            raise ValueError(f"trainer: its {name} takes logits, and there are none; construct it without")
    smoother = getattr(trainer, "label_smoother", None)
    if smoother is not None:
        options = {"label_smoothing": smoother.epsilon, **options}
    predictions = options.pop("predictions", trainer.compute_metrics is not None)
    patch(model, predictions=predictions, **options)
    trainer.label_smoother = None
    return trainer
