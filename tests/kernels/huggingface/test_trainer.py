"""transformers' Trainer, accelerate and PEFT with a patched model: their own results, or one clear line."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cce_kernels
import numpy as np
import pytest
import torch
from patch_models import assert_same, batch, build_hf, step, trained, trainer_of

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
Made = Callable[..., Any]  # a Trainer


def accuracy(prediction: Any) -> dict[str, float]:
    tokens, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    return {"accuracy": float((tokens == labels)[labels != -100].mean()), "tokens": int(np.prod(tokens.shape))}


@pytest.fixture
def trainer(tmp_path: Path) -> Made:
    def make(model: Any = None, metrics: Any = None, **arguments: Any) -> Any:
        return trainer_of(model or build_hf("Llama"), str(tmp_path), 2, metrics, use_cpu=True, **arguments)

    return make


def history(trainer: Any) -> list[float]:
    """The loss of every step, the gradients' norms, and the loss of an evaluation."""
    logged = trained(trainer)
    assert len(logged) == 6
    return [*logged, trainer.evaluate()["eval_loss"]]


@pytest.mark.parametrize("arguments", [{}, {"label_smoothing_factor": 0.2}, {"bf16": True}], ids=str)
def test_a_run_is_that_of_the_models_own_loss(arguments, trainer):
    want = history(trainer(**arguments))
    ours = cce_kernels.patch_trainer(trainer(**arguments))
    got = history(ours)
    assert got == pytest.approx(want, rel=3e-2 if "bf16" in arguments else 1e-4)
    assert cce_kernels.is_patched(ours.model)


def test_metrics_come_from_predicted_tokens(trainer):
    own = trainer()
    own.preprocess_logits_for_metrics = lambda logits, _: logits.argmax(-1)
    own.compute_metrics = accuracy
    want = own.evaluate()
    got = cce_kernels.patch_trainer(trainer(metrics=accuracy)).evaluate()
    for name in ("eval_loss", "eval_accuracy", "eval_tokens"):
        assert got[name] == pytest.approx(want[name], rel=1e-5)
    assert got["eval_tokens"] == 4 * 19


@pytest.mark.parametrize(("arguments", "states"), [({}, False), ({"bf16": True}, True)], ids=str)
def test_metrics_without_predictions_are_refused(arguments, states, trainer):
    """The hidden states must not pass for predictions."""
    model = build_hf("Llama", output_hidden_states=states)
    ours = trainer(cce_kernels.patch(model), accuracy, **arguments)
    with pytest.raises(ValueError, match=r"for compute_metrics; cce_kernels.patch\(model, predictions=True\)"):
        ours.evaluate()
    ours.compute_metrics = None
    assert ours.evaluate()["eval_loss"] > 0


def test_smoothing_that_takes_the_labels_away_warns(trainer):
    ours = trainer(cce_kernels.patch(build_hf("Llama")), label_smoothing_factor=0.2)
    with pytest.warns(UserWarning, match="without labels, so that its logits are computed.*patch_trainer"):
        ours.train()


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (lambda made: cce_kernels.patch(made.model), "its model is patched already"),
        (lambda made: setattr(made, "compute_loss_func", len), "its compute_loss_func takes logits"),
        (lambda made: setattr(made, "preprocess_logits_for_metrics", len), "its preprocess_logits_for_metrics takes"),
    ],
)  # fmt: skip
def test_a_trainer_that_needs_logits_is_refused(alter, message, trainer):
    made = trainer()
    alter(made)
    with pytest.raises(ValueError, match=f"trainer: {message}"):
        cce_kernels.patch_trainer(made)


def test_a_run_continues_from_its_checkpoint(trainer, tmp_path):
    whole = cce_kernels.patch_trainer(trainer())
    whole.args.save_strategy, whole.args.save_steps = "steps", 2
    whole.train()
    assert {"checkpoint-2"} <= {path.name for path in tmp_path.iterdir()}
    resumed = cce_kernels.patch_trainer(trainer())
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict())


def lora(model: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(**{**LORA, **options}, init_lora_weights="gaussian"))


@pytest.mark.parametrize("order", ["patch, then PEFT", "PEFT, then patch of the model inside"])
def test_adapters_outside_the_head(order):
    ids, labels = batch()
    model, call = build_hf("Llama"), {"input_ids": ids, "labels": labels}
    want = step(lora(copy.deepcopy(model)), **call)
    if order.startswith("patch"):
        wrapped = lora(cce_kernels.patch(model))
    else:
        wrapped = lora(model)
        cce_kernels.patch(wrapped.get_base_model())
    got = step(wrapped, **call)
    assert_same(got, want)
    assert "logits" not in got[2]
    merged = wrapped.merge_and_unload()
    assert cce_kernels.is_patched(merged)
    assert merged(**call).loss.isfinite()


def test_a_trainer_with_adapters(trainer):
    want = history(trainer(lora(build_hf("Llama"))))
    assert history(cce_kernels.patch_trainer(trainer(lora(build_hf("Llama"))))) == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize(
    ("patched", "message"),
    [
        (lambda model: cce_kernels.patch(lora(model)), "PeftModel.* is not supported; give the model .*before it"),
        (lambda model: cce_kernels.patch(lora(model, target_modules="lm_head").get_base_model()), "leave the head out"),
        (lambda model: lora(cce_kernels.patch(model), target_modules=["lm_head"]), "leave the head out of adapters"),
        (lambda model: lora(cce_kernels.patch(model), modules_to_save=["lm_head"]), "leave the head out of adapters"),
    ],
)  # fmt: skip
def test_adapters_that_the_patch_would_skip_are_refused(patched, message):
    ids, labels = batch()
    with pytest.raises((TypeError, ValueError), match=message) as error:
        patched(build_hf("Llama"))(input_ids=ids, labels=labels)
    assert "\n" not in str(error.value)
