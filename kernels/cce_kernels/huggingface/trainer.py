"""`patch_trainer` makes the loss of a transformers Trainer ours, label smoothing and metrics included."""

from __future__ import annotations

from typing import Any

from .patch import is_patched, patch


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
