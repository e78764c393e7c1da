"""`trainer.compile`: the same losses compiled or not, graphs and their breaks counted, and what is refused."""

import functools

import pytest
import torch
from fitting import fitted, losses, summary_of

from linrnn.config import load_config
from linrnn.config.schema import ModelConfig
from linrnn.core.errors import UnsupportedError
from linrnn.models import build_model, check_supported
from linrnn.models.architecture import resolve
from linrnn.profiling.graphs import GraphCounter, in_words


def test_a_compiled_run_has_the_losses_of_another_and_counts_its_graphs(small, monkeypatch):
    """With Dynamo only (no C++ compiler needed)."""
    options = ("model=transformer", "loss=standard", "size.num_layers=1", "trainer.checkpoint_every=0")
    options += ("trainer.max_steps=2", "trainer.valid_tokens=160")
    plain = fitted(small(*options))
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    run = fitted(small(*options, "trainer.compile=model"))
    assert losses(run) == pytest.approx(losses(plain), rel=1e-5)
    summary = summary_of(run)
    found = summary["compiled"]
    assert found["graphs"] >= 1
    assert found["graph_breaks"] == sum(found["reasons"].values())
    line = f"torch.compile: {found['graphs']} graphs, {found['graph_breaks']} graph breaks"
    assert line in (run.directory.path / "train.log").read_text()
    assert "trainer.compile=model" in summary["training"]
    without = summary_of(plain)
    assert without["compiled"] is None


def test_a_graph_break_is_counted_with_its_reason():
    counter = GraphCounter()
    assert counter.report() == {"graphs": 0, "graph_breaks": 0, "reasons": {}, "over_limit": 0}

    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    torch.compile(broken, backend="eager")(torch.ones(3))
    report = counter.report()
    assert report["graphs"] == 2
    assert report["graph_breaks"] == sum(report["reasons"].values()) == 1
    assert in_words(report).startswith("torch.compile: 2 graphs, 1 graph breaks (1 x ")
    assert GraphCounter().report()["graphs"] == 0, "a later counter starts anew"


def test_a_function_that_needs_more_graphs_than_torch_allows_is_counted_and_told():
    counter = GraphCounter()
    with torch._dynamo.config.patch(recompile_limit=2, specialize_float=True):
        compiled = torch.compile(lambda x, by: x * by, backend="eager")
        for by in range(4):
            compiled(torch.ones(3), by + 0.5)
    report = counter.report()
    assert (report["graphs"], report["over_limit"]) == (2, 1)
    assert in_words(report).endswith("; functions over torch's limit of graphs, partly uncompiled: 1")


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
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    counter = GraphCounter()
    torch._dynamo.reset()
    model.set_compile(mode)
    with torch.no_grad():
        model(torch.zeros(1, 16, dtype=torch.int64))
    assert counter.report()["graphs"] < layers
    assert counter.report()["over_limit"] == 0


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
