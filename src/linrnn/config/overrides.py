"""Turn a configuration back into the command line that makes it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from linrnn.config.compose import leaves, menu_of, values_under
from linrnn.config.schema import Config
from linrnn.config.strings import in_quotes, quoted


def overrides_of(config: Config) -> list[str]:
    """The shortest list of overrides for which `linrnn.config.load_config` returns `config`."""
    menu = menu_of()
    values = dict(leaves(dataclasses.asdict(config)))
    named = {field.name: values.get(f"{field.name}.name") for field in dataclasses.fields(Config) if field.name in menu}
    chosen = [f"{group}={name}" for group, name in named.items() if name not in (None, menu[group])]
    defaults = values_under(chosen)
    changed = [(key, value) for key, value in values.items() if key not in defaults or value != defaults[key]]
    return [*chosen, *quoted([f"{key}={_text(value)}" for key, value in changed], "train")]


def last_of_each(overrides: Sequence[str]) -> list[str]:
    """Overrides without those that a later one of the same key replaces."""
    last = {override.partition("=")[0].lstrip("+"): position for position, override in enumerate(overrides)}
    return [overrides[position] for position in sorted(last.values())]


def override_value(value: Any) -> str:
    """A value as the right-hand side of an override."""
    if isinstance(value, list):
        return f"[{','.join(map(_item, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_item(item)}' for key, item in value.items())}}}"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _text(value: Any) -> str:
    """As :func:`override_value`, but a string never reads as `null`, a list or already quoted."""
    if isinstance(value, str) and (value.lower() == "null" or value[:1] in "'\"["):
        return _item(value)
    return override_value(value)


def _item(value: Any) -> str:
    """An entry of a list or mapping. Strings are quoted, because only quotes tell them from numbers."""
    if isinstance(value, str):
        return in_quotes(value)
    return override_value(value)
