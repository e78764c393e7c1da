"""Signals that end a run. The first one ends it after the current step, a second one at once.

The signals are Ctrl-C, SIGTERM, SIGUSR1 (Slurm sends it before a job's end), SIGHUP (a dropped connection) and SIGQUIT.
Of several ranks all end at the same step, which is one step later.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)


def install(handler: Callable[[int, FrameType | None], None]) -> dict[signal.Signals, Any]:
    """Let `handler` answer the :data:`SIGNALS`, except a SIGHUP that is ignored already (`nohup`).

    Returns the handlers of before, for :func:`restore`.
    """
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    heeded = [number for number in SIGNALS if not (ignored and number == signal.SIGHUP)]
    return {number: signal.signal(number, handler) for number in heeded}


def restore(previous: dict[signal.Signals, Any]) -> None:
    """Put back the handlers of before; the system's default for one that was not set by Python."""
    for number, handler in previous.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


class StopRequest:
    """A context in which the first of the :data:`SIGNALS` sets `signal_number` and does not kill the process.

    Raises:
        KeyboardInterrupt: a second signal came inside the context.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._previous = install(self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        restore(self._previous)

    def renew(self) -> None:
        """Take the signals back from LLVM. It installs handlers of its own, once, when Triton first compiles."""
        if self._previous:
            install(self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number is not None:
            raise KeyboardInterrupt
        self.signal_number = number
        # print() would fail here: the signal may have interrupted a print, and its buffer refuses a second writer.
        with contextlib.suppress(OSError):
            os.write(1, b"stopping soon, with a checkpoint (again: at once, without one)\n")
