"""Every model trains with every loss that runs on this machine. All other losses are rejected with cause and remedy.

On a GPU in both precisions in bf16, with FLA's kernels untuned, because tuning takes minutes per model.
"""

import math
from pathlib import Path

import pytest
import torch
from fitting import fitted, losses

from linrnn.config import load_config
from linrnn.core.errors import OutOfMemoryError, UnsupportedError
from linrnn.losses import check_loss, loss_names
from linrnn.models import check_supported
from linrnn.models.architecture import MODELS
from linrnn.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("traced", "untuned")
ON_GPU = ("device=cuda", "trainer.seq_len=256")
PLACES = [
    (("device=cpu",), 2e-5),  # in fp32
    *(pytest.param((*ON_GPU, f"trainer.precision={precision}"), 3e-3, marks=pytest.mark.gpu)
      for precision in ("bf16_autocast", "bf16")),
]  # fmt: skip
PARTS = {"parameters", "gradients", "optimizer", "activations", "loss_forward", "loss_backward"}


@pytest.fixture(scope="module")
def standard() -> dict[tuple[str, ...], list[float]]:
    """Losses of eager cross-entropy by model and place, filled by the first test of each."""
    return {}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("loss", loss_names())
@pytest.mark.parametrize(("place", "rounding"), PLACES)
def test_three_steps(model, loss, place, rounding, small, standard):
    run = small(f"model={model}", *place)
    config = load_config([*run, f"loss={loss}"])
    try:
        check_loss(config.loss, torch.device(config.device))
        check_supported(config.model, torch.device(config.device))
    except UnsupportedError:
        with pytest.raises(UnsupportedError) as refusal:
            Trainer(config)
        assert refusal.value.cause
        assert refusal.value.remedy
        assert not Path(config.results_dir).exists(), "refused before anything is built"
        return
    trainer = Trainer(config)
    summary = trainer.fit()
    assert (summary["status"], summary["steps"]) == ("finished", 3)
    assert math.isfinite(summary["valid_loss_nats"])
    if (model, *place) not in standard:
        standard[model, *place] = losses(fitted([*run, "loss=standard", "group=eager"]))
    # cce_filter drops small gradient entries on purpose, so only its first loss equals the other losses'.
    n_equal = 1 if loss == "cce_filter" or config.device == "cuda" else 3
    assert losses(trainer)[:n_equal] == pytest.approx(standard[model, *place][:n_equal], rel=rounding)
    if config.device == "cuda":
        assert summary["peak_memory_bytes"] > 0
        assert summary["memory_bytes"].keys() >= PARTS


@pytest.mark.gpu
def test_a_memory_budget_is_kept_and_explained(small):
    overrides = small(*ON_GPU, "memory_budget_gib=1", "size.vocab_size=131072", "trainer.batch_size=64")
    with pytest.raises(OutOfMemoryError, match="out of memory") as error:
        Trainer(load_config([*overrides, "loss=standard"])).fit()
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert "loss=cce_kahan" in error.value.remedy
