"""A sweep's points as jobs of a Hydra launcher: Slurm through submitit, or submitit's local executor."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import HydraContext
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from linrnn.config.compose import CONFIG_DIR, register_schemas
from linrnn.config.safety import check_launcher
from linrnn.core.errors import ConfigError


def launch(
    function: Callable[[list[str]], Any], jobs: Sequence[Sequence[str]], overrides: Sequence[str], directory: Path
) -> None:
    """Call `function(overrides of train.py)` once a job, on the launcher that `overrides` choose; wait for all.

    Args:
        function: importable by name on the machines of the cluster.
        jobs: every job's overrides of train.py.
        overrides: of Hydra: `hydra/launcher=…`, `hydra.launcher.…=…`.
        directory: for the launcher's own files, seen by all machines.

    Raises:
        ConfigError: there is no such launcher (not installed), or it has no such key, or the key names code.
    """
    check_launcher(overrides)
    register_schemas()
    GlobalHydra.instance().clear()
    with initialize_config_dir(version_base="1.3", config_dir=str(CONFIG_DIR)):
        try:
            config = compose(
                "train",
                overrides=[
                    f"hydra.sweep.dir={directory}",
                    "hydra.sweep.subdir=.",
                    "hydra.output_subdir=null",
                    *overrides,
                ],
                return_hydra_config=True,
            )
            context = HydraContext(config_loader=GlobalHydra.instance().config_loader(), callbacks=Callbacks())
            launcher = Plugins.instance().instantiate_launcher(
                hydra_context=context, task_function=functools.partial(_job, function), config=config
            )
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(
                " ".join(str(error).split("\n")[0].split()),
                "pip install 'linrnn[slurm]' for submitit_slurm and submitit_local; their keys are hydra.launcher.…",
            ) from error
        launcher.launch(jobs, initial_job_idx=0)


def _job(function: Callable[[list[str]], Any], composed: DictConfig) -> Any:
    """In the job: the overrides that this one was given."""
    return function(list(HydraConfig.get().overrides.task))
