"""The commands. `linrnn sweep …` and `python scripts/sweep.py …` are the same: both call :func:`start`."""

import argparse
import difflib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from linrnn.commands import around, reading, training
from linrnn.config import cli
from linrnn.config.manual import words_of
from linrnn.core.errors import ConfigError
from linrnn.core.output import PROGRAM


@dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        main: gets the configuration. That of a command that makes runs also gets their overrides and, unless
            `only_here`, the launcher's.
        config_name: of its schema.
        makes_runs: whether all other overrides are for the runs that it makes.
        only_here: why it takes no launcher of a cluster.
    """

    main: Callable[..., int | None]
    config_name: str = "train"
    makes_runs: bool = False
    only_here: str | None = None


COMMANDS = {
    "train": Command(training.train),
    "sweep": Command(training.sweep, "run_sweep", makes_runs=True),
    "find_max_batch": Command(
        training.find_max_batch, "find_max_batch", True, "the probes of a search run on this machine"
    ),
    "report": Command(around.report, "report"),
    "runs": Command(around.runs, "runs"),
    "doctor": Command(around.doctor),
    "prepare_data": Command(around.prepare_data),
    "evaluate": Command(reading.evaluate, "evaluate"),
    "generate": Command(reading.generate, "generate"),
    "export": Command(reading.export, "export"),
    "breakdown": Command(training.breakdown, "breakdown", True, "a breakdown is measured on this machine"),
    "tune": Command(training.tune, "tune", True, "kernels are tuned on this machine"),
    "check_recurrence": Command(training.check_recurrence),
}


def start(name: str) -> None:
    """Run a command with the arguments of this process.

    Raises:
        SystemExit: the command failed.
    """
    command, about = COMMANDS[name], COMMANDS[name].main.__doc__ or ""
    if command.makes_runs:
        cli.run_many(command.main, command.config_name, about, only_here=command.only_here)
    else:
        cli.run(command.main, command.config_name, about)


def main() -> None:
    """`linrnn COMMAND [group=option …] [group.key=value …]`

    Raises:
        SystemExit: the command failed.
    """
    if "_ARGCOMPLETE" in os.environ:
        _complete()
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
        print(f'tab completion in bash or zsh: eval "$(register-python-argcomplete {PROGRAM})"')
    else:
        [likely, *_] = [*difflib.get_close_matches(name, COMMANDS, n=1), "COMMAND"]
        meant = f"train {name}" if "=" in name else likely
        raise ConfigError(f"{name}: there is no such command", f"{PROGRAM} {meant}; all: {', '.join(COMMANDS)}")


def _complete() -> None:
    """Print what the shell asks for, and end: the names of commands, then groups, options and keys."""
    import argcomplete

    def overrides(prefix: str, parsed_args: argparse.Namespace, **_: object) -> Iterator[str]:
        yield from words_of(COMMANDS[parsed_args.command].config_name, prefix)
        if COMMANDS[parsed_args.command].makes_runs:
            yield from words_of("train", prefix)

    parser = argparse.ArgumentParser(prog=PROGRAM, add_help=False)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("overrides", nargs="*").completer = overrides  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser)
