"""Expected memory and disk are compared with what the machine has, before anything is built or written."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from linrnn import costs
from linrnn.config import load_config
from linrnn.config.schema import LossConfig
from linrnn.core.errors import OutOfMemoryError, UnsupportedError
from linrnn.core.machine import GIB, available_memory
from linrnn.experiments import dry_run
from linrnn.losses import LossBackend, registry
from linrnn.models import architecture, open_pretrained
from linrnn.models.architecture import resolve
from linrnn.training import plan as plan_module
from linrnn.training.plan import Plan, make_training_plan
from linrnn.training.trainer import Trainer

TWO = {"max": "500000", "current": "300000", "stat": "anon 1\ninactive_file 50000\n"}


@pytest.mark.parametrize(
    ("cgroup", "places", "expected"),
    [
        ("0::/\n", {}, 1000 * 1024),
        ("0::/box/job\n", {"box": TWO}, 250_000),  # the limit of a parent holds, file pages can be dropped
        ("0::/a\n", {"a": {**TWO, "max": "max\n"}}, 1000 * 1024),
        ("4:cpu,memory:/b\n", {}, 1000 * 1024),
    ],
)
def test_free_memory_is_what_the_kernel_and_the_limits_of_a_container_leave(cgroup, places, expected, tmp_path):
    files = {f"sys/fs/cgroup/{place}/memory.{k}": v for place, texts in places.items() for k, v in texts.items()}
    files |= {"proc/meminfo": "MemTotal: 99999999 kB\nMemAvailable: 1000 kB\n", "proc/self/cgroup": cgroup}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert available_memory(tmp_path) == expected


def has(monkeypatch: pytest.MonkeyPatch, gib: float) -> None:
    monkeypatch.setattr(plan_module, "available_memory", lambda: int(gib * GIB))


def plan_of(*overrides: str) -> tuple[Plan, architecture.Architecture]:
    plan = make_training_plan(load_config([*overrides, "device=cpu", "trainer.max_steps=1"]))
    return plan, plan.architecture(512)


def test_a_step_that_cannot_fit_on_a_cpu_is_refused_with_both_figures(monkeypatch):
    """The processes of a run on one machine share its memory."""
    plan, arch = plan_of("model=gla", "size=1b3", "data=markov", "loss=cce_kahan")
    has(monkeypatch, 8)
    with pytest.raises(UnsupportedError) as refused:
        plan_module.check_step_fits(plan, arch)
    foreseen = plan.memory_estimate(arch)
    assert f"{foreseen.peak / GIB:.1f} GiB" in refused.value.cause
    assert "8.0 GiB of memory are free" in refused.value.cause
    has(monkeypatch, 2)
    with pytest.raises(UnsupportedError, match=r"parameters need \d"):
        plan_module.check_reading_fits(arch, torch.device("cpu"))
    has(monkeypatch, 2.5 * foreseen.peak / GIB)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert plan_module.check_step_fits(plan, arch) is None
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(UnsupportedError, match="each of 3 processes"):
        plan_module.check_step_fits(plan, arch)


def test_a_gpu_refuses_what_no_step_could_hold_and_tries_the_rest(monkeypatch):
    plan, arch = plan_of("model=gla", "size=1b3", "data=markov")
    plan = replace(plan, device=torch.device("cuda"))
    estimate, state = plan.memory_estimate(arch), sum(plan.training_state(arch).values())

    def checked(size: float, plan: Plan = plan) -> str | None:
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=int(size)))
        return plan_module.check_step_fits(plan, arch)

    with pytest.raises(OutOfMemoryError, match="parameters, gradients and optimizer state alone"):
        checked(state - 1)
    assert "tried all the same" in (checked(estimate.peak - 1) or "")
    assert checked(estimate.peak + 1) is None
    with pytest.raises(OutOfMemoryError, match="memory_budget_gib has"):
        checked(estimate.peak, replace(plan, config=replace(plan.config, memory_budget_gib=(state - 1) / GIB)))


def test_a_model_without_formulas_is_forecast_as_unknown(capsys):
    for name in ("rwkv6", "rwkv7"):  # whose FLOPs are unknown, and known
        dry_run.print_forecast(load_config(["model=fla", f"model.config={name}", "dry_run=true", "gpu=h100"]))
        printed = capsys.readouterr().out
        assert printed.count("unknown") == 2, "memory and time"
        assert "tokens/s" not in printed


def test_a_loss_without_formulas_takes_no_other_s(small, monkeypatch):
    monkeypatch.setitem(registry.UNLISTED, "focal", LossBackend)
    config = replace(load_config(small()), loss=LossConfig("focal"))
    plan, arch = Plan(config, torch.device("cpu"), "fp32"), resolve(config.model, config.size, 512)
    figures = [plan.memory_estimate(arch), costs.kernel_flops(arch, config, "fp32")]
    figures += [costs.loss_memory(config.loss, 64, 64, 512, 4)]
    assert figures == [None] * len(figures)
    assert dry_run.seconds_of_step(plan, arch) is None
    assert costs.model_flops(arch, 1, 64) is not None, "MFU does not depend on the loss"


def test_a_model_without_cpu_form_is_refused_on_a_cpu_before_anything_is_built(small, tmp_path):
    """FLA's own kernels of it would end in an error of Triton's."""
    config = load_config(small("model=fla", "model.config=mamba2"))
    (tmp_path / "config.json").write_text('{"model_type": "mamba2"}')
    for begin in (
        lambda: make_training_plan(config),  # a dry run only needs the plan
        lambda: Trainer(config),
        lambda: open_pretrained(tmp_path, torch.device("cpu")),
    ):
        with pytest.raises(UnsupportedError, match=r"(?s)mamba2 has no CPU form.*model=fla model\.config=delta_net"):
            begin()
    assert not (tmp_path / "results").exists()
