"""What preparation tells whoever waits for it."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO


@dataclass(frozen=True)
class Progress:
    """One report.

    Attributes:
        stage: what is being done, in words.
        documents, tokens: done so far, earlier attempts included.
        tokens_per_second: of this attempt; 0 at its start.
        seconds_left: None where the end is unknown.
        finished: whether this is the stage's last report.
    """

    stage: str
    documents: int = 0
    tokens: int = 0
    tokens_per_second: float = 0.0
    seconds_left: float | None = None
    finished: bool = False


ProgressCallback = Callable[[Progress], None]


class Meter:
    """Turns counts into reports with speed and time left."""

    def __init__(self, stage: str, report: ProgressCallback | None, tokens: int = 0) -> None:
        self._stage, self._report = stage, report
        self._tokens_at_start, self._fraction_at_start = tokens, 0.0
        self._start = time.monotonic()
        self._first = True

    def update(self, documents: int, tokens: int, fraction: float | None, *, finished: bool = False) -> None:
        """Report; `fraction` is the share of the whole work that is done (None: unknown)."""
        if self._report is None:
            return
        elapsed = time.monotonic() - self._start
        if self._first:
            self._first, self._fraction_at_start = False, fraction or 0.0
        gained = (fraction or 0.0) - self._fraction_at_start
        left = None if fraction is None or gained <= 0 else elapsed * (1 - fraction) / gained
        speed = (tokens - self._tokens_at_start) / elapsed if elapsed > 0 else 0.0
        self._report(Progress(self._stage, documents, tokens, speed, left, finished))


class ConsoleProgress:
    """Prints reports to a terminal as one line that renews itself, elsewhere as a line every ten seconds."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._renews = self._stream.isatty()
        self._next = 0.0

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if now < self._next and not progress.finished:
            return
        self._next = now + (0.2 if self._renews else 10.0)
        ends = "\n" if progress.finished or not self._renews else ""
        self._stream.write(("\r\x1b[K" if self._renews else "") + describe(progress) + ends)
        self._stream.flush()


def describe(progress: Progress) -> str:
    """One line: stage, documents, tokens, speed, time left."""
    parts = [f"data: {progress.stage}"]
    if progress.documents:
        parts.append(f"{progress.documents:,} documents, {progress.tokens:,} tokens")
        parts.append(f"{progress.tokens_per_second:,.0f} tokens/s")
    if progress.seconds_left is not None and not progress.finished:
        minutes, seconds = divmod(round(progress.seconds_left), 60)
        parts.append(f"{minutes}:{seconds:02d} left")
    return ", ".join(parts)
