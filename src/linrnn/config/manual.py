"""What `--help` prints: usage, the groups with their options, and every key with its value and meaning."""

import dataclasses
import inspect
import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from linrnn.config import compose
from linrnn.config.compose import check_option, defaults_of_option, menu_of, options_of
from linrnn.config.schema import ABOUT, COMMANDS, MUST_BE_GIVEN, ReadingConfig
from linrnn.core.errors import EXIT_CODES
from linrnn.core.output import as_started, is_program

WIDTH = 100  # columns of the help


def help_text(config_name: str, description: str = "", arguments: Sequence[str] = ()) -> str:
    """The help of a command, with the keys of the options that `arguments` choose. All other arguments are ignored.

    Raises:
        ConfigError: there is no such option.
    """
    menu = menu_of(config_name)
    chosen = dict(menu)
    for argument in arguments:
        group, _, option = argument.partition("=")
        if group in menu:
            check_option(group, option, menu)
            chosen[group] = None if option == "null" else option
    if experiment := chosen.get("experiment"):
        given = [argument.partition("=")[0] for argument in arguments]
        chosen |= {group: option for group, option in _chosen_by(experiment).items() if group not in given}
    lines = [description, "", f"usage: {_program()} [group=option …] [group.key=value …]", ""]
    groups = {*menu, *(["data"] if issubclass(COMMANDS[config_name], ReadingConfig) else [])}
    if groups:
        lines += ["groups:", *(f"  {group:<12} {' | '.join(options_of(group))}" for group in sorted(groups)), ""]
    lines += [
        f"exit codes: {EXIT_CODES}",
        "",
        "keys, with their defaults (of the default options; group=option --help shows another's):",
    ]
    options = [(group, option) for group, option in chosen.items() if option]
    for title, text in [manual_of_command(config_name), *(manual_of(*option) for option in options)]:
        lines += ["", f"--- {title}", text]
    text = as_started("\n".join(lines).strip())
    return "\n".join(short for line in text.splitlines() for short in _fitted(line))


def words_of(config_name: str, prefix: str = "") -> list[str]:
    """What may follow `prefix` on a command line: `model=gla` and its like behind `model=`, else groups and keys."""
    menu, (group, equals, _) = menu_of(config_name), prefix.partition("=")
    if equals:
        return [f"{group}={option}" for option in options_of(group)] if group in menu else []
    defaults = [(group, defaults_of_option(group, option)) for group, option in menu.items() if option]
    keys = [f"{group}.{field.name}=" for group, schema in defaults for field in dataclasses.fields(schema)]
    own = [f"{field.name}=" for field in dataclasses.fields(COMMANDS[config_name]) if "meaning" in field.metadata]
    return [*(f"{group}=" for group in menu), *own, *keys]


def written_as(name: str) -> list[str]:
    """The groups and keys of runs that somebody means by the option `--name`."""
    words = [word.removesuffix("=") for word in words_of("train")]
    return [word for word in words if name == word] or [word for word in words if name == word.rpartition(".")[2]]


def manual_of(group: str, option: str) -> tuple[str, str]:
    """The title of an option's manual, and what it is, with its keys, their values and meanings.

    Experiments and sweeps are shown as their files stand.
    """
    defaults = defaults_of_option(group, option)
    path = compose.CONFIG_DIR / group / f"{option}.yaml"
    if not path.exists():
        about = ABOUT.get((group, option)) or inspect.getdoc(type(defaults)) or ""
        return f"{group}={option}", "\n".join([*_comment(about), *_keys(defaults, {})])
    text, title = path.read_text(encoding="utf-8").rstrip(), f"configs/{group}/{path.name}"
    if group in ("experiment", "sweep"):
        return title, text
    about = text.partition("\ndefaults:")[0]
    return title, "\n".join([about, *_keys(defaults, yaml.safe_load(text))])


def manual_of_command(name: str) -> tuple[str, str]:
    """As :func:`manual_of`, for a command: its menu, if it has groups, then its own keys."""
    schema, path = COMMANDS[name], compose.CONFIG_DIR / f"{name}.yaml"
    menu = [path.read_text(encoding="utf-8").rstrip(), ""] if path.exists() else []
    fields = [field for field in dataclasses.fields(schema) if "meaning" in field.metadata]  # the others are groups
    keys = [line for field in fields for line in _key(field, _default(field))]
    title = f"configs/{path.name}" if menu else "keys of this command"
    return title, "\n".join([*menu, *_comment(inspect.getdoc(schema) or ""), *keys])


def _chosen_by(experiment: str) -> dict[str, str]:
    """The options that an experiment chooses, by group."""
    text = (compose.CONFIG_DIR / "experiment" / f"{experiment}.yaml").read_text(encoding="utf-8")
    entries = yaml.safe_load(text).get("defaults", [])
    return {key.split("/")[-1]: value for entry in entries if isinstance(entry, dict) for key, value in entry.items()}


def _program() -> str:
    return sys.argv[0] if is_program() else f"python {os.path.relpath(sys.argv[0])}"


def _fitted(line: str) -> list[str]:
    """A line in at most WIDTH columns. Its comment goes on below itself, all else is indented once more."""
    value, mark, meaning = line.partition("# ")
    if len(line) <= WIDTH:
        return [line]
    if not mark or len(value) > WIDTH / 2:
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        return textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    first, *more = textwrap.wrap(meaning, WIDTH - len(value) - 2)
    below = value if not value.strip() else " " * len(value)
    return [f"{value}{mark}{first}", *(f"{below}# {words}" for words in more)]


def _comment(text: str) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), WIDTH, initial_indent="# ", subsequent_indent="# ")


def _keys(defaults: Any, values: dict[str, Any]) -> Iterator[str]:
    """The lines of all keys. `values` take the place of defaults."""
    for field in dataclasses.fields(defaults):
        value = values.get(field.name, getattr(defaults, field.name))
        if dataclasses.is_dataclass(value):
            yield f"{field.name}:"
            yield from (f"  {line}" for line in _keys(value, {}))
        else:
            yield from _key(field, value)


def _key(field: dataclasses.Field, value: Any) -> Iterator[str]:
    """A key with its value as in a YAML file, and its meaning beside it, or above a value of several lines."""
    flow = None if isinstance(value, list | dict) and value else False  # YAML's own choice: the innermost in one line
    shown = yaml.safe_dump(
        {field.name: value}, sort_keys=False, allow_unicode=True, default_flow_style=flow, width=1000
    )
    meaning = field.metadata["meaning"] + _bounds(field)
    if "\n" in shown.strip():
        yield from _comment(meaning)
        yield from shown.strip().splitlines()
        return
    first, *more = textwrap.wrap(meaning, WIDTH - 32)  # nested keys are indented
    yield f"{shown.strip():<27} # {first}"
    yield from (f"{'':<27} # {line}" for line in more)


def _default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return MUST_BE_GIVEN if field.default is dataclasses.MISSING else field.default


def _bounds(field: dataclasses.Field) -> str:
    low, high = field.metadata.get("minimum"), field.metadata.get("maximum")
    if low is None or high is None:
        return f"; ≥ {low:g}" if low is not None else f"; ≤ {high:g}" if high is not None else ""
    return f"; {low:g} to {high:g}"
