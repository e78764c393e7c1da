"""Quote the values of string keys, so that Hydra takes them literally.

Hydra reads values as numbers, lists, mappings and functions. It cannot read a path such as `it's [mine], 50%`, and
would turn `1e5` into 100000.0. Values of keys that hold a string are therefore quoted before Hydra reads them.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException, OverrideParseException

from linrnn.config.schema import COMMANDS, SCHEMAS, TextDataConfig
from linrnn.core.errors import ConfigError

HOW_TO_QUOTE = "quote each entry that is no plain word, and all of it for the shell: 'KEY=[\"a, b\",c]'"
HOW_TO_WRITE = "write overrides as key=value or group=option"
# Hydra reads it as a word, too: /tmp/res, ../data, c++. Numbers begin otherwise.
_PLAIN = re.compile(r"(?!(?:true|false|null|inf|nan)$)(?:\.{0,2}/|[a-z_])[\w./+-]*", re.ASCII | re.IGNORECASE)
_PATHS = {f"data.{field.name}" for field in dataclasses.fields(TextDataConfig) if "several" in field.metadata}
_QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)


def quoted(overrides: Sequence[str], config_name: str) -> list[str]:
    """Overrides of one configuration, with every value of a string key in Hydra's quotes.

    Plain words and paths, values that the user quoted, and `null` stay as they are.
    """
    keys = string_keys(config_name)
    return [_quote(override) if _key(override) in keys else override for override in overrides]


def quoted_choices(overrides: Sequence[str], config_name: str) -> list[str]:
    """As :func:`quoted`, for a command line on which `key=a,b` means two runs.

    Raises:
        ConfigError: a value with a comma cannot be read as a list of values.
    """
    keys = string_keys(config_name)
    return [_quote_choice(override) if _key(override) in keys else override for override in overrides]


def unreadable(error: OverrideParseException, how_to_write: str = HOW_TO_WRITE) -> ConfigError:
    """The error for an override that Hydra's grammar cannot read. It says how to write the override."""
    override = error.override
    key, _, value = override.partition("=")
    if value.startswith(("[", "{")):
        return ConfigError(f"{override!r} cannot be read", HOW_TO_QUOTE.replace("KEY", key))
    return unreadable_word(override, how_to_write)


def unreadable_word(override: str, how_to_write: str = HOW_TO_WRITE) -> ConfigError:
    """The error for an override that is no `key=value`. A word without `=` may be the rest of a value with spaces."""
    quotes = "" if "=" in override else "; a value with spaces needs quotes: 'key=two words'"
    return ConfigError(f"{override!r} cannot be read", how_to_write + quotes)


@functools.cache
def string_keys(config_name: str) -> frozenset[str]:
    """Every key that holds a string or null, in a command's configuration and in all options of the groups."""
    return frozenset(key for key, kind in _kinds_of_keys(config_name) if kind is str)


def list_keys(config_name: str) -> frozenset[str]:
    """As :func:`string_keys`, for keys that hold a list or null."""
    return frozenset(key for key, kind in _kinds_of_keys(config_name) if get_origin(kind) is list)


def _kinds_of_keys(config_name: str) -> Iterator[tuple[str, Any]]:
    """Every key of a command's configuration and of all options of the groups, with its type."""
    yield from _kinds(COMMANDS[config_name], "")
    for group, options in SCHEMAS.items():
        for schema in options.values():
            yield from _kinds(schema, f"{group}.")


def _kinds(schema: type, prefix: str) -> Iterator[tuple[str, Any]]:
    types = get_type_hints(schema)
    for field in dataclasses.fields(schema):
        kind: Any = str if "several" in field.metadata else types[field.name]
        if isinstance(kind, UnionType):
            [kind] = set(get_args(kind)) - {NoneType}
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            yield from _kinds(kind, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", kind


def _key(override: str) -> str:
    """The key that an override sets; empty if it sets none (`~key`)."""
    key, equals, _ = override.partition("=")
    return key.lstrip("+") if equals else ""


def _quote(override: str) -> str:
    key, _, value = override.partition("=")
    if value.lower() == "null" or _PLAIN.fullmatch(value) or _QUOTED.fullmatch(value):
        return override
    if key in _PATHS and value.startswith("[") and value.endswith("]"):
        return override
    return f"{key}={QuotedString(text=value, quote=Quote.single).with_quotes()}"


def _quote_choice(override: str) -> str:
    try:
        several = OverridesParser.create().parse_override(override).is_sweep_override()
    except (HydraException, ValueError, RecursionError) as error:
        key, _, value = override.partition("=")
        if "," in value and not _QUOTED.fullmatch(value):
            raise ConfigError(
                f"{override}: one value or several?", f"quote each for Hydra, all for the shell: '{key}=\"a, b\",c'"
            ) from error
        several = False
    return override if several else _quote(override)
