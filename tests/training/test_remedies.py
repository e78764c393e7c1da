"""Every override that a remedy names is tried: the command runs with it. No remedy names what is in use already."""

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fitting import fitted, summary_of
from rank_process import as_rank

from linrnn.config import last_of_each, load_config
from linrnn.core.errors import LinrnnError
from linrnn.experiments.points import plan_points
from linrnn.training import plan
from linrnn.training.plan import lighter, make_training_plan
from linrnn.training.runtime import resolve_precision
from linrnn.training.trainer import Trainer

FOO = "run_name=foo"
OVERRIDE = re.compile(r"(?<![\w.=/-])[a-z_]+(?:\.[a-z_0-9]+)*=[^\s;,()']+")


def ways(remedy: str) -> list[list[str]]:
    """The overrides of each alternative that a remedy names. Its other words are for people."""
    parts = re.split(r"; |, | or (?=[a-z_.]+=)|\n", remedy)
    return [overrides for part in parts if (overrides := OVERRIDE.findall(part))]


@pytest.fixture
def each_way(tmp_path: Path) -> Callable[[str, int], Iterator[list[str]]]:
    """Each alternative of a remedy, with the results as they were when it was given."""

    def found(remedy: str, number: int) -> Iterator[list[str]]:
        assert len(ways(remedy)) == number, remedy
        results, kept = tmp_path / "results", tmp_path / "kept"
        if results.exists():
            shutil.copytree(results, kept)
        for way in ways(remedy):
            yield way
            shutil.rmtree(results, ignore_errors=True)
            if kept.exists():
                shutil.copytree(kept, results)

    return found


def trained(overrides: list[str]) -> None:
    """Run to the end. A finished run that is asked for again is fine as well."""
    summary = summary_of(fitted(last_of_each(overrides)))
    assert summary["status"] == "finished"


def built(overrides: list[str]) -> None:
    """All that comes before the first step, which nothing of an earlier run decides."""
    Trainer(load_config(last_of_each(overrides)))


EARLY = ("schedule.steps=6", "trainer.max_steps=4")
TOKENS = ("trainer.max_steps=null", f"trainer.max_tokens={2 * 160 + 9}")


@pytest.mark.parametrize(
    ("before", "overrides", "cause", "number"),
    [
        # ------------------------------------------------------------------- a run of this name is there already
        ([FOO], [FOO, "trainer.max_steps=6"], "learning rate would jump", 3),
        ([FOO, *EARLY], [FOO, "trainer.max_steps=5"], "learning rate would jump", 4),
        ([FOO], [FOO, "optimizer.lr=0.01"], "another configuration", 2),
        (EARLY, ["schedule.steps=6", *TOKENS], "and this command stops at 2", 2),
        ([], ["trainer.resume=must"], "holds no run", 1),
        ([FOO], ["init_from=RESULTS/default/foo", "continue_from=RESULTS/default/foo"], "are both given", 2),
        ([FOO], ["optimizer=muon", "continue_from=RESULTS/default/foo"], "belongs to another optimizer", 2),
        # ------------------------------------------------------------------------------------ the length of a run
        ([], ["schedule.steps=2"], "go beyond schedule.steps=2", 3),
        ([], ["trainer.max_steps=null"], "no end", 1),
        ([], ["trainer.max_steps=null", "trainer.max_tokens=7"], "less than one step", 1),
        ([], ["schedule.warmup_steps=5"], "exceed the schedule's 3 steps", 2),
        ([], ["schedule=wsd", "schedule.warmup_steps=2", "schedule.decay_fraction=0.9"], "exceed the schedule's", 1),
        ([], ["trainer.profile_steps=1", "trainer.warmup_measurement_steps=3", "schedule.steps=3"], "the trace", 2),
        # ------------------------------------------------------------------------------- what cannot run here
        ([], ["size.vocab_size=8"], "smaller than the data's vocabulary", 1),
        ([], ["trainer.memory_snapshot=true"], "records CUDA allocations", 1),
        ([], ["memory_budget_gib=80"], "needs a GPU", 1),
        *(([], [f"loss={loss}"], "need an NVIDIA GPU", 1) for loss in ("liger", "fla")),
        ([], ["loss=cce_apple"], "need an NVIDIA GPU", 2),
        ([], ["logger.wandb.mode=online"], "no API key", 1),
    ],
)
def test_with_each_override_of_a_remedy_the_command_runs(
    before, overrides, cause, number, small, each_way, tmp_path, monkeypatch
):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    if torch.cuda.is_available() and "GPU" in cause + "CUDA":
        pytest.skip("this machine has a GPU")
    if before:
        trained(small(*before))
    refused = [override.replace("RESULTS", str(tmp_path / "results")) for override in overrides]
    go = trained if before else built
    with pytest.raises(LinrnnError, match=cause) as error:
        go(small(*refused))
    for way in each_way(error.value.remedy, number):
        go(small(*refused, *way))


@pytest.mark.parametrize(("overrides", "number"), [([], 2), (["schedule.steps=5"], 3), (["schedule=constant"], 3)])
def test_what_a_finished_run_offers_runs(overrides, number, small, each_way, capsys):
    given = small(*overrides)
    trained(given)
    capsys.readouterr()
    trained(given)
    offered = "\n".join(line for line in capsys.readouterr().out.splitlines() if line.startswith("  -> "))
    for way in each_way(offered, number):
        trained([*given, *way])
        assert "nothing was run" not in capsys.readouterr().out, way


SELECTIVE = "trainer.activation_checkpointing=selective"


