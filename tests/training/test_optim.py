"""Decay groups, the learning rate of every step, and clipping, compared with numbers computed by hand."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from linrnn.config import load_config
from linrnn.config.schema import OptimizerConfig
from linrnn.core.errors import ConfigError
from linrnn.training.optimizer import Schedule, build_optimizer, clip_gradients, decay_groups

CONFIG = OptimizerConfig(name="adamw", lr=0.01, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, max_grad_norm=1.0)
CPU = torch.device("cpu")


class Block(nn.Module):
    """One parameter of each kind in the four architectures."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.RMSNorm(4)
        self.proj = nn.Linear(4, 4, bias=True)
        self.conv = nn.Conv1d(4, 4, 3, groups=4, bias=False)
        self.A_log = nn.Parameter(torch.zeros(2, 1))
        self.dt_bias = nn.Parameter(torch.zeros(2, 1))
        self.marked = nn.Parameter(torch.ones(2, 2))
        self.marked._no_weight_decay = True  # type: ignore[attr-defined]
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight  # tied


def schedule_of(total: int, name: str = "cosine", **changes: object) -> Schedule:
    options = [f"schedule.{key}={'null' if value is None else value}" for key, value in changes.items()]
    config = load_config(
        [f"schedule={name}", *(["schedule.warmup_steps=2"] if "warmup_steps" not in changes else []), *options]
    )
    return Schedule(build_optimizer(Block(), CONFIG, CPU), config.schedule, CONFIG.lr, total)


def multipliers(total: int, name: str = "cosine", **changes: object) -> list[float]:
    schedule = schedule_of(total, name, **changes)
    return [schedule.lr_multiplier(step) for step in range(total)]


def test_only_matrices_decay_and_a_tied_weight_is_listed_once():
    groups = decay_groups(Block())
    assert groups["decay"] == ["embedding.weight", "proj.weight", "conv.weight"]
    assert groups["no_decay"] == ["A_log", "dt_bias", "marked", "norm.weight", "proj.bias"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_step_equals_adamw_by_hand_with_decay_in_its_group_only(dtype):
    model = Block().to(dtype)
    before = {name: parameter.detach().double().clone() for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(model, CONFIG, CPU)
    assert optimizer.defaults["fused"]
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    for group, names in decay_groups(model).items():
        for name in names:
            decayed = before[name] * (1 - CONFIG.lr * (CONFIG.weight_decay if group == "decay" else 0))
            expected = decayed - CONFIG.lr  # the first step's m / sqrt(v) is the gradient's sign
            step_error = (model.get_parameter(name).double() - expected).abs().max()
            rounding = torch.finfo(dtype).eps * before[name].abs().max() + CONFIG.lr * 1e-2
            assert step_error <= rounding, name
    assert torch.equal(model.frozen, torch.ones(2, 2, dtype=dtype))


def test_cosine_starts_at_one_after_the_warmup_and_halves_midway():
    got = multipliers(10)
    assert got[:3] == [0.5, 1.0, 1.0]
    assert got[6] == pytest.approx(0.1 + 0.9 / 2)  # halfway through the eight steps after the warm-up
    assert got[9] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 7 / 8)))
    assert got[2:] == sorted(got[2:], reverse=True)
    assert multipliers(40, warmup_steps=None)[:5] == [0.25, 0.5, 0.75, 1, 1], "a tenth of the run"
    assert multipliers(3, warmup_steps=None)[0] == 1


@pytest.mark.parametrize(
    ("total", "name", "options", "expected"),
    [
        (10, "linear", {"min_lr_ratio": 0.2}, [0.5, 1, *(1 - 0.8 * step / 8 for step in range(8))]),
        (10, "wsd", {"decay_fraction": 0.4}, [0.5, 1, 1, 1, 1, 1, 1, 0.775, 0.55, 0.325]),
        (4, "constant", {"warmup_steps": 0}, [1, 1, 1, 1]),
    ],
)
def test_the_other_schedules_by_hand(total, name, options, expected):
    assert multipliers(total, name, **options) == pytest.approx(expected)


def test_apply_sets_every_group_from_the_step_alone():
    schedule = schedule_of(10)
    assert schedule.apply(7) == schedule.apply(7) == pytest.approx(CONFIG.lr * schedule.lr_multiplier(7))
    assert {group["lr"] for group in schedule.optimizer.param_groups} == {schedule.apply(7)}


@pytest.mark.parametrize("changes", [{"warmup_steps": 11}, {"name": "wsd", "warmup_steps": 8, "decay_fraction": 0.5}])
def test_a_schedule_that_does_not_fit_the_run_is_refused(changes):
    with pytest.raises(ConfigError, match="exceed"):
        multipliers(10, **changes)


@pytest.mark.parametrize("changes", [{"beta1": 1.0}, {"beta2": 1.0}, {"max_grad_norm": 0.0}, {}])
def test_what_could_never_train_is_refused(changes):
    model = nn.Linear(2, 2).requires_grad_(bool(changes))
    with pytest.raises(ConfigError, match=next(iter(changes), "gradient")):
        build_optimizer(model, replace(CONFIG, **changes), CPU)


@pytest.mark.parametrize(("max_norm", "scale"), [(1.0, 1 / 5), (50.0, 1.0), (None, 1.0), (math.inf, 1.0)])
def test_clipping_returns_the_norm_before_it_and_scales_to_the_limit(max_norm, scale):
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    first.grad, second.grad = torch.tensor([3.0]), torch.tensor([4.0])
    norm = clip_gradients([first, second], max_norm)
    assert norm == pytest.approx(5.0)
    assert first.grad.item() == pytest.approx(3 * scale, rel=1e-5)
    second.grad = torch.tensor([math.nan])
    assert math.isnan(clip_gradients([first, second], max_norm)), "a gradient that is not finite shows in the norm"
