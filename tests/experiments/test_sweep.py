"""`scripts/sweep.py` as a user calls it: dry run, run, repeated run; and jobs of submitit's local executor."""

import itertools
import json
from unittest.mock import patch

import pytest
import torch

from linrnn.config import load_config
from linrnn.config.cli import split_overrides
from linrnn.core.errors import ConfigError, UnsupportedError
from linrnn.experiments import sweep

pytestmark = pytest.mark.usefixtures("quick_points")


def test_a_sweep_is_listed_run_and_not_run_again(small, tmp_path):
    points = small("sweep=checkpointing", "experiment=null", "loss=standard,liger", "model=transformer")
    points += ["trainer.activation_checkpointing=none", "memory_budget_gib=null", "size=smoke"]
    assert "2 points: 1 to run, 1 unsupported" in said_by_sweep(*points, "dry_run=true")
    assert not (tmp_path / "results").exists()
    said_by_sweep(*points)
    summaries = [json.loads(path.read_text()) for path in (tmp_path / "results/checkpointing").glob("*/summary.json")]
    assert {s["loss"]: s["status"] for s in summaries} == {"standard": "finished", "liger": "unsupported"}
    assert len({frozenset(s) for s in summaries}) == 1, "a summary has the same keys whatever became of the run"
    assert any("2 points, 0 to run" in line for line in said_by_sweep(*points))


def said_by_sweep(*overrides: str) -> list[str]:
    """The command's output. The command runs in this process; its points run in their own."""
    own, runs = split_overrides(overrides, "run_sweep")
    said: list[str] = []
    with patch.object(sweep, "say", said.append):
        sweep.run_sweep(load_config(own, "run_sweep"), runs)
    return said


def test_a_sweep_without_a_file_crosses_the_lists_of_the_command_line(small):
    lists = ["model=gla,transformer", "loss=standard,compiled,cce_kahan", "seed=0,1", "size=smoke", "group=mine"]
    said = said_by_sweep(*small(*lists, "dry_run=true"))
    labels = [line.split("  ")[0] for line in said[1:13]]
    crossed = itertools.product(("gla", "transformer"), ("standard", "compiled", "cce_kahan"), (0, 1))
    assert labels == [f"model={model} loss={loss} seed={seed}" for model, loss, seed in crossed]
    assert "12 points: 12 to run" in said


def test_a_sweep_is_listed_for_a_gpu_that_is_not_here_and_not_run_there(small):
    points = small("model=gla", "loss=standard,liger", "size=smoke", "jobs=2")
    said = said_by_sweep(*points, "dry_run=true", "gpu=h100")
    assert "2 points: 2 to run" in said
    assert said[-2].startswith("memory is estimated for h100")
    with pytest.raises(ConfigError, match="gpu=h100 names the GPU of a forecast"):
        said_by_sweep(*points, "gpu=h100")


def test_a_sweep_stores_its_targets_beside_its_runs_and_refuses_a_wrong_one(small, tmp_path):
    points = small("sweep=same_loss", "experiment=null", "model=transformer", "loss=liger", "seed=0", "size=smoke")
    with pytest.raises(UnsupportedError):  # liger needs a GPU
        said_by_sweep(*points)
    stored = json.loads((tmp_path / "results" / "same_loss" / "targets.json").read_text())
    assert [target["metric"] for target in stored] == ["train_loss_nats", "curve_difference"]
    own, runs = split_overrides(points, "run_sweep")
    config = load_config(own, "run_sweep")
    config.sweep.targets = [{"metric": "train_los", "within": 0.01}]
    with pytest.raises(ConfigError, match=r"(?s)train_los.*nearest: train_loss_nats"):
        sweep.run_sweep(config, runs)


def shared(*more: str) -> list[str]:
    """Overrides of a sweep with one point of two ranks."""
    one_point = ["sweep=checkpointing", "experiment=null", "model=gla", "loss=standard", "size=smoke"]
    one_point += ["trainer.activation_checkpointing=none", "memory_budget_gib=null", "schedule=constant"]
    one_point += ["schedule.steps=4", "schedule.warmup_steps=0"]
    return [*one_point, "parallel=fsdp", "sweep.ranks=2", *more]


def test_a_point_of_two_ranks_is_run_continued_and_not_run_again(small, tmp_path):
    foreseen = said_by_sweep(*small(*shared("dry_run=true")))
    assert any("each point has 2 ranks, and its memory is that of one" in line for line in foreseen)
    for steps in (2, 3):
        said_by_sweep(*small(*shared(f"trainer.max_steps={steps}")))
    [path] = (tmp_path / "results/checkpointing").glob("*/summary.json")
    summary = json.loads(path.read_text())
    assert (summary["status"], summary["steps"], summary["world_size"]) == ("finished", 3, 2)
    assert "resuming at step 2" in path.with_name("train.log").read_text()
    assert any("1 points, 0 to run" in line for line in said_by_sweep(*small(*shared("trainer.max_steps=3"))))


def test_points_that_share_a_gpu_say_so_in_their_summaries(small, tmp_path, monkeypatch):
    """Each point computes on the CPU here, and is told what it would be told on the one GPU."""
    points = small("sweep=checkpointing", "experiment=null", "loss=standard", "model=transformer", "seed=0,1")
    points += ["trainer.activation_checkpointing=none", "memory_budget_gib=null", "size=smoke"]
    foresee = sweep._look_ahead
    monkeypatch.setattr(sweep, "_look_ahead", lambda *arguments: (foresee(*arguments)[0], ["0"]))
    said = said_by_sweep(*points, "jobs=2", "share_gpus=true")
    assert sum("times not measured" in line for line in said) == 2
    summaries = [json.loads(path.read_text()) for path in (tmp_path / "results/checkpointing").glob("*/summary.json")]
    assert [(s["status"], s["gpu_shared"], s["tokens_per_second"]) for s in summaries] == [("finished", True, None)] * 2


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_on_gpus_a_point_of_two_ranks_gets_both(small, tmp_path):
    said_by_sweep(*small(*shared("device=cuda", "trainer.max_steps=2")))
    [path] = (tmp_path / "results/checkpointing").glob("*/summary.json")
    summary = json.loads(path.read_text())
    assert (summary["status"], summary["world_size"]) == ("finished", 2)


@pytest.mark.parametrize(
    ("arguments", "cause", "remedy"),
    [
        (["sweep=mve", "sweep.ranks=2"], "parallel=none is a run of one process", "parallel=fsdp"),
        ([], "no sweep is named, and no key has several values", "sweep=NAME, one of: apple, batch"),
        (["model=gla", "seed=3"], "no key has several values", "model=gla,kda seed=0,1"),
    ],
)
def test_a_wrong_sweep_is_refused(arguments, cause, remedy, command_here):
    done = command_here("scripts/sweep.py", *arguments, "dry_run=true")
    assert done.returncode == 2, done.stdout + done.stderr
    error, hint = done.stderr.strip().splitlines()
    assert cause in error
    assert remedy in hint


def test_a_sweep_s_point_runs_as_a_job_of_submitit(small, tmp_path):
    pytest.importorskip("submitit", reason="pip install 'linrnn[slurm]'")
    overrides = small("sweep=checkpointing", "experiment=null", "model=transformer", "loss=standard", "size=smoke")
    overrides += ["trainer.activation_checkpointing=full", "memory_budget_gib=null"]
    said = said_by_sweep(*overrides, "cluster=local", "resources.timeout_min=5")
    assert any("submitting 1 jobs" in line for line in said)
    assert "1 finished" in said
    assert len(list((tmp_path / "results/checkpointing").glob("*/summary.json"))) == 1
