"""Expected memory and disk are compared with what the machine has, before anything is built or written."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from linrnn import costs
from linrnn.config import load_config
from linrnn.config.schema import LossConfig
from linrnn.core import machine
from linrnn.core.errors import OutOfMemoryError, UnsupportedError
from linrnn.core.machine import GIB, available_memory
from linrnn.models import architecture, build_model, open_pretrained
from linrnn.models.architecture import resolve
from linrnn.models.facts import FACTS, ModelFacts
from linrnn.training import plan as plan_module
from linrnn.training.plan import Plan, make_training_plan
from linrnn.training.trainer import Trainer

# ---------------------------------------------------------------------------------------------------------- memory
TWO = {"max": "500000", "current": "300000", "stat": "anon 1\ninactive_file 50000\n"}
UNLIMITED = {**TWO, "max": "max\n"}


@pytest.mark.parametrize(
    ("cgroup", "places", "expected"),
    [
        ("0::/\n", {}, 1000 * 1024),
        ("0::/box/job\n", {"box": TWO}, 250_000),  # the limit of a parent holds, file pages can be dropped
        ("0::/a\n", {"a": UNLIMITED}, 1000 * 1024),
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
    monkeypatch.setattr(machine, "available_memory", lambda: int(gib * GIB))


def plan_of(*overrides: str) -> tuple[Plan, architecture.Architecture]:
    plan = make_training_plan(load_config([*overrides, "device=cpu", "trainer.max_steps=1"]))
    return plan, plan.architecture(512)


def test_a_step_that_cannot_fit_on_a_cpu_is_refused_with_both_figures(monkeypatch):
    plan, arch = plan_of("model=gla", "size=1b3", "data=markov", "loss=cce_kahan")
    has(monkeypatch, 8)
    with pytest.raises(UnsupportedError) as refused:
        plan_module.check_step_fits(plan, arch)
    foreseen = plan.memory_estimate(arch)
    assert foreseen is not None
    assert f"{foreseen.peak / GIB:.1f} GiB" in refused.value.cause
    assert "8.0 GiB of memory are free" in refused.value.cause
    has(monkeypatch, 10 * foreseen.peak / GIB)
    assert plan_module.check_step_fits(plan, arch) is None


def test_the_processes_of_a_machine_share_its_memory(monkeypatch):
    plan, arch = plan_of("model=gla", "size=smoke", "data=markov")
    estimate = plan.memory_estimate(arch)
    assert estimate is not None
    has(monkeypatch, 2.5 * estimate.peak / GIB)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    plan_module.check_step_fits(plan, arch)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(UnsupportedError, match="each of 3 processes"):
        plan_module.check_step_fits(plan, arch)


def test_a_gpu_refuses_what_no_step_could_hold_and_tries_the_rest(monkeypatch):
    plan, arch = plan_of("model=gla", "size=1b3", "data=markov")
    plan = replace(plan, device=torch.device("cuda"))
    estimate, state = plan.memory_estimate(arch), sum(plan.training_state(arch).values())
    assert estimate is not None

    def gpu(size: float) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=int(size)))

    gpu(state - 1)
    with pytest.raises(OutOfMemoryError, match="parameters, gradients and optimizer state alone"):
        plan_module.check_step_fits(plan, arch)
    gpu(estimate.peak - 1)
    note = plan_module.check_step_fits(plan, arch)
    assert note is not None
    assert "tried all the same" in note
    gpu(estimate.peak + 1)
    assert plan_module.check_step_fits(plan, arch) is None
    budget = replace(plan, config=replace(plan.config, memory_budget_gib=(state - 1) / GIB))
    with pytest.raises(OutOfMemoryError, match="memory_budget_gib has"):
        plan_module.check_step_fits(budget, arch)


def test_nothing_is_prepared_or_built_for_a_run_that_cannot_fit(small, tmp_path, monkeypatch):
    from linrnn.training.trainer import Trainer

    has(monkeypatch, 1e-6)
    cache, results = tmp_path / "cache", tmp_path / "results"
    with pytest.raises(UnsupportedError, match="a training step needs"):
        Trainer(load_config(small(f"data.cache_dir={cache}", f"results_dir={results}")))
    assert not cache.exists()
    assert not results.exists()


def test_a_model_whose_weights_cannot_be_held_is_not_built_to_read_with(monkeypatch):
    _, arch = plan_of("model=gla", "size=1b3", "data=markov")
    has(monkeypatch, 2)
    with pytest.raises(UnsupportedError, match=r"parameters need \d"):
        plan_module.check_reading_fits(arch, torch.device("cpu"))


# --------------------------------------------------------------------------------------------- unknown is unknown
@pytest.fixture
def fifth_model(monkeypatch: pytest.MonkeyPatch) -> str:
    """A model of FLA's without formulas, except those of its parameters, without which it cannot be built."""
    monkeypatch.setitem(FACTS, "retnet", ModelFacts("retnet", "RetNet", FACTS["transformer"].matched))
    return "retnet"


