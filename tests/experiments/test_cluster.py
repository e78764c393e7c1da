"""A sweep's jobs through submitit: the cluster, the resources, and what is rejected."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from linrnn.core.errors import ConfigError
from linrnn.experiments.cluster import run_on_cluster

submitit = pytest.importorskip("submitit", reason="pip install 'linrnn[slurm]'")


@pytest.mark.parametrize(
    ("cluster", "resources", "there", "words"),
    [
        ("local", {"nodes": "many"}, [], "resources=.*nodes(.|\n)*give resources their names in submitit"),
        ("slurm", {}, [], "needs srun and sbatch, and PATH has no such command"),
        ("slurm", {"slurm_partitoin": "x"}, ["srun", "sbatch", "squeue", "scontrol"], "Unknown argument 'partitoin'"),
    ],
)
def test_what_submitit_or_slurm_does_not_have_is_refused(cluster, resources, there, words, tmp_path, monkeypatch):
    """The Slurm here consists only of commands with the right names, if at all."""
    for name in there:
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=words):
        run_on_cluster(subprocess.check_call, [["touch", str(tmp_path / "a")]], cluster, resources, tmp_path)
    assert not (tmp_path / "a").exists()


def test_a_job_gets_its_resources_and_may_be_queued_again(tmp_path, monkeypatch):
    asked: dict[str, Any] = {}

    class Executor:
        def __init__(self, folder: Path, cluster: str) -> None:
            asked.update(cluster=cluster)

        def update_parameters(self, **parameters: Any) -> None:
            asked.update(parameters)

        def map_array(self, function: Any, jobs: Sequence[list[str]]) -> list[Any]:
            asked.update(jobs=list(jobs), again=function.checkpoint(jobs[0]).args)
            return []

    monkeypatch.setattr(submitit, "AutoExecutor", Executor)
    run_on_cluster(subprocess.check_call, [["a=1"]], "local", {"slurm_partition": "gpu", "timeout_min": 5}, tmp_path)
    expected = {"cluster": "local", "slurm_partition": "gpu", "timeout_min": 5, "name": "linrnn"}
    assert asked == {**expected, "jobs": [["a=1"]], "again": (["a=1"],)}


def test_every_job_ends_before_a_lost_one_is_told(tmp_path):
    jobs = [["false"], ["sh", "-c", f"sleep 1; touch '{tmp_path}/whole'"]]
    with pytest.raises(submitit.core.utils.FailedJobError, match="non-zero exit status"):
        run_on_cluster(subprocess.check_call, jobs, "local", {}, tmp_path)
    assert (tmp_path / "whole").exists()
