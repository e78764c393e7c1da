"""The command line that all scripts share. Input: Hydra overrides. Output: an exit code, and errors in two lines.

`HYDRA_FULL_ERROR=1` also prints Python's traceback.
"""

import dataclasses
import difflib
import errno
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from linrnn.config.bounds import check_outputs
from linrnn.config.compose import load_config, menu_of
from linrnn.config.manual import help_text, written_as
from linrnn.config.schema import COMMANDS
from linrnn.core.errors import (
    ConfigError,
    LinrnnError,
    StorageError,
    described,
    first_line,
    out_of_memory,
    ran_out_of_memory,
)
from linrnn.core.machine import wait_asleep_if_busy  # this module notes when the process began
from linrnn.core.output import as_started, drop_output, open_streams, output_error, say
from linrnn.core.redaction import scrub

_STORAGE_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR}
HELP_FLAGS = {"--help", "-h"}
KEYS_OF_PATHS = ("checkpoint", "summary")  # of commands that read one run, or one report's rows


def run(main: Callable[[Any], int | None], config_name: str = "train", description: str = "") -> None:
    """Parse `sys.argv` as overrides of the command `config_name`, call `main(config)`, exit with its code.

    A :class:`LinrnnError`, a full disk or a file that may not be written prints one line of cause and one of remedy.
    The exit code says which kind of error it was. Anything else is a bug: one line, exit code 1. Hydra only composes
    the configuration. It makes no directory and calls nothing that a configuration names.
    """

    def call(arguments: Sequence[str]) -> int | None:
        refuse_bare_paths(arguments, config_name)
        config = load_config(arguments, config_name)
        if config_name != "train":  # commands that only read share this configuration
            check_outputs(config)
        wait_asleep_if_busy()
        return main(config)

    _start(call, lambda arguments: help_text(config_name, description, arguments))


def run_plain(main: Callable[[], None], description: str) -> None:
    """As :func:`run`, for a command that takes no arguments. Any argument but `--help` is an error."""

    def call(arguments: Sequence[str]) -> None:
        if arguments:
            raise ConfigError(f"{arguments[0]}: this command takes no arguments", "run it without any")
        main()

    _start(call, lambda _: f"{description}\n\nusage: python {os.path.relpath(sys.argv[0])}")


def run_many(
    main: Callable[..., int | None], config_name: str, description: str, *, only_here: str | None = None
) -> None:
    """As :func:`run`, for a command that makes training runs: `main(config, run_overrides, launcher_overrides)`.

    Overrides of the command's own keys set its own configuration. Overrides of `hydra…` go to a
    launcher. All remaining overrides apply to every run.

    Args:
        only_here: why the command takes no launcher. It is then called as `main(config, run_overrides)`.
    """

    def call(arguments: Sequence[str]) -> int | None:
        own, launcher, runs = split_overrides(arguments, config_name)
        if any(override.startswith(("dry_run=", "gpu=")) for override in runs):
            raise ConfigError(
                "dry_run: this command has no such key", "python train.py … dry_run=true prints the forecast of a run"
            )
        refuse_misspelt(runs, config_name)
        config = load_config(own, config_name)
        check_outputs(config)
        if only_here is None:
            return main(config, runs, launcher)
        if launcher:
            raise ConfigError(f"{launcher[0]}: {only_here}", "drop the hydra… overrides")
        return main(config, runs)

    others = as_started("\n\nall other keys and groups are those of the runs: python train.py --help")
    _start(call, lambda arguments: help_text(config_name, description, arguments) + others)


def _start(call: Callable[[Sequence[str]], int | None], manual: Callable[[Sequence[str]], str]) -> None:
    """Print the manual if it is asked for, else call a command with its arguments. Exits with its code, unless 0."""
    arguments = sys.argv[1:]

    def action() -> int | None:
        if HELP_FLAGS & set(arguments):
            print(manual(arguments))
            return None
        refuse_flags(arguments)
        refuse_repeated(arguments)
        return call(arguments)

    if code := guarded(action):
        raise SystemExit(code)


def refuse_flags(arguments: Sequence[str]) -> None:
    """Reject options: the command line is overrides. Hydra's own load files, unpickle, or start many jobs.

    Raises:
        ConfigError: an argument begins with `-`. The remedy for `--model gla` is `model=gla`.
    """
    for position, argument in enumerate(arguments):
        if not argument.startswith("-"):
            continue
        name, _, value = argument.lstrip("-").partition("=")
        following = arguments[position + 1 : position + 2]
        value = value or next((word for word in following if "=" not in word and not word.startswith("-")), "…")
        remedy = "give only overrides (see --help); scripts/sweep.py starts many runs"
        if argument.startswith("--") and (keys := written_as(name.replace("-", "_"))):
            remedy = f"write {' or '.join(f'{key}={value}' for key in keys)}"
        raise ConfigError(f"{argument}: there is no such option", remedy)


