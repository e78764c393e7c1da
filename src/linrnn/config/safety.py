"""What no configuration may do: run code, read the environment, or reach Hydra's own machinery.

Configurations also come from other people's files: a run's config.yaml, or names of model and size in a summary. Values
are therefore only values. A model, a loss or a data source is looked up by name in a registry. Nothing is imported or
called by its name, and nothing is resolved. A sweep's settings for a cluster come only from the command line, and
submitit checks them.
"""

import re
from collections.abc import Sequence

from linrnn.config.schema import SCHEMAS
from linrnn.config.strings import unreadable_word
from linrnn.core.errors import ConfigError

_GROUPS = {*SCHEMAS, "experiment"}
_KEY = re.compile(r"(\+\+?|~)?[A-Za-z_]\w*(\.\w+)*", re.ASCII)
_OPTION = re.compile(r"(?!.*\.\.)[\w.-]*", re.ASCII)
_RESOLVER = "${"


def check_text(text: str) -> None:
    """Reject values that would be computed (`${oc.env:HOME}`).

    Raises:
        ConfigError: the text holds such a value.
    """
    if _RESOLVER in text:
        line = next(line.strip() for line in text.splitlines() if _RESOLVER in line)
        raise ConfigError(f"{line}: values are not computed", "write the value itself, without ${")


def check_overrides(overrides: Sequence[str]) -> None:
    """Reject overrides that do more than set a key's value or choose an option of a group.

    Raises:
        ConfigError: an override does more.
    """
    for override in overrides:
        check_text(override)
        prefixed, _, value = override.partition("=")
        key = prefixed.lstrip("+~")
        if re.match(r"hydra\b", key):
            raise ConfigError(
                f"{override}: Hydra's own keys are not for runs", "scripts/sweep.py takes hydra/launcher=…"
            )
        if not _KEY.fullmatch(prefixed):
            raise unreadable_word(override)
        if key in _GROUPS and not _OPTION.fullmatch(value):
            raise ConfigError(f"{override}: options are names", f"choose one of configs/{key} by {key}=NAME")
