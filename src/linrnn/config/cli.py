"""The command line that all scripts share. Input: Hydra overrides. Output: an exit code, and errors in two lines.

`HYDRA_FULL_ERROR=1` also prints Python's traceback.
"""

import dataclasses
import difflib
import errno
import itertools
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence

from linrnn.config.bounds import check_outputs
from linrnn.config.compose import load_config, menu_of
from linrnn.config.manual import help_text, written_as
from linrnn.config.overrides import check_overrides
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
from linrnn.core.output import as_started, drop_output, open_streams, say
from linrnn.core.redaction import scrub

_STORAGE_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EIO}
HELP_FLAGS = {"--help", "-h"}


def run(
    main: Callable[..., int | None], config_name: str = "train", description: str = "", *, makes_runs: bool = False
) -> None:
    """Parse `sys.argv` as overrides of the command `config_name`, call `main(config)`, exit with its code.

    A :class:`LinrnnError`, a full disk or a file that may not be written prints one line of cause and one of remedy.
    The exit code says which kind of error it was. Anything else is a bug: one line, exit code 1.

    Args:
        makes_runs: the command makes training runs: all overrides that are not its own are for them, and are the second
            argument of `main`.
    """
    arguments = sys.argv[1:]

    def action() -> int | None:
        if HELP_FLAGS & set(arguments):
            others = "\n\nall other keys and groups are those of the runs: python train.py --help" * makes_runs
            print(help_text(config_name, description, arguments) + as_started(others))
            return None
        check_arguments(arguments)
        own, runs = split_overrides(arguments, config_name) if makes_runs else (arguments, [])
        _check_runs(runs, config_name)
        config = load_config(own, config_name)
        if config_name != "train":  # commands that only read share this configuration
            check_outputs(config)
        if makes_runs:
            return main(config, runs)
        wait_asleep_if_busy()
        return main(config)

    if code := guarded(action):
        raise SystemExit(code)


def _check_runs(overrides: Sequence[str], config_name: str) -> None:
    """Reject what can be no override of a command's runs: forecasts, and misspelled keys of the command itself."""
    for key in (own for own in ("dry_run", "gpu") if any(override.startswith(f"{own}=") for override in overrides)):
        raise ConfigError(
            f"{key}: this command has no such key", "python train.py … dry_run=true prints the forecast of a run"
        )
    for root in map(_root, overrides):
        likely = difflib.get_close_matches(root, _keys(config_name), n=1, cutoff=0.75)
        if likely and root not in {*_keys("train"), *menu_of()}:
            raise ConfigError(f"{root}: there is no such key", f"nearest: {likely[0]}=…, a key of this command")
    if config_name != "run_sweep":  # whose values may be lists
        check_overrides(overrides)


def split_overrides(overrides: Sequence[str], config_name: str) -> tuple[list[str], list[str]]:
    """Split overrides into those of the command's own keys and those of the runs that it makes."""
    own = [override for override in overrides if _root(override) in _keys(config_name)]
    return own, [override for override in overrides if override not in own]


def _keys(config_name: str) -> list[str]:
    return [field.name for field in dataclasses.fields(COMMANDS[config_name])]


def _root(override: str) -> str:
    """The first word of an override's key."""
    return re.split(r"[=./@]", override.lstrip("+~"), maxsplit=1)[0]


def check_arguments(arguments: Sequence[str]) -> None:
    """Reject options, since the command line is overrides, and a key with two values: the last one would count.

    Raises:
        ConfigError: an argument begins with `-`, or contradicts an earlier one.
    """
    values: dict[str, list[str]] = {}
    for argument, following in itertools.pairwise([*arguments, "…"]):
        key, equals, value = argument.partition("=")
        if argument.startswith("-"):
            value = value if equals else "…" if "=" in following or following.startswith("-") else following
            keys = written_as(key.lstrip("-").replace("-", "_")) if key.startswith("--") else []
            remedy = "give only overrides (see --help); scripts/sweep.py starts many runs"
            raise ConfigError(
                f"{argument}: there is no such option",
                f"write {' or '.join(f'{one}={value}' for one in keys)}" if keys else remedy,
            )
        given = values.setdefault(key.lstrip("+"), [])
        if equals and value not in given:
            given.append(value)
        if len(given) > 1:
            raise ConfigError(f"{key} is given twice ({', '.join(given)})", "keep one")


def guarded(action: Callable[[], int | None]) -> int:
    """Run `action`; print what went wrong in two lines; return the exit code."""
    open_streams()
    try:
        code = action() or 0
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        say("interrupted", sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader is gone, as with `| head`
        drop_output(sys.stdout)
        return 128 + signal.SIGPIPE
    except Exception as error:
        known = error if isinstance(error, LinrnnError) else _limit(error)
        cause, remedy = described(error), "this is a bug in linrnn or a library; HYDRA_FULL_ERROR=1 shows the traceback"
        if known is not None:
            cause, remedy = known.cause, known.remedy
        if os.environ.get("HYDRA_FULL_ERROR"):
            say(scrub(traceback.format_exc()), sys.stderr)
        what = "unexpected error" if known is None else "error"
        say(as_started(f"{what}: {one_line(cause)}\n  -> {one_line(remedy)}"), sys.stderr)
        return 1 if known is None else known.exit_code


def _limit(error: Exception) -> LinrnnError | None:
    """The error for a limit of the machine (output, storage or memory) behind an exception; None for a bug."""
    if isinstance(error, OSError) and error.errno in _STORAGE_ERRNOS:
        if error.filename is None:
            drop_output(sys.stdout)  # Python would fail again when it ends, and change the exit code
        what = f"{error.strerror}: {error.filename or 'standard output, or an open file'}"
        return StorageError(what, "free space or write elsewhere (results_dir=…, data.cache_dir=…, output=…)")
    if ran_out_of_memory(error):
        return out_of_memory(
            f"out of memory: {first_line(error)}", "use a smaller batch, a smaller model or fewer tokens"
        )
    return None


def one_line(text: str) -> str:
    """`text` in one line, with printable characters only and without secrets of the environment."""
    return "".join(c if c.isprintable() else " " for c in scrub(text).strip())
