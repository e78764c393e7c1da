"""Run a sweep's points as jobs of Slurm, or as processes that submitit starts on this machine."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from linrnn.core.errors import ConfigError, first_line
from linrnn.losses.requirements import how_to_install

LAUNCHER, RESOURCE = "hydra/launcher=", "hydra.launcher."  # a launcher's overrides begin with one of these
CLUSTERS = {"submitit_slurm": "slurm", "submitit_local": "local"}
# Resources whose name in submitit is the same on every cluster. All other resources exist only in Slurm.
SHARED = (
    *("cpus_per_task", "gpus_per_node", "mem_gb", "name", "nodes", "stderr_to_stdout", "tasks_per_node"),
    "timeout_min",
)
_OF_EXECUTOR = "max_num_timeout"  # how often Slurm requeues a job that ran out of time


class Job:
    """A call of a function. Slurm may interrupt it and queue it again with the same argument."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def __call__(self, job: Any) -> Any:
        return self._function(job)

    def checkpoint(self, job: Any) -> Any:
        """The call that submitit queues in place of an interrupted job. The run continues from its own checkpoint."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, job)


def launch(function: Callable[[Any], Any], jobs: Sequence[Any], overrides: Sequence[str], directory: Path) -> None:
    """Call `function(job)` once per job on the cluster that `overrides` choose; wait for all jobs.

    Args:
        function: importable by name on the machines of the cluster.
        jobs: every job's argument, which must be picklable.
        overrides: `hydra/launcher=submitit_slurm` or `submitit_local`, and resources: `hydra.launcher.KEY=VALUE`.
        directory: for submitit's own files, visible to all machines.

    Raises:
        ConfigError: submitit or Slurm's commands are missing, or they reject a resource.
        submitit.core.utils.FailedJobError, submitit.core.utils.UncompletedJobError: a job was lost. All other jobs have
            ended.
    """
    cluster, resources = read_launcher(overrides)
    try:
        import submitit
    except ImportError as error:
        raise ConfigError(
            f"submitit cannot be imported ({first_line(error)})", f"{how_to_install('submitit')} 'submitit>=1.5'"
        ) from error
    try:
        options = {f"slurm_{_OF_EXECUTOR}": resources.pop(_OF_EXECUTOR)} if _OF_EXECUTOR in resources else {}
        executor = submitit.AutoExecutor(folder=directory / ".submitit" / "%j", cluster=cluster, **options)
        executor.update_parameters(**{key if key in SHARED else f"slurm_{key}": v for key, v in resources.items()})
        submitted = executor.map_array(Job(function), list(jobs))
    except (AssertionError, NameError, OSError, RuntimeError, TypeError, ValueError) as error:
        away = [command for command in ("srun", "sbatch") if cluster == "slurm" and shutil.which(command) is None]
        if away:
            raise ConfigError(
                f"{LAUNCHER}submitit_slurm needs {' and '.join(away)}, and PATH has no such command",
                f"start the sweep on a login node of the cluster, or use {LAUNCHER}submitit_local or no launcher",
            ) from error
        raise ConfigError(  # submitit or sbatch rejects a resource
            f"{' '.join(overrides)}: {' '.join(first_line(error).split())}",
            f"correct the resource: {RESOURCE}KEY takes {', '.join(SHARED)}, and options of sbatch such as partition",
        ) from error
    problems = [problem for job in submitted if (problem := job.exception()) is not None]
    if problems:
        raise problems[0]


def read_launcher(overrides: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The cluster that overrides choose, and the resources that they ask for. Only submitit knows which there are.

    Raises:
        ConfigError: the overrides name no launcher or an unknown one, or another key of Hydra's.
    """
    for override in overrides:
        if override.startswith(LAUNCHER) and override.removeprefix(LAUNCHER) not in CLUSTERS:
            raise ConfigError(f"{override}: there is no such launcher", f"choose {' or '.join(CLUSTERS)}")
        if not override.startswith((LAUNCHER, RESOURCE)) or "=" not in override:
            raise ConfigError(
                f"{override}: a sweep has no such key", f"of Hydra it takes {LAUNCHER}NAME and {RESOURCE}KEY=VALUE"
            )
    names = [override.removeprefix(LAUNCHER) for override in overrides if override.startswith(LAUNCHER)]
    if not names:
        raise ConfigError(f"{overrides[0]}: resources of no launcher", f"add {LAUNCHER}submitit_slurm")
    settings = [override.removeprefix(RESOURCE) for override in overrides if override.startswith(RESOURCE)]
    try:
        resources = {key: yaml.safe_load(value) for key, _, value in (setting.partition("=") for setting in settings)}
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a value that looks like a date but is not one
        raise ConfigError(f"{', '.join(settings)}: a value cannot be read", "write numbers and plain words") from error
    return CLUSTERS[names[-1]], {"timeout_min": 60, "name": "linrnn", **resources}
