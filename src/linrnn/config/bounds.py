"""The bounds of values: what a schema's fields say about theirs (:func:`linrnn.config.schema.option`)."""

import dataclasses
import difflib
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from linrnn.core.errors import ConfigError, StorageError
from linrnn.core.redaction import holds_secret, secrets


def fields_of(config: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field, Any]]:
    """Every leaf of nested dataclasses as (dotted key, field, value)."""
    for field in dataclasses.fields(config):
        key, value = f"{prefix}{field.name}", getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from fields_of(value, f"{key}.")
        elif isinstance(value, dict) and all(dataclasses.is_dataclass(item) for item in value.values()):
            for name, item in value.items():
                yield from fields_of(item, f"{key}.{name}.")
        elif isinstance(value, list) and value and all(dataclasses.is_dataclass(item) for item in value):
            for number, item in enumerate(value):
                yield from fields_of(item, f"{key}[{number}].")
        else:
            yield key, field, value


def validate(config: Any) -> None:
    """Check the bounds in the metadata of the schema's fields.

    Raises:
        ConfigError: a value is out of bounds. The error names the key, its value and what is allowed.
    """
    found = secrets()
    for key, field, value in fields_of(config):
        if value is None:
            continue
        pattern = field.metadata.get("pattern")
        if pattern and not re.fullmatch(pattern, str(value)):
            raise ConfigError(
                f"{key}={value} is no plain name", "use letters, digits, _, . and -, and no dot at its start"
            )
        if "path" in field.metadata:
            _check_path(key, value)
        for number in value if isinstance(value, list) else [value]:
            _check_number(key, number)
        if field.type in (list[str], "list[str]") and (odd := [item for item in value if not isinstance(item, str)]):
            raise ConfigError(f"{key} holds {odd[0]}, which is no text", "write key=value, in quotes if it has a ':'")
        if name := holds_secret(value, found):
            raise ConfigError(
                f"{key} holds the value of {name}", "configurations are stored in plain text: leave secrets out"
            )
        _check_bounds(key, value, *(field.metadata.get(bound) for bound in ("choices", "minimum", "maximum")))


def _check_path(key: str, value: Any) -> None:
    for path in value if isinstance(value, list) else [value]:
        if path and not isinstance(path, str):
            raise ConfigError(f"{key} holds {path}, which is no path", f"write {key} as a path or a list: [one,'2']")
        if not path:  # Path("") would be the working directory
            raise ConfigError(
                f"{key} is empty, as with an unset variable of the shell", f"name a path, or leave {key} out"
            )
        if not path.isprintable():
            raise ConfigError(
                f"{key}={path!r} holds a character that cannot be printed, a line break perhaps", "rename the file"
            )


def _check_number(key: str, value: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{key}={value} is not a finite number", f"give {key} a finite number")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ConfigError(f"{key}={value} does not fit in 64 bits", f"give {key} a number below 2**63")


def _check_bounds(key: str, value: Any, choices: Sequence[Any] | None, low: Any, high: Any) -> None:
    if choices and value not in choices:
        names = [str(choice) for choice in choices]
        meant = difflib.get_close_matches(str(value), names, n=1, cutoff=0.7)  # not cpu for gpu, nor none for true
        if meant == ["bf16"] and "bf16_autocast" in names:  # for fp16: bf16 would round the parameters, too
            meant = ["bf16_autocast"]
        raise ConfigError(
            f"{key}={value} is not one of {', '.join(names)}",
            f"use {key}={meant[0]}" if meant else f"give {key} one of these values",
        )
    if low is not None and value < low:
        raise ConfigError(f"{key}={value} is below the minimum of {low}", f"use {key}={low} or more")
    if high is not None and value > high:
        raise ConfigError(f"{key}={value} is above the maximum of {high}", f"use {key}={high} or less")


def expand_home(config: Any) -> None:
    """Replace `~` by the home directory in every path. Shells do not do so behind `key=`."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        for item in value if isinstance(value, list) else [value]:
            if dataclasses.is_dataclass(item):
                expand_home(item)
        if "path" in field.metadata and value is not None:
            several = isinstance(value, list)
            paths = value if several else [value]
            expanded = [os.path.expanduser(path) if isinstance(path, str) else path for path in paths]
            setattr(config, field.name, expanded if several else expanded[0])


# -------------------------------------------------------------------------------------------------------- outputs
def check_outputs(config: Any) -> None:
    """Check every directory that the command writes to. Nothing is created.

    Raises:
        StorageError: a path is a file, lies below a file, or may not be written.
    """
    for key, field, value in fields_of(config):
        if field.metadata.get("path") == "written" and value is not None:
            _check(key, Path(value).absolute())


def _check(key: str, directory: Path) -> None:
    there = directory
    while not os.path.lexists(there):
        there = there.parent
    if there.is_symlink() and not there.exists():
        raise StorageError(f"{key}: {there} is a link to nothing", f"choose another {key}")
    if not there.is_dir():
        raise StorageError(f"{key}: {there} is a file, not a directory", f"choose another {key}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise StorageError(f"{key}: {there} may not be written", f"choose another {key}")
