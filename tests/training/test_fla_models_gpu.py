"""On a GPU, FLA's models train with every loss, and the losses agree. All other models are refused with a reason."""

import json
import math
from collections.abc import Callable

import pytest
from rank_process import leave_kernels_untuned

from linrnn.config import load_config
from linrnn.config.fla.names import fla_models
from linrnn.core.errors import LinrnnError
from linrnn.training.trainer import Trainer

pytestmark = pytest.mark.gpu
NAMED = ("delta_net", "gated_deltaproduct", "rwkv7", "mamba2", "hgrn2", "gsa", "retnet", "linear_attn")
HYBRIDS = ("gla", "gated_deltanet", "kda", "delta_net")
LOSSES = ("standard", "compiled", "cce_kahan", "liger", "fla")
eager_losses: dict[tuple[str, ...], float] = {}


@pytest.fixture(autouse=True)
def untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_kernels_untuned(monkeypatch.setattr)


def first_loss(small: Callable[..., list[str]], loss: str, *model: str) -> float:
    """The loss of the first of three steps."""
    overrides = [o for o in small("model=fla", f"loss={loss}", *model) if o != "device=cpu"]
    trainer = Trainer(
        load_config([*overrides, "device=cuda", "trainer.seq_len=128", "trainer.precision=bf16_autocast"])
    )
    summary = trainer.fit()
    assert summary["status"] == "finished"
    assert math.isfinite(summary["valid_loss_nats"])
    return json.loads(trainer.directory.metrics.read_text().splitlines()[0])["train/loss_nats"]


def agrees_with_eager(small: Callable[..., list[str]], loss: str, *model: str) -> None:
    if model not in eager_losses:
        eager_losses[model] = first_loss(small, "standard", *model)
    if loss != "standard":
        assert first_loss(small, loss, *model) == pytest.approx(eager_losses[model], rel=3e-3)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_named_models_train_three_steps_with_every_loss(
    name: str, loss: str, small: Callable[..., list[str]]
) -> None:
    agrees_with_eager(small, loss, f"model.config={name}")


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("loss", LOSSES)
def test_hybrids_train_three_steps_with_every_loss(name: str, loss: str, small: Callable[..., list[str]]) -> None:
    model = f"model.config={name}", "model.attention_every=2", "model.attention_window=64"
    agrees_with_eager(small, loss, *model)


@pytest.mark.parametrize("name", sorted(set(fla_models()) - set(NAMED)))
@pytest.mark.parametrize("loss", LOSSES)
def test_every_other_model_trains_or_is_refused_with_a_reason(
    name: str, loss: str, small: Callable[..., list[str]]
) -> None:
    try:
        agrees_with_eager(small, loss, f"model.config={name}")
    except LinrnnError as refusal:
        print(f"{name}: {refusal}")
