"""What commands print: a run outlives its reader, its terminal's alphabet and the disk that its output goes to."""

import contextlib
import io
import os
import sys
from typing import TextIO


def open_streams() -> None:
    """Make the standard streams fit to print to.

    A stream that the caller has closed (`>&-`) goes nowhere: without it, the next file that is opened would take its
    number, and receive what libraries print. What the terminal's encoding lacks is printed as an escape (`\\xe9`).
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

    Where nobody reads on (`| head`, or a `| tee` that Ctrl-C ended) or the disk is full, the line is dropped with all
    that follows.
    """
    stream = stream or sys.stdout
    try:
        print(text, file=stream, end=end, flush=True)
    except RuntimeError:  # a signal's handler speaks in the middle of a print: past the buffer
        with contextlib.suppress(OSError):
            os.write(stream.fileno(), f"{text}{end}".encode(errors="backslashreplace"))
    except OSError as error:
        drop_output(stream)
        if stream is sys.stdout and not isinstance(error, BrokenPipeError):
            say(f"standard output is given up ({error.strerror})", sys.stderr)


def drop_output(stream: TextIO) -> None:
    """From now on nothing that is written to `stream` goes anywhere, what it still holds included."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def output_error(error: BaseException) -> bool:
    """Whether `error` is standard output's, which is dropped then; known by trying once more."""
    if not isinstance(error, OSError) or error.filename is not None:
        return False
    try:
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), b"\n")
    except OSError:
        drop_output(sys.stdout)
        return True
    return False
