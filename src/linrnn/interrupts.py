"""Ctrl-C, SIGTERM and SIGUSR1 (Slurm, ahead of a job's end) end a run after its current step; a second one at once."""

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any, TextIO

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line, to standard output by default. Where nobody reads on (`| head`, or a `| tee` that Ctrl-C ended), it
    is dropped with all that follows: a run outlives its reader."""
    stream = stream or sys.stdout
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        drop_output(stream)


def drop_output(stream: TextIO) -> None:
    """From now on nothing that is written to `stream` goes anywhere, what it still holds included."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class StopRequest:
    """A context in which the :data:`SIGNALS` set `signal_number` instead of killing the process."""

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number is not None:
            raise KeyboardInterrupt
        self.signal_number = number
        say("stopping after this step, with a checkpoint (again: at once, without one)")