@pytest.mark.parametrize(
    ("ranks", "overrides", "cause", "number"),
    [
        (1, [SELECTIVE, "trainer.compile=blocks"], "a compiled block shows none", 2),
        (1, [SELECTIVE, "trainer.compile=model"], "a compiled block shows none", 2),
        (2, ["parallel=fsdp", "trainer.compile=model"], "makes one graph of all blocks", 1),
        (2, ["parallel=vocab", "loss=standard"], "needs the whole head on every rank", 3),
        (2, ["parallel=vocab", "loss=cce_filter", "loss.filter_if_faster=false"], "parallel=vocab has no filter", 2),
        (2, ["parallel=none"], "a launcher started 2 processes", 1),
        (2, ["parallel=fsdp", "parallel.shard_ranks=3"], "parallel.shard_ranks=3 does not divide 2 ranks", 0),
        (2, ["parallel=vocab", "trainer.batch_size=3"], "2 ranks cannot share 3 sequences out evenly", 0),
    ],
)
def test_what_the_plan_refuses_it_takes_with_the_remedy(ranks, overrides, cause, number, small, monkeypatch):
    if ranks > 1:
        as_rank(monkeypatch.setenv, 0, ranks)
    with pytest.raises(LinrnnError, match=cause) as error:
        make_training_plan(load_config(small(*overrides)))
    assert len(ways(error.value.remedy)) == number, error.value.remedy
    for way in ways(error.value.remedy):
        make_training_plan(load_config(last_of_each([*small(*overrides), *way])))


# -------------------------------------------------------------------------------------------------- what is in use
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["loss=standard", "trainer.batch_size=4096"], 3),
        (["loss=compiled", "trainer.batch_size=1"], 2),
        (["loss=cce_kahan", "trainer.batch_size=4", "trainer.activation_checkpointing=full"], 1),
        (["loss=standard", "trainer.precision=bf16", "model=kda", "optimizer=muon"], 3),
    ],
)
def test_what_saves_memory_is_not_in_use_and_runs(overrides, expected, small):
    run = small(*overrides)
    named = ways(lighter(load_config(run)))
    assert len(named) == expected
    before = load_config(run).trainer
    for way in named:
        assert not set(way) & set(overrides)
        after = load_config(last_of_each([*run, *way]))
        make_training_plan(after)
        assert before.batch_size * before.accumulation_steps == (
            after.trainer.batch_size * after.trainer.accumulation_steps
        )


def test_a_batch_beyond_the_memory_of_a_cpu_is_refused_with_what_is_not_in_use(small, tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "available_memory", lambda: 1 << 30)
    with pytest.raises(LinrnnError, match="a training step needs") as error:
        Trainer(load_config(small("trainer.batch_size=4096", "loss=cce_kahan", f"data.cache_dir={tmp_path}/cache")))
    assert not list(tmp_path.iterdir()), "nothing is prepared or built"
    assert "cce_kahan" not in error.value.remedy
    assert ways(error.value.remedy)[0] == ["trainer.batch_size=2048", "trainer.accumulation_steps=2"]


@pytest.mark.parametrize(
    ("overrides", "named", "unnamed"),
    [
        ([], ["trainer.precision=bf16", "parallel=fsdp"], ["memory_budget_gib", "more GPUs"]),
        (["trainer.precision=bf16"], ["parallel=fsdp"], ["trainer.precision"]),
        (["parallel=fsdp"], ["more GPUs"], ["parallel=fsdp", "trainer.precision"]),
    ],
)
def test_a_state_beyond_a_gpu_is_refused_with_what_is_not_in_use(overrides, named, unnamed, small, monkeypatch):
    config = load_config(small(*overrides))
    gpu = torch.device("cuda")
    too_large = plan.Plan(config, gpu, resolve_precision(config.trainer.precision, gpu))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1))
    with pytest.raises(LinrnnError, match="alone need") as error:
        plan.check_step_fits(too_large, too_large.architecture(512))
    assert all(word in error.value.remedy for word in named), error.value.remedy
    assert not any(word in error.value.remedy for word in unnamed), error.value.remedy


# ---------------------------------------------------------------------------------------------------------- sweeps
@pytest.mark.parametrize(
    ("shared", "varied", "remedy"),
    [
        (["schedule.steps=100"], "trainer.max_steps", "use schedule=cosine schedule.steps=null"),
        (["schedule=constant"], "trainer.max_steps", "schedule"),
        (["run_name=run"], "optimizer.lr", "leave run_name out"),
        ([], "trainer.log_every", "names do not tell trainer.log_every apart"),
    ],
)
def test_points_of_a_sweep_that_share_a_directory_do_not_with_the_remedy(shared, varied, remedy, small):
    points = [small(*shared, f"{varied}={value}") for value in (1, 2)]
    with pytest.raises(LinrnnError, match=f"the points {varied}=1 and {varied}=2 would share") as error:
        plan_points(points)
    assert remedy in error.value.remedy
    for way in ways(error.value.remedy):
        assert len(plan_points([last_of_each([*point, *way]) for point in points])) == 2


def test_a_point_that_stops_before_a_finished_run_is_answered_with_the_remedy(small):
    fitted(small("schedule.steps=100"))
    shorter = small("schedule.steps=100", "trainer.max_steps=2")
    with pytest.raises(LinrnnError, match="stops at 2") as error:
        plan_points([shorter])[0].is_done(retry=False)
    [way] = ways(error.value.remedy)
    assert plan_points([last_of_each([*shorter, *way])])[0].is_done(retry=False)
