"""A sweep's jobs through submitit: the cluster, the resources, and what is rejected."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from linrnn.core.errors import ConfigError
from linrnn.experiments.launching import launch, read_launcher

submitit = pytest.importorskip("submitit", reason="pip install 'linrnn[slurm]'")


def test_overrides_choose_the_cluster_and_its_resources():
    given = ["hydra/launcher=submitit_slurm", "hydra.launcher.partition=gpu", "hydra.launcher.gpus_per_node=1"]
    assert read_launcher(given) == (
        "slurm",
        {"timeout_min": 60, "name": "linrnn", "partition": "gpu", "gpus_per_node": 1},
    )
    assert read_launcher(["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5"])[1]["timeout_min"] == 5


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["hydra.launcher.nodes=1"], "resources of no launcher"),
        (["hydra/launcher=submitit_local", "hydra.launcher.nodes=many"], "nodes"),
        (["hydra/launcher=submitit_local", "hydra.launcher.name=[a"], "cannot be read"),
        (["hydra/launcher=submitit_slurm"], "needs srun and sbatch, and PATH has no such command"),
    ],
)
def test_what_submitit_cannot_do_is_refused(overrides, words, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # no Slurm here
    with pytest.raises(ConfigError, match=words) as error:
        launch(subprocess.check_call, [["touch", str(tmp_path / "a")]], overrides, tmp_path)
    assert not (tmp_path / "a").exists()
    assert "pip install" not in error.value.remedy, "submitit is installed"


@pytest.mark.parametrize("key", ["_target_", "submitit_folder", "partitoin"])
def test_submitit_refuses_what_slurm_does_not_have(key, tmp_path, monkeypatch):
    """The Slurm here consists only of commands with the right names."""
    for name in ("srun", "sbatch", "squeue", "scontrol"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=f"Unknown argument '{key}' for executor 'slurm'") as error:
        launch(subprocess.check_call, [["a=1"]], ["hydra/launcher=submitit_slurm", f"hydra.launcher.{key}=x"], tmp_path)
    assert error.value.remedy.startswith("correct the resource: hydra.launcher.KEY takes cpus_per_task, ")


def test_slurm_s_own_resources_reach_slurm_by_their_names(tmp_path, monkeypatch):
    asked: dict[str, Any] = {}

    class Executor:
        def __init__(self, folder: Path, cluster: str, **options: Any) -> None:
            asked.update(cluster=cluster, **options)

        def update_parameters(self, **parameters: Any) -> None:
            asked.update(parameters)

        def map_array(self, function: Any, jobs: Sequence[list[str]]) -> list[Any]:
            asked.update(jobs=list(jobs), again=function.checkpoint(jobs[0]).args)
            return []

    monkeypatch.setattr(submitit, "AutoExecutor", Executor)
    resources = ["partition=gpu", "mem_gb=80", "max_num_timeout=3", "setup=[module load cuda]", "exclusive=true"]
    launch(
        subprocess.check_call,
        [["a=1"]],
        ["hydra/launcher=submitit_slurm", *(f"hydra.launcher.{r}" for r in resources)],
        tmp_path,
    )
    assert asked == {
        "cluster": "slurm",
        "slurm_max_num_timeout": 3,
        "slurm_partition": "gpu",
        "slurm_setup": ["module load cuda"],
        "slurm_exclusive": True,
        "mem_gb": 80,
        "timeout_min": 60,
        "name": "linrnn",
        "jobs": [["a=1"]],
        "again": (["a=1"],),
    }


def test_every_job_ends_before_a_lost_one_is_told(tmp_path):
    jobs = [["false"], ["sh", "-c", f"sleep 1; touch '{tmp_path}/whole'"]]
    with pytest.raises(submitit.core.utils.FailedJobError, match="non-zero exit status"):
        launch(subprocess.check_call, jobs, ["hydra/launcher=submitit_local"], tmp_path)
    assert (tmp_path / "whole").exists()
