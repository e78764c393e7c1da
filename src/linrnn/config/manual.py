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
from linrnn.config.compose import check_option, defaults_of_option, menu_of, of_experiment, options_of
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
    given = {}
    for argument in [*of_experiment(arguments), *arguments]:
        group, _, option = argument.partition("=")
        if group in menu:
            check_option(group, option, menu)
            given[group] = None if option == "null" else option
    program = sys.argv[0] if is_program() else f"python {os.path.relpath(sys.argv[0])}"
    paragraphs = [textwrap.fill(" ".join(one.split()), WIDTH) for one in description.strip().split("\n\n")]
    lines = ["\n\n".join(paragraphs), "", f"usage: {program} [group=option …] [group.key=value …]", ""]
    groups = {*menu, *(["data"] if issubclass(COMMANDS[config_name], ReadingConfig) else [])}
    if groups:
        lines += ["groups:", *(_hanging(f"  {one:<12} ", " | ".join(options_of(one))) for one in sorted(groups)), ""]
    lines += [
        f"exit codes: {EXIT_CODES}",
        "",
        "keys, with their defaults (of the default options; group=option --help shows another's):",
    ]
    options = [(group, option) for group, option in {**menu, **given}.items() if option]
    for title, text in [manual_of_command(config_name), *(manual_of(*option) for option in options)]:
        lines += ["", f"--- {title}", text]
    return "\n".join(map(_fitted, as_started("\n".join(lines).strip()).splitlines()))


def written_as(name: str) -> list[str]:
    """The groups and keys of runs that somebody means by the option `--name`."""
    options = [(group, defaults_of_option(group, option)) for group, option in menu_of().items() if option]
    keys = [f"{group}.{field.name}" for group, schema in options for field in dataclasses.fields(schema)]
    own = [field.name for field in dataclasses.fields(COMMANDS["train"])]
    return [name] if name in own else [key for key in keys if name == key.rpartition(".")[2]]


def manual_of(group: str, option: str) -> tuple[str, str]:
    """The title of an option's manual, and what it is, with its keys, their values and meanings.

    Experiments and sweeps are shown as their files stand.
    """
    defaults, path = defaults_of_option(group, option), compose.CONFIG_DIR / group / f"{option}.yaml"
    if not path.exists():
        about = ABOUT.get((group, option)) or inspect.getdoc(type(defaults)) or ""
        return f"{group}={option}", "\n".join([_comment(about), *_keys(defaults, {})])
    text, title = path.read_text(encoding="utf-8").rstrip(), f"configs/{group}/{path.name}"
    if group in ("experiment", "sweep"):
        return title, text
    return title, "\n".join([text[: text.index("\nname:")].rstrip(), *_keys(defaults, yaml.safe_load(text))])


def manual_of_command(name: str) -> tuple[str, str]:
    """As :func:`manual_of`, for a command: its menu, if it has groups, then its own keys."""
    schema, path = COMMANDS[name], compose.CONFIG_DIR / f"{name}.yaml"
    own = [_comment(inspect.getdoc(schema) or ""), *_keys(schema, {})]
    if not path.exists():
        return "keys of this command", "\n".join(own)
    return f"configs/{path.name}", "\n".join([path.read_text(encoding="utf-8").rstrip(), "", *own])


def _fitted(line: str) -> str:
    """A line in at most WIDTH columns. Its comment goes on below itself, all else is indented once more."""
    value, mark, meaning = line.partition("# ")
    if len(line) <= WIDTH or not mark or len(value) > WIDTH / 2:
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        return textwrap.fill(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return textwrap.fill(f"# {meaning}", WIDTH, initial_indent=value, subsequent_indent=f"{'':<{len(value)}}# ")


def _hanging(title: str, words: str) -> str:
    """Words beside a title; further lines stand below the words."""
    return textwrap.fill(words, WIDTH, initial_indent=title, subsequent_indent=" " * len(title))


def _comment(text: str) -> str:
    return f"# {' '.join(text.split())}"


def _keys(schema: Any, values: dict[str, Any]) -> Iterator[str]:
    """The lines of all keys of a dataclass or an instance: values as in a YAML file, and their meanings beside them.

    `values` take the place of defaults. A meaning stands above a value of several lines.
    """
    for field in dataclasses.fields(schema):
        made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        value = values.get(field.name, getattr(schema, field.name, made))
        value = MUST_BE_GIVEN if value is dataclasses.MISSING else value
        if dataclasses.is_dataclass(value):
            yield from [f"{field.name}:", *(f"  {line}" for line in _keys(value, {}))]
        if "meaning" not in field.metadata:  # a group
            continue
        flow = None if isinstance(value, list | dict) and value else False  # YAML's own: the innermost in one line
        shown = yaml.safe_dump(
            {field.name: value}, sort_keys=False, allow_unicode=True, default_flow_style=flow, width=1000
        ).strip()
        low, high = field.metadata.get("minimum"), field.metadata.get("maximum")
        bounds = f"; {low:g} to {high:g}" if None not in (low, high) else f"; ≥ {low:g}" if low is not None else ""
        meaning = f"# {field.metadata['meaning']}{bounds}"
        yield from [meaning, *shown.splitlines()] if "\n" in shown else [f"{shown:<27} {meaning}"]
