"""What is wrong with an override or a YAML file, as one line of cause and one of remedy."""

import dataclasses
import difflib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import yaml

from linrnn.config.schema import SCHEMAS
from linrnn.core.errors import ConfigError, first_line

_WORDS = {int: "a whole number", float: "a number", bool: "true or false"}


def nearest(name: str, valid: Sequence[str], count: int = 3) -> list[str]:
    """The `count` valid names most like `name`; a name that contains it or is contained in it comes first."""
    ranked = sorted(valid, key=lambda v: -difflib.SequenceMatcher(None, name, v).ratio() - (name in v or v in name))
    return ranked[:count]


# ------------------------------------------------------------------------------------------------------ overrides
def unknown_key(key: str, composed: Any) -> ConfigError:
    """The error for a key that a composed configuration does not have, with the nearest keys that it has.

    Args:
        composed: the configuration as dictionaries.
    """
    valid = list(_keys(composed))
    group, _, leaf = key.rpartition(".")
    owners = [
        option
        for option, schema in SCHEMAS.get(group, {}).items()
        if option and leaf in {field.name for field in dataclasses.fields(schema)}
    ]
    likely = nearest(key, valid)
    if not group:  # a misspelt group: `modl=gla`
        groups = sorted({name.partition(".")[0] for name in valid if "." in name})
        likely = [*(f"{name}=…" for name in difflib.get_close_matches(key, groups, n=1)), *likely]
    siblings = [name.removeprefix(f"{group}.") for name in valid if group and name.startswith(f"{group}.")]
    hints = [
        f"it is an option of {', '.join(f'{group}={owner}' for owner in owners)}" if owners else "",
        f"nearest: {', '.join(likely)}" if not owners else "",
        f"{group} has: {', '.join(siblings)}" if siblings else "",
    ]
    return ConfigError(f"{key}: there is no such key", "; ".join(hint for hint in hints if hint))


def _keys(nested: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in nested.items():
        yield from _keys(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"]


def bad_value(line: str, value: Any, owner: Any, error: Exception) -> ConfigError:
    """The error for an override whose value does not have the key's type.

    Args:
        owner: the schema that has the key.
        error: OmegaConf's.
    """
    key, _, text = line.partition("=")
    kind = get_type_hints(owner).get(key.rpartition(".")[2]) if dataclasses.is_dataclass(owner) else None
    if isinstance(kind, UnionType):
        [kind] = set(get_args(kind)) - {NoneType}
    if get_origin(kind) is list:
        if not isinstance(value, list):
            return ConfigError(f"{line}: {key} is a list", f"put it in brackets: {key}=[{text}]")
        [kind] = get_args(kind)
    if kind not in _WORDS:
        return ConfigError(f"{line}: {first_line(error)}", "give it a value of the type that --help describes")
    remedy = f"give {key} {_WORDS[kind]}"
    with suppress(ValueError, OverflowError):
        if kind is int and float(text).is_integer():
            remedy = f"write {key}={int(float(text))}"
    return ConfigError(f"{line} is not {_WORDS[kind]}", remedy)


# ---------------------------------------------------------------------------------------------------------- files
def broken_file(error: Exception, options: Sequence[str], config_dir: Path) -> ConfigError:
    """The error for a file that sets a key which is not there, or a value of the wrong type.

    Args:
        error: Hydra's, raised at OmegaConf's, which knows the key.
        options: the chosen ones, `group=option`, without those that the menu chooses.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError

    cause = error.__cause__ or error.__context__ or error
    key = str(getattr(cause, "full_key", None) or "")
    group, chosen = key.split(".")[0], dict(option.split("=") for option in options)
    file = config_dir / group / f"{chosen.get(group, '…')}.yaml"
    if not key:
        return ConfigError(first_line(error), "the files of configs/ do not fit together: correct the one it names")
    is_unknown = isinstance(cause, ConfigKeyError | ConfigAttributeError)
    if experiment := chosen.get("experiment"):
        path = config_dir / "experiment" / f"{experiment}.yaml"
        if OmegaConf.select(OmegaConf.load(path), key) is not None:
            file = path
            if is_unknown:
                return ConfigError(
                    f"experiment={experiment} sets {key}, which {group}={chosen.get(group, '…')} does not have",
                    f"choose another {group}, or run without experiment={experiment}",
                )
    if is_unknown:
        return ConfigError(f"{shown(file)}: there is no such key as {key}", "write it as the group's other files do")
    return ConfigError(f"{shown(file)}: {key}: {first_line(cause)}", "give it a value as in the group's other files")


def broken_yaml(error: yaml.MarkedYAMLError) -> ConfigError:
    """The error for a file that is not valid YAML. It names the line."""
    mark = error.problem_mark or error.context_mark
    where = f"{shown(Path(mark.name))}, line {mark.line + 1}" if mark else "a YAML file"
    words = (error.context if error.problem_mark is None else None, error.problem)
    return ConfigError(
        f"{where}: {'; '.join(word for word in words if word)}", "correct that line or the one before it"
    )


def shown(path: Path) -> str:
    """A path for messages. A path of the repository's own configuration starts at `configs/`."""
    if "configs" in path.parts:
        path = Path(*path.parts[path.parts.index("configs") :])
    return str(path)
