"""Read and write overrides: refuse what no configuration may do, read values with Hydra's grammar, write them back.

A configuration may not run code, read the environment, or reach Hydra's own machinery. Configurations also come from
other people's files: a run's config.yaml, or names of model and size in a summary. Values are therefore only values. A
model, a loss or a data source is looked up by name in a registry. Nothing is imported, called or resolved by its name.

Hydra cannot read a path such as `it's [mine], 50%`, and would turn `1e5` into 100000.0. The value of a key that holds a
string is therefore taken as it stands.
"""

import dataclasses
import functools
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_origin

from linrnn.config.schema import SCHEMAS, TextDataConfig
from linrnn.core.errors import ConfigError, first_line

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

_KEY = re.compile(r"\+{0,2}[A-Za-z_]\w*(\.\w+)*", re.ASCII)
_OPTION = re.compile(r"(?!.*\.\.)[\w.-]*", re.ASCII)
_PATHS = {f"data.{field.name}" for field in dataclasses.fields(TextDataConfig) if "several" in field.metadata}
_QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)


def check_text(text: str) -> None:
    """Reject values that would be computed (`${oc.env:HOME}`).

    Raises:
        ConfigError: the text holds such a value.
    """
    for line in text.splitlines():
        if "${" in line:
            raise ConfigError(f"{line.strip()}: values are not computed", "write the value itself, without ${")


def check_overrides(overrides: Sequence[str]) -> None:
    """Reject overrides that do more than set a key's value or choose an option of a group.

    Raises:
        ConfigError: an override does more.
    """
    for override in overrides:
        check_text(override)
        key, equals, value = override.partition("=")
        if re.match(r"[+~]*hydra\b", key):
            remedy = "leave it out; scripts/sweep.py takes cluster=slurm"
            raise ConfigError(f"{override}: there are no keys of Hydra's own", remedy)
        if key.startswith("~"):
            remedy = f"leave it out, or write {key.lstrip('~')}=null where null is allowed"
            raise ConfigError(f"{override}: no key can be removed", remedy)
        if not equals or not _KEY.fullmatch(key):
            raise unreadable(override)
        if key.lstrip("+") in SCHEMAS and not _OPTION.fullmatch(value):
            remedy = f"choose one by {key}=NAME, as --help lists them; scripts/sweep.py takes several"
            raise ConfigError(f"{override}: options are names", remedy)


def unreadable(override: str) -> ConfigError:
    """The error for an override that is no `key=value`. A word without `=` may be the rest of a value with spaces."""
    remedy = "write overrides as key=value or group=option, in a sweep also key=a,b,c"
    if "=" not in override:
        remedy += "; a value with spaces needs quotes: 'key=two words'"
        remedy = f"a path needs its key: KEY={override} (--help lists the keys)" if os.path.exists(override) else remedy
    return ConfigError(f"{override!r} cannot be read", remedy)


def key_of(override: str) -> str:
    """The key that an override sets, or the group whose option it chooses; empty if it is neither."""
    key, equals, _ = override.partition("=")
    return key.lstrip("+") if equals else ""


def last_of_each(overrides: Sequence[str]) -> list[str]:
    """Overrides without those that a later one of the same key replaces."""
    last = {override.partition("=")[0].lstrip("+"): position for position, override in enumerate(overrides)}
    return [overrides[position] for position in sorted(last.values())]


# ----------------------------------------------------------------------------------------------------------- read
@functools.lru_cache(maxsize=4096)  # the points of a sweep share most of their overrides
def parse(line: str) -> "Override":
    """An override as Hydra reads it.

    Raises:
        ConfigError: it cannot be read. The remedy says how to write it.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(line)
    except (HydraException, ValueError, RecursionError) as error:
        key, equals, value = line.partition("=")
        if equals and value.startswith(("[", "{")):
            how = f"quote each entry that is no plain word, and all of it for the shell: '{key}=[\"a, b\",c]'"
            raise ConfigError(f"{line!r} cannot be read", how) from error
        if isinstance(error, HydraException):
            raise unreadable(line) from error
        raise ConfigError(first_line(error), "write overrides as key=value or group=option") from error


def read_value(override: str, kind: Any) -> Any:
    """The value that an override gives to a key.

    Args:
        kind: the key's type. A string needs no quotes; in quotes it is what Hydra reads in them. An int may be 1e3.

    Raises:
        ConfigError: it cannot be read, or holds several values.
    """
    key, _, text = override.partition("=")
    in_brackets = key in _PATHS and text.startswith("[") and text.endswith("]")
    if kind is str and text.lower() != "null" and not in_brackets and not is_quoted(text):
        return text
    parsed = parse(override)
    if parsed.is_sweep_override():
        if get_origin(kind) is list:
            raise ConfigError(f"{override}: {key} is a list", f"write a list as {key}=[{text}]")
        raise ConfigError(f"{override}: {key} takes one value", "scripts/sweep.py runs several")
    value = parsed.value()
    return int(value) if kind is int and isinstance(value, float) and value.is_integer() else value


def is_quoted(text: str) -> bool:
    """Whether all of a value stands in one pair of quotes."""
    return _QUOTED.fullmatch(text) is not None


# ---------------------------------------------------------------------------------------------------------- write
def written(key: str, value: Any) -> str:
    """The override that gives a key this value. A string never reads as `null`, as a list, as several or as quoted."""
    odd = isinstance(value, str) and (value.lower() == "null" or "," in value or value.startswith(("'", '"', "[")))
    return f"{key}={value if isinstance(value, str) and not odd else _entry(value)}"


def _entry(value: Any) -> str:
    """A value, alone or in a list or mapping. Strings are quoted, because only quotes tell them from numbers."""
    if isinstance(value, str):
        from hydra.core.override_parser.types import Quote, QuotedString

        return QuotedString(text=value, quote=Quote.single).with_quotes()
    if isinstance(value, list):
        return f"[{','.join(map(_entry, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_entry(item)}' for key, item in value.items())}}}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