def test_a_model_without_formulas_is_unknown_everywhere_and_takes_no_other_s(fifth_model, small, monkeypatch, capsys):
    config = load_config(small("trainer.max_steps=2"))
    mixers = {**config.size.mixers, fifth_model: config.size.mixers["transformer"]}
    config = replace(config, model=replace(config.model, name=fifth_model), size=replace(config.size, mixers=mixers))
    plan = Plan(config, torch.device("cpu"), "fp32")
    arch = resolve(config.model, config.size, 512)
    sharded = {"world_size": 2, "sequences": 1, "seq_len": 64, "precision": "bf16_autocast", "loss": config.loss}
    for unknown in (
        plan.memory_estimate(arch),
        costs.model_flops(arch, 1, 64),
        costs.model_flops_6n(arch, 1, 64),
        costs.kernel_flops(arch, 1, 64, config.loss, "none"),
        costs.communication(arch, load_config(["parallel=fsdp"]).parallel, **sharded),
    ):
        assert unknown is None
    h200 = {"seq_len": 64, "tokens_per_second": 1e6, "device_name": "NVIDIA H200", "precision": "bf16"}
    assert costs.mfu(arch, **h200) == {"mfu": None, "mfu_6n": None}
    assert plan.training_state(arch)["parameters"] == 4 * arch.n_parameters
    _says_unknown(plan, arch, monkeypatch, capsys)


def test_a_loss_without_formulas_is_unknown_everywhere_and_takes_no_other_s(small, monkeypatch, capsys):
    config = load_config(small("trainer.max_steps=2", "loss=cce_kahan"))
    for loss in (LossConfig("focal"), replace(config.loss, name="focal")):  # another loss's options change nothing
        plan = Plan(replace(config, loss=loss), torch.device("cpu"), "fp32")
        arch = plan.architecture(512)
        for unknown in (
            plan.memory_estimate(arch),
            costs.loss_memory(loss, 64, 64, 512, 4),
            costs.kernel_flops(arch, 1, 64, loss, "none"),
            costs.vocabulary_loss_bytes(loss, 64, 64, 512, 4, 2),
        ):
            assert unknown is None
        assert costs.model_flops(arch, 1, 64) is not None, "MFU does not depend on the loss"
        _says_unknown(plan, arch, monkeypatch, capsys)


def test_a_model_without_cpu_form_is_refused_on_a_cpu_before_anything_is_built(
    fifth_model, small, tmp_path, monkeypatch
):
    """FLA's own kernels of it would end in an error of Triton's."""
    config = load_config(small("trainer.max_steps=2"))
    mixers = {**config.size.mixers, fifth_model: config.size.mixers["transformer"]}
    config = replace(config, model=replace(config.model, name=fifth_model), size=replace(config.size, mixers=mixers))
    refusal = (
        r"retnet has no CPU form.*\n.*run it on a machine with an NVIDIA GPU; on a CPU use model=gla, gated_deltanet"
    )
    for begin in (make_training_plan, Trainer):  # a dry run only needs the plan
        with pytest.raises(UnsupportedError, match=refusal):
            begin(config)
    assert not (tmp_path / "results").exists()
    with pytest.raises(UnsupportedError, match=refusal):
        build_model(resolve(config.model, config.size, 512), device="cpu")
    (tmp_path / "config.json").write_text('{"model_type": "retnet"}')
    with pytest.raises(UnsupportedError, match=refusal):
        open_pretrained(tmp_path, torch.device("cpu"))


def _says_unknown(
    plan: Plan,
    arch: architecture.Architecture,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The dry run, a sweep's listing and the search for the largest batch all say so."""
    from linrnn.experiments import dry_run, max_batch, points

    monkeypatch.setattr(dry_run, "make_training_plan", lambda config: plan)
    monkeypatch.setattr(dry_run, "run_name", lambda config, world_size: "name")  # which YAML files decide
    monkeypatch.setattr("linrnn.training.plan.make_training_plan", lambda config: plan)
    monkeypatch.setattr(Plan, "architecture", lambda self, vocab_size: arch)
    dry_run.print_forecast(plan.config)
    printed = capsys.readouterr().out
    assert printed.count("unknown") >= 2
    assert "a step," not in printed, "no time is foreseen"
    assert dry_run.seconds_of_run(plan, arch) is None
    point = points._foresee(points.Point((), plan.config, Path("nowhere"), "label"))
    assert (point.memory_bytes, point.seconds, point.refusal) == (None, None, None)
    assert max_batch._look_ahead(plan.config, GIB, 1)[1] is None
