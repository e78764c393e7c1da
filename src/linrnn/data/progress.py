"""Progress reports of data preparation, for whoever waits."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from linrnn.core.output import say


@dataclass(frozen=True)
class Progress:
    """One report of progress, or a remark. `str` gives one line: stage, documents, tokens, speed, time left.

    Attributes:
        stage: what is being done, or the remark, in words.
        documents, tokens: done so far, including earlier attempts.
        tokens_per_second: of this attempt; 0 at its start.
        seconds_left: None if the end is unknown.
        finished: whether this is the stage's last report.
    """

    stage: str
    documents: int = 0
    tokens: int = 0
    tokens_per_second: float = 0.0
    seconds_left: float | None = None
    finished: bool = False

    def __str__(self) -> str:
        parts = [f"data: {self.stage}"]
        if self.documents:
            parts.append(
                f"{self.documents:,} documents, {self.tokens:,} tokens, {self.tokens_per_second:,.0f} tokens/s"
            )
        if self.seconds_left is not None and not self.finished:
            minutes, seconds = divmod(round(self.seconds_left), 60)
            parts.append(f"{minutes}:{seconds:02d} left")
        return ", ".join(parts)


Report = Callable[[Progress], None]


class Meter:
    """Turns counts into reports with speed and time left.

    Args:
        tokens: done by earlier attempts.
    """

    def __init__(self, stage: str, report: Report, tokens: int = 0) -> None:
        self._stage, self._report = stage, report
        self._start, self._tokens_at_start = time.monotonic(), tokens
        # A continued attempt learns only from its first report what share was done before.
        self._base: tuple[float, float] | None = (self._start, 0.0) if tokens == 0 else None

    def update(self, documents: int, tokens: int, fraction: float | None, *, finished: bool = False) -> None:
        """Report; `fraction` is the share of all work that is done (None: unknown)."""
        now, left = time.monotonic(), None
        if fraction is not None:
            base_time, base_fraction = self._base = self._base or (now, fraction)
            if fraction > base_fraction:
                left = (now - base_time) * (1 - fraction) / (fraction - base_fraction)
        speed = (tokens - self._tokens_at_start) / max(now - self._start, 1e-9)
        self._report(Progress(self._stage, documents, tokens, speed, left, finished))


class ConsoleProgress:
    """Prints reports. On a terminal one line is rewritten; elsewhere a new line comes every ten seconds."""

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
        say(("\r\x1b[K" if self._renews else "") + str(progress), self._stream, ends)
