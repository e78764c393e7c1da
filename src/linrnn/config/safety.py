"""What no configuration may do: run code, read the environment, or reach Hydra's own machinery.

Configurations come from files of other people as well: a run's config.yaml, a summary's names of model and size. Values
are values. What a configuration names (a model, a loss, a data source) is looked up in a registry: nothing is imported
or called by its name, and nothing is resolved. What a sweep asks of a cluster comes from the command line alone and is
checked by submitit.
"""

import re
from collections.abc import Sequence

from linrnn.config.schema import SCHEMAS
from linrnn.core.errors import ConfigError

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
