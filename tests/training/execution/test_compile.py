"""`trainer.compile`: the same losses compiled or not, and layers that share their graphs."""

import functools

import pytest
import torch
from fitting import fitted, losses, summary_of
from torch._dynamo.testing import CompileCounter

from linrnn.config import load_config
from linrnn.config.schema import ModelConfig
from linrnn.core.errors import UnsupportedError
from linrnn.models import build_model, check_supported
from linrnn.models.architecture import resolve


def test_a_compiled_run_has_the_losses_of_another(small, monkeypatch):
    """With Dynamo only (no C++ compiler needed)."""
    options = ("model=transformer", "loss=standard", "size.num_layers=1", "trainer.checkpoint_every=0")
    options += ("trainer.max_steps=2", "trainer.valid_tokens=160")
    plain = fitted(small(*options))
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    run = fitted(small(*options, "trainer.compile=model"))
    assert losses(run) == pytest.approx(losses(plain), rel=1e-5)
    assert "trainer.compile=model" in summary_of(run)["training"]


@pytest.mark.parametrize("mode", ["blocks", "model"])
def test_layers_that_read_their_number_share_graphs(mode, monkeypatch):
    """torch recompiles eight times at most. Beyond that, layers would run uncompiled."""
    layers = 10
    options = ["model=transformer", "size=smoke", "size.vocab_size=64", f"size.num_layers={layers}"]
    config = load_config(options)
    model = build_model(resolve(config.model, config.size, 64), device="cpu", seed=0)
    kind = type(model.mixers[0])
    forward = kind.forward

    @torch.compiler.disable
    def kernel(x: torch.Tensor) -> torch.Tensor:
        return x

    def numbered(self: torch.nn.Module, hidden_states: torch.Tensor, **named: object) -> object:
        return forward(self, kernel(hidden_states + 0 * self.layer_idx), **named)

    monkeypatch.setattr(kind, "forward", numbered)
    graphs = CompileCounter()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=graphs))
    torch._dynamo.reset()
    model.set_compile(mode)
    with torch.no_grad(), torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        model(torch.zeros(1, 16, dtype=torch.int64))
    assert 0 < graphs.frame_count < layers


@pytest.mark.gpu
@pytest.mark.usefixtures("untuned")
@pytest.mark.parametrize("mode", ["blocks", "model"])
@pytest.mark.parametrize("model", ["gla", "gated_deltanet", "kda", "transformer"])
def test_compiled_models_train_alike_on_the_gpu(model, mode, small):
    options = (f"model={model}", "loss=standard", "device=cuda", "trainer.checkpoint_every=0")
    try:
        check_supported(ModelConfig(model, None), torch.device("cuda"))
    except UnsupportedError as error:
        pytest.skip(error.cause)
    plain, compiled = fitted(small(*options)), fitted(small(*options, f"trainer.compile={mode}"))
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-2)