def refuse_repeated(arguments: Sequence[str]) -> None:
    """Reject a key or a group that is given two values: Hydra would take the last one without a word.

    Raises:
        ConfigError: an argument contradicts an earlier one.
    """
    values: dict[str, dict[str, None]] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals:
            values.setdefault(key.lstrip("+"), {})[value] = None
    for key, given in values.items():
        if len(given) > 1:
            count = "twice" if len(given) == 2 else f"{len(given)} times"
            raise ConfigError(f"{key} is given {count} ({', '.join(given)})", "keep one")


def refuse_bare_paths(arguments: Sequence[str], config_name: str) -> None:
    """Reject the path of a file or directory without the key that it belongs to.

    Raises:
        ConfigError: an argument is such a path, and the command has a key for it.
    """
    keys = [key for key in KEYS_OF_PATHS if key in _own_keys(config_name)]
    paths = [argument for argument in arguments if "=" not in argument and os.path.exists(argument)]
    if keys and paths:
        raise ConfigError(f"{paths[0]} stands without its key", f"did you mean {keys[0]}={paths[0]}?")


def refuse_misspelt(overrides: Sequence[str], config_name: str) -> None:
    """Reject an override of the runs whose key is no key of a run, and looks like one of the command's own.

    Raises:
        ConfigError: as for `job=2` of a command with the key `jobs`.
    """
    of_runs = _own_keys("train") | menu_of().keys()
    for root in map(_root, overrides):
        likely = difflib.get_close_matches(root, sorted(_own_keys(config_name)), n=1, cutoff=0.75)
        if root not in of_runs and likely:
            raise ConfigError(f"{root}: there is no such key", f"nearest: {likely[0]}=…, a key of this command")


def split_overrides(overrides: Sequence[str], config_name: str) -> tuple[list[str], list[str], list[str]]:
    """Split overrides into those of the command's own keys, those of Hydra, and those of the runs that it makes."""
    parts: tuple[list[str], list[str], list[str]] = ([], [], [])
    for override in overrides:
        root = _root(override)
        parts[0 if root in _own_keys(config_name) else 1 if root == "hydra" else 2].append(override)
    return parts


def _own_keys(config_name: str) -> set[str]:
    return {field.name for field in dataclasses.fields(COMMANDS[config_name])}


def _root(override: str) -> str:
    """The first word of an override's key."""
    return re.split(r"[=./@]", override.lstrip("+~"), maxsplit=1)[0]


def guarded(action: Callable[[], int | None]) -> int:
    """Run `action`; print what went wrong in two lines; return the exit code."""
    open_streams()
    try:
        code = action() or 0
        sys.stdout.flush()
        return code
    except LinrnnError as error:
        _report(error.cause, error.remedy)
        return error.exit_code
    except KeyboardInterrupt:
        say("interrupted", sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader is gone, as with `| head`
        drop_output(sys.stdout)
        return 128 + signal.SIGPIPE
    except Exception as error:
        known = _known(error)
        if known is None:
            remedy = "this is a bug in linrnn or a library; HYDRA_FULL_ERROR=1 shows the traceback"
            _report(described(error), remedy, "unexpected error")
            return 1
        _report(known.cause, known.remedy)
        return known.exit_code


def _known(error: Exception) -> LinrnnError | None:
    """The error for a limit of the machine (output, storage or memory) behind an exception; None for a bug."""
    if isinstance(error, OSError) and output_error(error):
        return StorageError(f"standard output cannot be written ({error.strerror})", "free space or send it elsewhere")
    if isinstance(error, OSError) and error.errno in _STORAGE_ERRNOS:
        what = f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror)
        return StorageError(what, "free space or choose another directory (results_dir=…, data.cache_dir=…)")
    if ran_out_of_memory(error):
        return out_of_memory(
            f"out of memory: {first_line(error)}", "use a smaller batch, a smaller model or fewer tokens"
        )
    return None


def _report(cause: str, remedy: str, what: str = "error") -> None:
    if os.environ.get("HYDRA_FULL_ERROR"):
        say(scrub(traceback.format_exc()), sys.stderr)
    say(as_started(f"{what}: {one_line(cause)}\n  -> {one_line(remedy)}"), sys.stderr)


def one_line(text: str) -> str:
    """`text` in one line, with printable characters only and without secrets of the environment."""
    return "".join(c if c.isprintable() else " " for c in scrub(text).strip())
