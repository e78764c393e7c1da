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


def fields_of(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, dataclasses.Field]]:
    """Every leaf of nested dataclasses as (dotted key, the dataclass that holds it, its field)."""
    for field in dataclasses.fields(config):
        key, value = f"{prefix}{field.name}", getattr(config, field.name)
        below = {key: value}
        if isinstance(value, dict):
            below = {f"{key}.{name}": item for name, item in value.items()}
        elif isinstance(value, list):
            below = {f"{key}[{number}]": item for number, item in enumerate(value)}
        if below and all(map(dataclasses.is_dataclass, below.values())):
            for name, item in below.items():
                yield from fields_of(item, f"{name}.")
        else:
            yield key, config, field


def nearest(name: str, valid: Sequence[str]) -> list[str]:
    """The three valid names most like `name`; a name that contains it or is contained in it comes first."""
    ranked = sorted(valid, key=lambda v: -difflib.SequenceMatcher(None, name, v).ratio() - (name in v or v in name))
    return ranked[:3]


def validate(config: Any) -> None:
    """Check the bounds of all values, and replace `~` in paths: shells do not do so behind `key=`.

    Raises:
        ConfigError: a value is out of bounds. The error names the key, its value and what is allowed.
    """
    found = secrets()
    for key, owner, field in fields_of(config):
        value, bounds = getattr(owner, field.name), field.metadata
        if value is None:
            continue
        if "pattern" in bounds and not re.fullmatch(bounds["pattern"], str(value)):
            raise ConfigError(
                f"{key}={value} is no plain name", "use letters, digits, _, . and -, and no dot at its start"
            )
        items = value if isinstance(value, list) else [value]
        if "path" in bounds:
            items = [_path(key, item) for item in items]
            setattr(owner, field.name, items if isinstance(value, list) else items[0])
        for item in items:
            if isinstance(item, float) and not math.isfinite(item):
                raise ConfigError(f"{key}={item} is not a finite number", f"give {key} a finite number")
            if isinstance(item, int) and abs(item) >= 2**63:
                raise ConfigError(f"{key}={item} does not fit in 64 bits", f"give {key} a number below 2**63")
            if field.type == list[str] and not isinstance(item, str):
                raise ConfigError(f"{key} holds {item}, which is no text", "write key=value, in quotes if it has a ':'")
        if name := holds_secret(value, found):
            raise ConfigError(
                f"{key} holds the value of {name}", "configurations are stored in plain text: leave secrets out"
            )
        _check_bounds(key, value, **{name: bounds.get(name) for name in ("choices", "minimum", "maximum")})


def _path(key: str, path: Any) -> str:
    """A path with its `~` expanded."""
    if path and not isinstance(path, str):
        raise ConfigError(f"{key} holds {path}, which is no path", f"write {key} as a path or a list: [one,'2']")
    if not path:  # Path("") would be the working directory
        raise ConfigError(f"{key} is empty, as with an unset variable of the shell", f"name a path, or leave {key} out")
    if not path.isprintable():
        raise ConfigError(f"{key}={path!r} holds a character that cannot be printed", "rename the file")
    return os.path.expanduser(path)


def _check_bounds(key: str, value: Any, choices: tuple[Any, ...] | None, minimum: Any, maximum: Any) -> None:
    if choices and value not in choices:
        meant = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.7)  # not cpu for gpu, nor none for true
        if meant == ["bf16"] and "bf16_autocast" in choices:  # for fp16: bf16 would round the parameters, too
            meant = ["bf16_autocast"]
        raise ConfigError(
            f"{key}={value} is not one of {', '.join(choices)}",
            f"use {key}={meant[0]}" if meant else f"give {key} one of these values",
        )
    if minimum is not None and value < minimum:
        raise ConfigError(f"{key}={value} is below the minimum of {minimum}", f"use {key}={minimum} or more")
    if maximum is not None and value > maximum:
        raise ConfigError(f"{key}={value} is above the maximum of {maximum}", f"use {key}={maximum} or less")


def check_outputs(config: Any) -> None:
    """Check every directory that the command writes to. Nothing is created.

    Raises:
        StorageError: a path is a file, lies below a file, or may not be written.
    """
    for key, owner, field in fields_of(config):
        if field.metadata.get("path") != "written" or getattr(owner, field.name) is None:
            continue
        place = Path(getattr(owner, field.name)).absolute()
        there = next(path for path in (place, *place.parents) if os.path.lexists(path))
        if not there.is_dir():
            raise StorageError(f"{key}: {there} is a file or a broken link, not a directory", f"choose another {key}")
        if not os.access(there, os.W_OK | os.X_OK):
            raise StorageError(f"{key}: {there} may not be written", f"choose another {key}")
