"""On a GPU, FLA's models are rehearsed, train with five losses, and the losses agree. FLA's reason refuses the rest."""

import json
import math
from collections.abc import Callable

import pytest
import torch
import triton
from packaging.version import Version

from linrnn.config import load_config
from linrnn.config.fla import fla_models
from linrnn.core.errors import UnsupportedError
from linrnn.runs.directory import LOG
from linrnn.training.trainer import Trainer

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("untuned")]
LOSSES = ("standard", "compiled", "cce_kahan", "liger", "fla")
# At this size, on every device: tests/models/test_fla_any.py
NOT_BUILT = ("cat", "mla", "mom", "rodimus", "samba", "yoco")
# At the dimensions of `size=smoke`, without the packages flash-attn and mamba_ssm.
REFUSED = {
    "bitnet": "flash-attn",
    "deltaformer": "flash-attn",
    "log_linear_mamba2": "same dtype",
    "mamba3": "mamba_ssm",
    "moba": "flash-attn",
    "nsa": "power of 2",
}
CRASH_WITH_NARROW_HEADS = ("mesa_net", "path_attn")  # on Hopper, below 64 dimensions: the process cannot go on
OTHERS = sorted({*fla_models()} - {*REFUSED, *NOT_BUILT, *CRASH_WITH_NARROW_HEADS})
HYBRIDS = ("gla", "gated_deltanet", "kda", "delta_net")
MODELS = [
    *((name,) for name in OTHERS),
    *((name, "model.attention_every=2", "model.attention_window=64") for name in HYBRIDS),
    *((name, "size.mixers.transformer.num_heads=2") for name in CRASH_WITH_NARROW_HEADS),  # heads of 64 dimensions
]
GATED = ("comba", "gated_deltanet", "precond_gated_deltanet")  # on Hopper they need Triton 3.7.1
eager_losses: dict[tuple[str, ...], float] = {}


def first_loss(small: Callable[..., list[str]], loss: str, *model: str) -> float:
    """The loss of the first of three steps."""
    run = ("model=fla", f"loss={loss}", *model, "device=cuda", "trainer.seq_len=128", "trainer.precision=bf16_autocast")
    trainer = Trainer(load_config(small(*run)))
    summary = trainer.fit()
    assert summary["status"] == "finished"
    assert math.isfinite(summary["valid_loss_nats"])
    assert "compiling ahead failed" not in (trainer.directory.path / LOG).read_text()
    return json.loads(trainer.directory.metrics.read_text().splitlines()[0])["train/loss_nats"]


@pytest.mark.parametrize("named", MODELS, ids=" ".join)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_model_trains_three_steps_with_five_losses(named, loss, small):
    name, *more = named
    model = f"model.config={name}", *more
    if name in GATED and torch.cuda.get_device_capability()[0] == 9 and Version(triton.__version__) < Version("3.7.1"):
        with pytest.raises(UnsupportedError, match="Triton"):
            first_loss(small, loss, *model)
        return
    if model not in eager_losses:
        eager_losses[model] = first_loss(small, "standard", *model)
    if loss != "standard":
        assert first_loss(small, loss, *model) == pytest.approx(eager_losses[model], rel=3e-3)


@pytest.mark.parametrize("name", REFUSED)
def test_what_fla_does_not_train_here_is_refused_with_fla_s_reason(name, small):
    with pytest.raises(UnsupportedError, match=REFUSED[name]):
        first_loss(small, "standard", f"model.config={name}")
