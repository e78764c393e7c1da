"""Read overrides: refuse what no configuration may do, quote the values of string keys, parse with Hydra's grammar.

A configuration may not run code, read the environment, or reach Hydra's own machinery. Configurations also come from
other people's files: a run's config.yaml, or names of model and size in a summary. Values are therefore only values. A
model, a loss or a data source is looked up by name in a registry. Nothing is imported or called by its name, and
nothing is resolved. A sweep's settings for a cluster come only from the command line, and submitit checks them.

Hydra reads values as numbers, lists, mappings and functions. It cannot read a path such as `it's [mine], 50%`, and
would turn `1e5` into 100000.0. Values of keys that hold a string are therefore quoted before Hydra reads them.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from linrnn.config.schema import COMMANDS, SCHEMAS, TextDataConfig
from linrnn.core.errors import ConfigError, first_line

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

HOW_TO_QUOTE = "quote each entry that is no plain word, and all of it for the shell: 'KEY=[\"a, b\",c]'"
HOW_TO_WRITE = "write overrides as key=value or group=option"
_KEY = re.compile(r"\+{0,2}[A-Za-z_]\w*(\.\w+)*", re.ASCII)
_OPTION = re.compile(r"(?!.*\.\.)[\w.-]*", re.ASCII)
_RESOLVER = "${"
# Hydra reads it as a word, too: /tmp/res, ../data, c++. Numbers begin otherwise.
_PLAIN = re.compile(r"(?!(?:true|false|null|inf|nan)$)(?:\.{0,2}/|[a-z_])[\w./+-]*", re.ASCII | re.IGNORECASE)
_PATHS = {f"data.{field.name}" for field in dataclasses.fields(TextDataConfig) if "several" in field.metadata}
_QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)


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
        prefixed, equals, value = override.partition("=")
        key = prefixed.lstrip("+~")
        if re.match(r"hydra\b", key):
            raise ConfigError(
                f"{override}: Hydra's own keys are not for runs", "scripts/sweep.py takes hydra/launcher=…"
            )
        if prefixed.startswith("~"):
            raise ConfigError(
                f"{override}: no key can be removed", f"leave it out, or write {key}=null where null is allowed"
            )
        if not equals or not _KEY.fullmatch(prefixed):
            raise unreadable_word(override)
        if key in {*SCHEMAS, "experiment"} and not _OPTION.fullmatch(value):
            raise ConfigError(f"{override}: options are names", f"choose one by {key}=NAME; --help lists them")


@functools.lru_cache(maxsize=4096)  # the points of a sweep share most of their overrides
def parse(line: str, how_to_write: str = HOW_TO_WRITE) -> "Override":
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
            raise ConfigError(f"{line!r} cannot be read", HOW_TO_QUOTE.replace("KEY", key)) from error
        if isinstance(error, HydraException):
            raise unreadable_word(line, how_to_write) from error
        raise ConfigError(first_line(error), how_to_write) from error


def in_quotes(text: str) -> str:
    """`text` as Hydra takes it literally."""
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(text=text, quote=Quote.single).with_quotes()


def key_of(override: str) -> str:
    """The key that an override sets, or the group whose option it chooses; empty if it is neither."""
    key, equals, _ = override.partition("=")
    return key.lstrip("+") if equals else ""


def quoted(overrides: Sequence[str], config_name: str) -> list[str]:
    """Overrides of one configuration, with every value of a string key in Hydra's quotes.

    Plain words and paths, values that the user quoted, and `null` stay as they are.
    """
    keys = string_keys(config_name)
    return [_quote(override) if key_of(override) in keys else override for override in overrides]


def quoted_choices(overrides: Sequence[str], config_name: str) -> list[str]:
    """As :func:`quoted`, for a command line on which `key=a,b` means two runs.

    Raises:
        ConfigError: a value with a comma cannot be read as a list of values.
    """
    keys = string_keys(config_name)
    return [_quote_choice(override) if key_of(override) in keys else override for override in overrides]


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


def _quote(override: str) -> str:
    key, _, value = override.partition("=")
    if value.lower() == "null" or _PLAIN.fullmatch(value) or _QUOTED.fullmatch(value):
        return override
    if key in _PATHS and value.startswith("[") and value.endswith("]"):
        return override
    return f"{key}={in_quotes(value)}"


def _quote_choice(override: str) -> str:
    try:
        several = parse(override).is_sweep_override()
    except ConfigError as error:
        key, _, value = override.partition("=")
        if "," in value and not _QUOTED.fullmatch(value):
            raise ConfigError(
                f"{override}: one value or several?", f"quote each for Hydra, all for the shell: '{key}=\"a, b\",c'"
            ) from error
        several = False
    return override if several else _quote(override)
