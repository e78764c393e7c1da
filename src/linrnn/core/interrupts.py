"""Signals that end a run after its current step; a second one ends the run at once.

Ctrl-C, SIGTERM, SIGUSR1 (Slurm, ahead of a job's end), SIGHUP (a dropped connection) and SIGQUIT.
"""

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
_STDOUT = 1


def heeded() -> list[signal.Signals]:
    """The :data:`SIGNALS` that end a run here: SIGHUP is none of them where it is ignored already (`nohup`)."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in SIGNALS if not (ignored and number == signal.SIGHUP)]


class StopRequest:
    """A context in which the :data:`SIGNALS` set `signal_number` instead of killing the process.

    Raises:
        KeyboardInterrupt: inside the context, at a second signal.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in heeded():
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number is not None:
            raise KeyboardInterrupt
        self.signal_number = number
        # Not by print: the signal may have come in the middle of a print, whose buffer refuses a second writer.
        with contextlib.suppress(OSError):
            os.write(_STDOUT, b"stopping after this step, with a checkpoint (again: at once, without one)\n")
