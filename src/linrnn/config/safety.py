"""What no configuration may do: run code, read the environment, or reach Hydra's own machinery.

Values are values. What a configuration names (a model, a loss, a data source) is looked up in a registry: nothing is
imported or called by its name, nothing is resolved, and of Hydra itself only a launcher's resources can be set.
"""

import re
from collections.abc import Sequence

from linrnn.config.schema import SCHEMAS
from linrnn.core.errors import ConfigError

LAUNCHERS = ("submitit_slurm", "submitit_local")
# Resources that a sweep may ask of a cluster; keys that name programs or shell commands are not among them.
LAUNCHER_KEYS = (
    *("account", "array_parallelism", "comment", "constraint", "cpus_per_gpu", "cpus_per_task", "exclude"),
    *("gpus_per_node", "gpus_per_task", "gres", "max_num_timeout", "mem_gb", "mem_per_cpu", "mem_per_gpu", "name"),
    *("nodes", "partition", "qos", "signal_delay_s", "stderr_to_stdout", "tasks_per_node", "timeout_min"),
)
_GROUPS = {*SCHEMAS, "experiment"}
_KEY = re.compile(r"(\+\+?|~)?[A-Za-z_]\w*(\.\w+)*", re.ASCII)
_OPTION = re.compile(r"(?!.*\.\.)[\w.-]*", re.ASCII)
_RESOLVER = "${"


def check_text(text: str) -> None:
    """Raises ConfigError: a value would be computed rather than read (`${oc.env:HOME}`)."""
    if _RESOLVER in text:
        line = next(line.strip() for line in text.splitlines() if _RESOLVER in line)
        raise ConfigError(f"{line}: values are not computed", "write the value itself, without ${")


def check_overrides(overrides: Sequence[str]) -> None:
    """Raises ConfigError: an override would do more than set a value of a key or choose an option of a group."""
    for override in overrides:
        check_text(override)
        prefixed, _, value = override.partition("=")
        key = prefixed.lstrip("+~")
        if re.match(r"hydra\b", key):
            raise ConfigError(
                f"{override}: Hydra's own keys are not for runs", "scripts/sweep.py takes hydra/launcher=…"
            )
        if not _KEY.fullmatch(prefixed):
            raise ConfigError(f"{override!r} cannot be read", "write overrides as key=value or group=option")
        if key in _GROUPS and not _OPTION.fullmatch(value):
            raise ConfigError(f"{override}: options are names", f"choose one of configs/{key} by {key}=NAME")


def check_launcher(overrides: Sequence[str]) -> None:
    """Raises ConfigError: Hydra would be asked for more than a launcher and the resources of its jobs."""
    for override in overrides:
        check_text(override)
        key, _, value = override.partition("=")
        launcher = key == "hydra/launcher" and value in LAUNCHERS
        resource = key.startswith("hydra.launcher.") and key.removeprefix("hydra.launcher.") in LAUNCHER_KEYS
        if not (launcher or (resource and value.isprintable())):
            raise ConfigError(
                f"{override}: of Hydra a sweep takes hydra/launcher={'|'.join(LAUNCHERS)} and hydra.launcher.KEY=…",
                f"KEY is one of {', '.join(LAUNCHER_KEYS)}; load modules in the shell that starts the sweep",
            )
