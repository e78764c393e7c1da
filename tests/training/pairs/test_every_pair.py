"""Every model trains with every loss that runs on this machine. All other losses are rejected with cause and remedy."""

import math
from pathlib import Path

import pytest
import torch
from fitting import fitted, losses

from linrnn.config import load_config
from linrnn.core.errors import UnsupportedError
from linrnn.losses import check_loss, loss_names
from linrnn.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("traced")
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
def test_three_steps(model, loss, small, standard):
    """The run finishes. In fp32 its losses differ from those of eager cross-entropy only by rounding."""
    config = load_config(small(f"model={model}", f"loss={loss}"))
    if not runs_here(loss):
        with pytest.raises(UnsupportedError) as refusal:
            Trainer(config)
        assert refusal.value.cause
        assert refusal.value.remedy
        assert not Path(config.results_dir).exists(), "refused before anything is built"
        return
    trainer = Trainer(config)
    summary = trainer.fit()
    assert summary["status"] == "finished"
    assert summary["steps"] == 3
    assert math.isfinite(summary["valid_loss_nats"])
    if model not in standard:
        eager = fitted(small(f"model={model}", "loss=standard", "group=eager"))
        standard[model] = losses(eager)
    # cce_filter drops small gradient entries on purpose, so only its first loss equals the other losses'.
    n_equal = 1 if loss == "cce_filter" else 3
    assert losses(trainer)[:n_equal] == pytest.approx(standard[model][:n_equal], rel=2e-5)


@pytest.fixture(scope="module")
def standard() -> dict[str, list[float]]:
    """Losses of eager cross-entropy by model, filled by the first test of each."""
    return {}
