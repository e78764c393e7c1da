"""Every model trains with every loss that can run on this machine; the rest is refused with cause and remedy."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from linrnn.config import load_config
from linrnn.errors import UnsupportedError
from linrnn.losses import check_loss, loss_names
from linrnn.trainer import Trainer

MODELS = ("gla", "gated_deltanet", "kda", "transformer")
CPU = torch.device("cpu")


def runs_here(loss: str) -> bool:
    try:
        check_loss(load_config([f"loss={loss}"]).loss, CPU)
    except UnsupportedError:
        return False
    return True


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("loss", loss_names())
def test_three_steps(model: str, loss: str, small: Callable[..., list[str]]) -> None:
    config = load_config(small(f"model={model}", f"loss={loss}"))
    if not runs_here(loss):
        with pytest.raises(UnsupportedError) as refusal:
            Trainer(config)
        assert refusal.value.cause
        assert refusal.value.remedy
        assert not Path(config.results_dir).exists(), "refused before anything is built"
        return
    summary = Trainer(config).fit()
    assert summary["status"] == "finished"
    assert summary["steps"] == 3
    assert math.isfinite(summary["valid_loss_nats"])


@pytest.mark.parametrize("model", MODELS)
def test_losses_of_all_backends_agree_step_by_step(model: str, small: Callable[..., list[str]]) -> None:
    """Same seed, same data: fp32 backends may differ by rounding alone."""
    curves = {}
    for loss in filter(runs_here, loss_names()):
        config = load_config(small(f"model={model}", f"loss={loss}"))
        if loss == "cce_filter":
            continue  # drops gradient entries on purpose
        trainer = Trainer(config)
        trainer.fit()
        lines = [json.loads(line) for line in trainer.directory.metrics.read_text().splitlines()]
        curves[loss] = [line["train/loss_nats"] for line in lines if "train/loss_nats" in line]
    assert len(curves) >= 3
    for loss, curve in curves.items():
        assert curve == pytest.approx(curves["standard"], rel=2e-5), loss
