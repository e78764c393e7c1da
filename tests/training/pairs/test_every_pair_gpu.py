"""On a GPU, every model trains with every loss that the installed versions allow. All other losses are rejected.

FLA's kernels are left untuned, because tuning takes minutes per model.
"""

import json
import math
from collections.abc import Callable

import pytest
import torch
from fitting import fitted

from linrnn.config import load_config
from linrnn.core.errors import UnsupportedError
from linrnn.losses import loss_names
from linrnn.training.trainer import Trainer

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("untuned")]
MODELS = ("gla", "gated_deltanet", "kda", "transformer")
eager_losses: dict[tuple[str, str], float] = {}  # by model and precision


def on_gpu(small: Callable[..., list[str]], *more: str) -> list[str]:
    return small(*more, "device=cuda", "trainer.seq_len=256")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("loss", loss_names())
@pytest.mark.parametrize("precision", ["bf16_autocast", "bf16"])
def test_three_steps(model, loss, precision, small):
    overrides = on_gpu(small, f"model={model}", f"loss={loss}", f"trainer.precision={precision}")
    try:
        trainer = Trainer(load_config(overrides))
    except UnsupportedError as refusal:
        pytest.skip(str(refusal))
    summary = trainer.fit()
    assert summary["status"] == "finished"
    assert summary["peak_memory_bytes"] > 0
    assert math.isfinite(summary["valid_loss_nats"])
    assert {
        "parameters",
        "gradients",
        "optimizer",
        "activations",
        "loss_forward",
        "loss_backward",
    } <= summary["memory_bytes"].keys()
    if (model, precision) not in eager_losses:
        eager = fitted(on_gpu(small, f"model={model}", "loss=standard", f"trainer.precision={precision}"))
        eager_losses[model, precision] = first_loss(eager)
    assert first_loss(trainer) == pytest.approx(eager_losses[model, precision], rel=3e-3)


def first_loss(trainer: Trainer) -> float:
    return json.loads(trainer.directory.metrics.read_text().splitlines()[0])["train/loss_nats"]


def test_a_memory_budget_is_kept_and_explained(small):
    from linrnn.core.errors import OutOfMemoryError

    overrides = on_gpu(small, "memory_budget_gib=1", "size.vocab_size=131072", "trainer.batch_size=64", "loss=standard")
    with pytest.raises(OutOfMemoryError, match="out of memory") as error:
        Trainer(load_config(overrides)).fit()
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert "loss=cce_kahan" in error.value.remedy
