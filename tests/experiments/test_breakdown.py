"""Memory and time by part, compared with the sum of the tensors."""

import gc
import json
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from linrnn import commands
from linrnn.config import load_config
from linrnn.config.schema import BreakdownConfig
from linrnn.core.errors import ConfigError
from linrnn.experiments.breakdown import check_parts, seconds_of_steps, share_of_step, sum_of_inputs
from linrnn.profiling.components import PROJECTIONS, PartClock, projections
from linrnn.training.trainer import Trainer

Small = Callable[..., list[str]]
N, D, V, LAYERS = 160, 128, 512, 2  # of the small run: B = 2, T = 80


def trainer(small: Small, *overrides: str) -> Trainer:
    return Trainer(load_config(small("trainer.max_steps=9", "loss=standard", *overrides)))


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_times_of_the_parts_add_up_to_less_than_the_step_and_leave_the_loss_alone(small, checkpointing):
    option = f"trainer.activation_checkpointing={checkpointing}"
    plain, timed = trainer(small, option), trainer(small, option)
    shares = []
    values = plain.train_step().read()  # also pays for what a process does once
    for number in range(3):  # another process may hold a core between the parts of one step
        clock = PartClock(timed.model, timed.optimizer, timed.device)
        timed.log.memory = clock  # type: ignore[assignment]
        with clock.watch():
            record = timed.train_step()
        assert number or record.read() == values
        seconds = clock.seconds()
        parts = sum(value for name, value in seconds.items() if not name.startswith((PROJECTIONS, "step", "host")))
        shares.append(parts / seconds["step"])
    passes = ["forward", "backward", *(["recomputed"] if checkpointing != "none" else [])]
    expected = {f"{part}/{name}" for part in ("mixer", PROJECTIONS, "mlp", "norms") for name in passes}
    expected |= {"embedding/forward", "loss/forward", "loss/backward", "optimizer", "step", "host"}
    assert seconds.keys() == expected | ({"norms/recomputed"} if checkpointing != "none" else set())
    assert min(seconds.values()) > 0
    for name in passes:
        assert seconds[f"{PROJECTIONS}/{name}"] < seconds[f"mixer/{name}"]
    assert 0.5 < max(shares) < 1
    assert 0.5 * seconds["step"] < seconds["host"], "a CPU computes what it issues"


def test_projections_are_the_linear_layers_that_a_mixer_calls(small):
    run = trainer(small, "model=gla")
    calls: Counter[nn.Module] = Counter()
    for layer in projections(run.model):
        layer.register_forward_hook(lambda module, *_: calls.update([module]))
    run.train_step()
    linear = [layer for mixer in run.model.mixers for layer in mixer.modules() if isinstance(layer, nn.Linear)]
    assert calls == Counter(linear), "every linear layer of a mixer is called once"
    assert sum(layer.weight.numel() for layer in linear) > 0.9 * LAYERS * run.architecture.mixer_parameters


def test_a_breakdown_is_written_and_stands_measured_beside_formula(small, tmp_path, monkeypatch):
    step, collects = Trainer.train_step, []
    monkeypatch.setattr(Trainer, "train_step", lambda run: (collects.append(gc.isenabled()), step(run))[1])
    config = BreakdownConfig(warmup_steps=1, steps=2, output=f"{tmp_path}/b")
    commands.breakdown(config, small("model=gla", "loss=standard", "trainer.max_steps=9"))
    assert collects == [False] * 5, "a collection of all garbage would lengthen a step by some 0.2 s"
    assert gc.isenabled()
    assert not (tmp_path / "results").exists(), "a breakdown is no run"
    [path] = (tmp_path / "b").glob("*.json")
    breakdown, text = json.loads(path.read_text()), path.with_suffix(".md").read_text()
    assert breakdown["memory"]["parameters"]["measured"] == breakdown["memory"]["parameters"]["formula"] == 4 * 461_696
    assert breakdown["memory"]["gradients"]["measured"] == 4 * 461_696
    assert text.startswith(f"# {path.stem}: ")
    cells = {line.split(" | ")[0].removeprefix("| "): line.split("|")[2:] for line in text.splitlines()}
    for part in ("projections", "scan"):
        assert 0 < float(cells[f"of it {part}"][0]) < float(cells["mixer"][0])
    assert "host" in cells
    assert [one.keys() == breakdown["steps"][0].keys() for one in breakdown["steps"]] == [True, True]
    share = share_of_step(seconds_of_steps(breakdown["steps"]), "mlp")
    assert cells["mlp"][3].strip() == f"{share.value:.1%} ({share.low:.1%} to {share.high:.1%})"
    assert "the median over 2 steps of one process" in text


@pytest.mark.parametrize("override", ["trainer.cuda_graph=true", "trainer.compile=blocks", "trainer.compile=model"])
def test_steps_without_parts_are_refused(override):
    with pytest.raises(ConfigError, match=override):
        check_parts(load_config([override]).trainer)
    check_parts(load_config([]).trainer)


def test_a_step_without_a_loss_layer_has_every_gradient(small):
    run = trainer(small, "model=gla", "size.tie_embeddings=false", "optimizer.max_grad_norm=null")
    run.loss = sum_of_inputs  # type: ignore[assignment]
    gradients: dict[str, torch.Tensor] = {}
    run.optimizer.register_step_pre_hook(
        lambda *_: gradients.update({name: p.grad.clone() for name, p in run.model.named_parameters()})
    )
    run.train_step()
    head = next(gradient for name, gradient in gradients.items() if "lm_head" in name)
    assert torch.allclose(head, torch.full((V, D), 1 / N))
    assert all(gradient.abs().sum() > 0 for name, gradient in gradients.items() if "bias" not in name)


def test_what_the_loss_got_is_gone_when_the_blocks_backward_pass_begins(small):
    run = trainer(small, "model=gla", "trainer.precision=bf16_autocast")
    compute, storages, alive = run.loss, [], []

    def watched(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> Any:
        storages.extend(weakref.ref(tensor.untyped_storage()) for tensor in (hidden, weight))
        alive.append([storage() is not None for storage in storages])
        return compute(hidden, weight, labels)

    run.loss = watched  # type: ignore[assignment]
    first_in_backward = run.model.blocks[-1].mlp.down_proj.weight
    first_in_backward.register_hook(lambda _: alive.append([storage() is not None for storage in storages]))
    run.train_step()
    assert alive == [[True, True], [False, False]]
