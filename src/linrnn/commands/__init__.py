"""The commands. `linrnn sweep …` and `python scripts/sweep.py …` are the same: both call :func:`start`."""

import difflib
import importlib.metadata
import sys
from collections.abc import Callable
from dataclasses import dataclass

from linrnn.commands import around, reading, training
from linrnn.config import cli
from linrnn.core.errors import ConfigError
from linrnn.core.output import PROGRAM


@dataclass(frozen=True)
class Command:
    """A command. `main` gets its configuration, and with `makes_runs` all other overrides, which are for its runs."""

    main: Callable[..., int | None]
    config_name: str = "train"  # of its schema
    makes_runs: bool = False


COMMANDS = {
    "train": Command(training.train),
    "sweep": Command(training.sweep, "run_sweep", makes_runs=True),
    "find_max_batch": Command(training.find_max_batch, "find_max_batch", makes_runs=True),
    "report": Command(around.report, "report"),
    "runs": Command(around.runs, "runs"),
    "doctor": Command(around.doctor),
    "prepare_data": Command(around.prepare_data),
    "evaluate": Command(reading.evaluate, "evaluate"),
    "generate": Command(reading.generate, "generate"),
    "export": Command(reading.export, "export"),
    "breakdown": Command(training.breakdown, "breakdown", makes_runs=True),
}


def start(name: str) -> None:
    """Run a command with the arguments of this process.

    Raises:
        SystemExit: the command failed.
    """
    command = COMMANDS[name]
    cli.run(command.main, command.config_name, command.main.__doc__ or "", makes_runs=command.makes_runs)


def main() -> None:
    """`linrnn COMMAND [group=option …] [group.key=value …]`

    Raises:
        SystemExit: the command failed.
    """
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in COMMANDS:
        sys.argv = [f"{PROGRAM} {name}", *arguments]
        start(name)
    elif code := cli.guarded(lambda: _answer(name)):
        raise SystemExit(code)


def _answer(name: str) -> None:
    if name == "--version":
        print(f"{PROGRAM} {importlib.metadata.version(PROGRAM)}")
    elif name in cli.HELP_FLAGS:
        lines = [f"  {name:<17} {(command.main.__doc__ or '').splitlines()[0]}" for name, command in COMMANDS.items()]
        print("What the loss layer costs when you pretrain linear RNNs.\n")
        print(f"usage: {PROGRAM} COMMAND [group=option …] [group.key=value …]\n\ncommands:", *lines, sep="\n")
        print(f"\n{PROGRAM} COMMAND --help lists its groups and keys; {PROGRAM} --version")
    else:
        [likely, *_] = [*difflib.get_close_matches(name, COMMANDS, n=1), "COMMAND"]
        meant = f"train {name}" if "=" in name else likely
        raise ConfigError(f"{name}: there is no such command", f"{PROGRAM} {meant}; all: {', '.join(COMMANDS)}")
