"""`optimizer=muon`: which parameters it takes, its update by hand, its state in checkpoints, and what it refuses."""

import math
from collections.abc import Callable

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from linrnn.config import load_config
from linrnn.core.errors import ConfigError
from linrnn.costs.flops import update_flops
from linrnn.training.checkpoint import estimated_bytes
from linrnn.training.optimizer import build_optimizer
from linrnn.training.trainer import Trainer

Small = Callable[..., list[str]]
CPU = torch.device("cpu")
MUON = "optimizer=muon"


def built(small: Small, *overrides: str) -> Trainer:
    return Trainer(load_config(small(MUON, "loss=standard", *overrides)))


def members(trainer: Trainer) -> dict[str, list[str]]:
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    return {group["name"]: [names[id(p)] for p in group["params"]] for group in trainer.optimizer.param_groups}


@pytest.mark.parametrize("model", ["gla", "gated_deltanet", "kda", "transformer", "fla model.config=delta_net"])
def test_muon_has_the_matrices_of_the_layers_and_adamw_all_other_parameters(small, model):
    trainer = built(small, *f"model={model}".split())
    groups, parameters = members(trainer), dict(trainer.model.named_parameters())
    assert sorted(name for names in groups.values() for name in names) == sorted(parameters)
    assert all(".layers." in name and parameters[name].ndim == 2 for name in groups["matrices"])
    others = [name for group in ("decay", "no_decay") for name in groups[group]]
    assert not [name for name in others if ".layers." in name and name.endswith("proj.weight")]
    assert groups["decay"][0].endswith("embeddings.weight")
    assert {group["weight_decay"] for group in trainer.optimizer.param_groups[:2]} == {0.1}
    # The formulas, or a model without weights, know the shape of each of these matrices.
    shapes = trainer.architecture.matrices
    assert sorted(map(sorted, shapes)) == sorted(sorted(parameters[name].shape) for name in groups["matrices"])
    trainer.train_step()
    state = [value for entry in trainer.optimizer.state.values() for key, value in entry.items() if key != "step"]
    kept = sum(value.numel() * value.element_size() for value in state)
    assert kept == trainer.plan.training_state(trainer.architecture)["optimizer"]
    assert estimated_bytes(trainer.model.hf, trainer.optimizer) == 4 * trainer.architecture.n_parameters + kept


class OneMatrix(torch.nn.Module):
    """A matrix of a layer, and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 6)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(6, 3, bias=False)])


def test_two_steps_by_hand():
    """The mean of the gradients, Nesterov's sum, its nearest orthogonal matrix to Newton-Schulz's error, and decay."""
    model, config = OneMatrix(), load_config([MUON, "optimizer.lr=0.01"]).optimizer
    optimizer = build_optimizer(model, config, CPU)
    weight = model.blocks[0].weight
    mean = torch.zeros_like(weight)
    for seed in range(2):
        gradient = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
        before = weight.detach().clone()
        weight.grad, model.embedding.weight.grad = gradient.clone(), torch.ones(5, 6)
        optimizer.step()
        mean = 0.95 * mean + 0.05 * gradient
        update = (before * (1 - 0.01 * 0.1) - weight.detach()) / (0.01 * 0.2 * math.sqrt(6))
        left, _, right = torch.linalg.svd(0.05 * gradient + 0.95 * mean, full_matrices=False)
        singular = torch.linalg.svdvals(update)
        assert 0.6 < singular.min() <= singular.max() < 1.3, "nearly orthogonal"
        assert torch.nn.functional.cosine_similarity(update.flatten(), (left @ right).flatten(), 0) > 0.95
    assert set(optimizer.state[weight]) == {"momentum_buffer"}
    assert torch.allclose(optimizer.state[weight]["momentum_buffer"], mean)
    assert set(optimizer.state[model.embedding.weight]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize(("override", "cause"), [("momentum=1", "never forgets"), ("ns_steps=0", "below the minimum")])
def test_values_that_could_never_train_are_refused(small, override, cause):
    with pytest.raises(ConfigError, match=cause):
        built(small, f"optimizer.{override}")


def test_newton_schulz_is_counted_as_torch_multiplies(small):
    trainer = built(small, "model=transformer")
    for parameter in trainer.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with FlopCounterMode(display=False) as counter:
        trainer.optimizer.step()
    assert counter.get_total_flops() == update_flops(trainer.architecture, trainer.config.optimizer)
