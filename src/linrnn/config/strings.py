"""Quote the values of string keys, so that Hydra takes them literally.

Hydra reads values as numbers, lists, mappings and functions. It cannot read a path such as `it's [mine], 50%`, and
would turn `1e5` into 100000.0. Values of keys that hold a string are therefore quoted before Hydra reads them.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence
from types import NoneType, UnionType
from typing import Any, get_args, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException, OverrideParseException

from linrnn.config.schema import COMMANDS, SCHEMAS
from linrnn.core.errors import ConfigError

HOW_TO_QUOTE = "quote each entry that is no plain word, and all of it for the shell: 'KEY=[\"a, b\",c]'"
HOW_TO_WRITE = "write overrides as key=value or group=option"
# Hydra reads it as a word, too: /tmp/res, ../data, c++. Numbers begin otherwise.
_PLAIN = re.compile(r"(?!(?:true|false|null|inf|nan)$)(?:\.{0,2}/|[a-z_])[\w./+-]*", re.ASCII | re.IGNORECASE)
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
    return ConfigError(f"{override!r} cannot be read", how_to_write)


@functools.cache
def string_keys(config_name: str) -> frozenset[str]:
    """Every key that holds a string or null, in a command's configuration and in all options of the groups."""
    groups = (_strings(schema, f"{group}.") for group, options in SCHEMAS.items() for schema in options.values())
    return frozenset(key for keys in (_strings(COMMANDS[config_name], ""), *groups) for key in keys)


def _strings(schema: type, prefix: str) -> Iterator[str]:
    types = get_type_hints(schema)
    for field in dataclasses.fields(schema):
        kind: Any = types[field.name]
        if isinstance(kind, UnionType):
            [kind] = set(get_args(kind)) - {NoneType}
        if kind is str:
            yield f"{prefix}{field.name}"
        elif isinstance(kind, type) and dataclasses.is_dataclass(kind):
            yield from _strings(kind, f"{prefix}{field.name}.")


def _key(override: str) -> str:
    """The key that an override sets; empty if it sets none (`~key`)."""
    key, equals, _ = override.partition("=")
    return key.lstrip("+") if equals else ""


def _quote(override: str) -> str:
    key, _, value = override.partition("=")
    if value.lower() == "null" or _PLAIN.fullmatch(value) or _QUOTED.fullmatch(value):
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
