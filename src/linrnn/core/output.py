"""What commands print. A closed pipe, a full disk or a terminal with few characters must not end a run."""

import contextlib
import io
import os
import re
import sys
from typing import TextIO

PROGRAM = "linrnn"
_SCRIPT = re.compile(r"(?:python )?(?:scripts/(\w+)|\b(train))\.py\b")


def open_streams() -> None:
    """Make the standard streams safe to print to.

    A stream that the caller closed (`>&-`) is opened on /dev/null, or what libraries print would land in the next
    opened file. Characters that the terminal's encoding lacks are printed as escapes (`\\xe9`).
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError):  # a terminal opened for appending cannot seek
                stream.reconfigure(errors="backslashreplace")


def say(text: str, stream: TextIO | None = None, end: str = "\n") -> None:
    """Print a line, to standard output by default.

    If the reader is gone (`| head`, or a `| tee` that Ctrl-C ended) or the disk is full, this line and all later ones
    are dropped.
    """
    stream = stream or sys.stdout
    try:
        print(text, file=stream, end=end, flush=True)
    except OSError as error:
        drop_output(stream)
        if stream is sys.stdout and not isinstance(error, BrokenPipeError):
            say(f"standard output is given up ({error.strerror})", sys.stderr)


def is_program() -> bool:
    """Whether this process is `linrnn COMMAND`, and not a script of the repository."""
    return sys.argv[0].startswith(f"{PROGRAM} ")


def as_started(text: str) -> str:
    """`text` with its commands as this process was started: `python scripts/report.py` may be `linrnn report`."""
    return _SCRIPT.sub(lambda script: f"{PROGRAM} {script[1] or script[2]}", text) if is_program() else text


def drop_output(stream: TextIO) -> None:
    """Discard what `stream` still buffers and everything that is written to it from now on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
