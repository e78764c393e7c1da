"""`trainer.float8=blocks`: which layers multiply in float8, that the rest stays exact, and what is refused."""

from unittest.mock import Mock

import pytest
import torch
from fitting import fitted, losses
from torch import nn

from linrnn.config import load_config
from linrnn.core import requirements
from linrnn.core.errors import ConfigError, UnsupportedError
from linrnn.training.execution import float8
from linrnn.training.plan import make_training_plan
from linrnn.training.trainer import Trainer

MODELS = ("gla", "gated_deltanet", "kda", "transformer")
BLOCKS = "trainer.float8=blocks"


def linear_layers(trainer: Trainer) -> list[nn.Module]:
    parts = [*trainer.model.mixers, *trainer.model.mlps]
    return [module for part in parts for module in part.modules() if isinstance(module, nn.Linear)]


@pytest.mark.parametrize("model", MODELS)
def test_every_large_linear_layer_of_the_blocks_multiplies_in_float8_and_nothing_else(model, small):
    trainer = Trainer(load_config(small(f"model={model}", BLOCKS)))
    called: set[str] = set()
    for name, module in trainer.model.named_modules():
        if type(module).__name__ == "Float8Linear":
            module.register_forward_hook(lambda *_, name=name: called.add(name))
    trainer.model(torch.zeros(1, 64, dtype=torch.int64))
    converted = {name for name, m in trainer.model.named_modules() if type(m).__name__ == "Float8Linear"}
    assert called == converted
    mlp = {"gate_proj", "up_proj", "down_proj"} if model == "gla" else set()  # the others' MLPs are no multiple of 16
    assert {name.rpartition(".")[2] for name in converted} >= {"o_proj"} | mlp
    assert type(trainer.model.hf.lm_head) is nn.Linear
    for layer in linear_layers(trainer):
        too_small, odd = min(layer.weight.shape) < 128, any(size % 16 for size in layer.weight.shape)
        assert (type(layer) is nn.Linear) == (too_small or odd)


def test_losses_differ_by_float8_s_rounding_and_the_run_says_what_was_converted(small, capsys):
    rounded, exact = (losses(fitted(small(*more))) for more in ((BLOCKS,), ()))
    assert rounded == pytest.approx(exact, rel=1e-2)
    assert rounded != exact
    assert "linear layers multiply in float8, emulated on the CPU; the others are below 128" in capsys.readouterr().out
    plan = make_training_plan(load_config(small(BLOCKS)))
    assert plan.memory_estimate(plan.architecture(512)) is None, "unknown"


def test_checkpointed_blocks_and_checkpoints_know_the_same_parameters(small):
    plain = Trainer(load_config(small()))
    trainer = Trainer(load_config(small(BLOCKS, "trainer.activation_checkpointing=selective")))
    assert list(trainer.model.state_dict()) == list(plain.model.state_dict())
    kept = losses(fitted(small(BLOCKS, "trainer.max_steps=2")))
    trainer.fit()
    assert losses(trainer)[:2] == pytest.approx(kept, rel=1e-5)


@pytest.mark.parametrize(
    ("more", "cause"),
    [
        (["model=fla", "model.config=delta_net"], "without calling them"),
        (["trainer.seq_len=81"], "162 tokens of a micro-step are no multiple of 16"),
    ],
)
def test_what_float8_does_not_take_is_refused_before_anything_is_built(more, cause, small):
    with pytest.raises(ConfigError, match=cause):
        make_training_plan(load_config(small(BLOCKS, *more)))


def test_other_gpus_precisions_and_a_missing_package_are_refused(small, monkeypatch):
    config, gpu = load_config(small(BLOCKS)), torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(UnsupportedError, match=r"compute capability 8\.9"):
        float8.check_float8(config, gpu, "bf16_autocast", 160)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    with pytest.raises(ConfigError, match="precision is fp32"):
        float8.check_float8(config, gpu, "fp32", 160)
    float8.check_float8(config, gpu, "bf16_autocast", 160)
    monkeypatch.setattr(requirements.importlib, "import_module", Mock(side_effect=ImportError))
    with pytest.raises(UnsupportedError, match="torchao") as error:
        float8.check_float8(config, gpu, "bf16_autocast", 160)
    assert error.value.remedy == 'pip install --force-reinstall "torchao>=0.17"', "it is installed and does not import"


@pytest.mark.gpu
@pytest.mark.usefixtures("untuned")
@pytest.mark.parametrize("compile", ["none", "blocks"])
@pytest.mark.parametrize("model", ["gla", "kda", "transformer"])
def test_float8_trains_on_a_gpu(model, compile, small):
    pytest.importorskip("torchao", reason="pip install 'linrnn[float8]'")
    run = ("device=cuda", f"model={model}", f"trainer.compile={compile}")
    rounded, exact = (losses(fitted(small(*run, *more))) for more in ((BLOCKS,), ()))
    assert rounded == pytest.approx(exact, rel=1e-2)
    assert rounded != exact
