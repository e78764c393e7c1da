"""What is wrong with an override or a YAML file, as one line of cause and one of remedy."""

import dataclasses
import difflib
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, get_args, get_origin

from linrnn.config.schema import SCHEMAS, kind_of, leaves
from linrnn.core.errors import ConfigError, first_line

_WORDS = {int: "a whole number", float: "a number", bool: "true or false"}


def nearest(name: str, valid: Sequence[str], count: int = 3) -> list[str]:
    """The `count` valid names most like `name`; a name that contains it or is contained in it comes first."""
    ranked = sorted(valid, key=lambda v: -difflib.SequenceMatcher(None, name, v).ratio() - (name in v or v in name))
    return ranked[:count]


def unknown_key(key: str, composed: dict[str, Any]) -> ConfigError:
    """The error for a key that a composed configuration does not have, with the nearest keys that it has."""
    valid = [name for name, _ in leaves(composed)]
    group, _, leaf = key.rpartition(".")
    owners = [
        f"{group}={option}"
        for option, schema in SCHEMAS.get(group, {}).items()
        if option and leaf in {field.name for field in dataclasses.fields(schema)}
    ]
    likely = nearest(key, valid)
    if not group:  # a misspelt group: `modl=gla`
        groups = sorted({name.partition(".")[0] for name in valid if "." in name})
        likely = [*(f"{name}=…" for name in difflib.get_close_matches(key, groups, n=1)), *likely]
    siblings = [name.removeprefix(f"{group}.") for name in valid if group and name.startswith(f"{group}.")]
    hints = [
        f"it is an option of {', '.join(owners)}" if owners else f"nearest: {', '.join(likely)}",
        *([f"{group} has: {', '.join(siblings)}"] if siblings else []),
    ]
    return ConfigError(f"{key}: there is no such key", "; ".join(hints))


def bad_value(override: str, value: Any, owner: Any, error: Exception) -> ConfigError:
    """The error for an override whose value does not have the key's type.

    Args:
        owner: the schema that has the key.
        error: OmegaConf's.
    """
    key, _, text = override.partition("=")
    kind = kind_of(owner, key.rpartition(".")[2])
    if get_origin(kind) is list:
        if not isinstance(value, list):
            return ConfigError(f"{override}: {key} is a list", f"put it in brackets: {key}=[{text}]")
        [kind] = get_args(kind)
    if kind not in _WORDS:
        return ConfigError(f"{override}: {first_line(error)}", "give it a value of the type that --help describes")
    remedy = f"give {key} {_WORDS[kind]}"
    with suppress(ValueError, OverflowError):
        if kind is int and float(text).is_integer():
            remedy = f"write {key}={int(float(text))}"
    return ConfigError(f"{override} is not {_WORDS[kind]}", remedy)


def broken_file(error: Exception, options: Sequence[str]) -> ConfigError:
    """The error for a file of configs/ that cannot be composed.

    Args:
        error: of Hydra, raised at OmegaConf's, which knows the key; or of YAML, which names file and line.
        options: the chosen ones, `group=option`, without those that the menu chooses.
    """
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError

    cause = error.__cause__ or error.__context__ or error
    key = str(getattr(cause, "full_key", None) or "")
    if not key:
        files = " or ".join(f"configs/{option.replace('=', '/')}.yaml" for option in options) or "a file of configs/"
        return ConfigError(f"{files} is no YAML: {' '.join(str(error).split())}", "correct that line or the one before")
    group, chosen = key.split(".")[0], dict(option.split("=") for option in options)
    option = chosen.get(group, "…")
    is_unknown = isinstance(cause, ConfigKeyError | ConfigAttributeError)
    if is_unknown and (experiment := chosen.get("experiment")):
        return ConfigError(
            f"experiment={experiment} sets {key}, which {group}={option} does not have",
            f"choose another {group}, or run without experiment={experiment}",
        )
    what = f"there is no such key as {key}" if is_unknown else f"{key}: {first_line(cause)}"
    return ConfigError(f"configs/{group}/{option}.yaml: {what}", "write it as the group's other files do")
