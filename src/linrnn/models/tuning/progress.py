"""A line now and then in what takes long, with the kernel that is tuned or compiled at the moment.

`step 1: 41 s so far; tuning f: configuration 12 of 30`, or `evaluated 3 of 90 batches: 20 s so far; compiling f`.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from linrnn.core.output import say as print_line

FIRST_SECONDS, MOST_SECONDS = 5.0, 30.0  # until the first line of an activity, and at most between two lines
Text = str | Callable[[], str]


@dataclass(eq=False)
class _Activity:
    text: Text
    since: float
    due: float

    def __str__(self) -> str:
        return self.text if isinstance(self.text, str) else self.text()


_activities: list[_Activity] = []  # of all threads: a backward pass runs in another thread than its step
_changed = threading.Condition()


@contextlib.contextmanager
def during(text: Text) -> Iterator[None]:
    """Within the context, progress lines name this activity. A function is asked for its text at every line."""
    now = time.monotonic()
    activity = _Activity(text, now, now + FIRST_SECONDS)
    with _changed:
        _activities.append(activity)
        if len(_activities) == 1:
            _changed.notify_all()
    try:
        yield
    finally:
        with _changed:
            _activities.remove(activity)


@contextlib.contextmanager
def show_progress(say: Callable[[str], None] = lambda line: print_line(line, sys.stderr)) -> Iterator[None]:
    """Within the context, activities of more than five seconds are shown through `say`, from a thread of its own.

    The next line comes when the activity has taken twice as long, and after 30 seconds at the latest. Without `say`
    the lines go to standard error, so that standard output holds results alone.
    """
    stopped = threading.Event()

    def watch() -> None:
        while not stopped.is_set():
            with _changed:
                line = _due_line()
                if line is None:
                    _changed.wait(_seconds_to_next())
            if line is not None:
                say(line)

    thread = threading.Thread(target=watch, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        with _changed:
            _changed.notify_all()
        thread.join()


def _due_line() -> str | None:
    """The outermost activity with its time, and the one within it, if a line is due."""
    if not _activities or (now := time.monotonic()) < _activities[0].due:
        return None
    outer, *inner = _activities
    elapsed = now - outer.since
    outer.due = now + min(elapsed, MOST_SECONDS)
    return f"{outer}: {elapsed:.0f} s so far" + (f"; {inner[0]}" if inner else "")


def _seconds_to_next() -> float | None:
    return max(_activities[0].due - time.monotonic(), 0.01) if _activities else None
