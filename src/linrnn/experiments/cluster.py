"""Run a sweep's points as jobs of Slurm, or as processes that submitit starts on this machine."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from linrnn.core.errors import ConfigError, first_line
from linrnn.core.requirements import require_package


def run_on_cluster(
    function: Callable[[Any], Any], jobs: Sequence[Any], cluster: str, resources: Mapping[str, Any], directory: Path
) -> None:
    """Call `function(job)` once per job on a cluster; wait for all jobs.

    Args:
        function: importable by name on the machines of the cluster.
        jobs: every job's argument, which must be picklable.
        cluster: `slurm`, or `local` for processes of this machine.
        resources: of each job, by submitit's names.
        directory: for submitit's own files, visible to all machines.

    Raises:
        UnsupportedError: submitit is missing.
        ConfigError: Slurm's commands are missing, or submitit or Slurm rejects a resource.
        submitit.core.utils.FailedJobError, submitit.core.utils.UncompletedJobError: a job was lost. All other jobs have
            ended.
    """
    require_package("submitit", "submitit", f"cluster={cluster}", "submitit>=1.5")
    import submitit

    class Job(submitit.helpers.Checkpointable):
        """What Slurm may interrupt and queue again. The run then continues from its own checkpoint."""

        def __call__(self, job: Any) -> Any:
            return function(job)

    away = [command for command in ("srun", "sbatch") if cluster == "slurm" and shutil.which(command) is None]
    if away:
        raise ConfigError(
            f"cluster=slurm needs {' and '.join(away)}, and PATH has no such command",
            "start the sweep on a login node of the cluster, or use cluster=local or none",
        )
    try:
        executor = submitit.AutoExecutor(folder=directory / ".submitit" / "%j", cluster=cluster)
        executor.update_parameters(**{"timeout_min": 60, "name": "linrnn", **resources})
        submitted = executor.map_array(Job(), list(jobs))
    except (AssertionError, NameError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"resources={dict(resources)}: {' '.join(first_line(error).split())}",
            "give resources their names in submitit: timeout_min, gpus_per_node, mem_gb, slurm_partition, …",
        ) from error
    problems = [problem for job in submitted if (problem := job.exception()) is not None]
    if problems:
        raise problems[0]
