"""A line now and then in what takes long, with the kernel that is tuned or compiled at the moment.

`step 1: 41 s so far; tuning f with 30 configurations`, or `evaluated 3 of 90 batches: 20 s so far; compiling f`.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from linrnn.core.output import say as print_line

SECONDS = 10.0  # until the first line of an activity, and between two lines
Text = str | Callable[[], str]

_activities: list[tuple[Text, float]] = []  # with their starts; of all threads: a backward pass has a thread of its own


@contextlib.contextmanager
def during(text: Text) -> Iterator[None]:
    """Within the context, progress lines name this activity. A function is asked for its text at every line."""
    activity = (text, time.monotonic())
    _activities.append(activity)
    try:
        yield
    finally:
        _activities.remove(activity)


@contextlib.contextmanager
def show_progress(say: Callable[[str], None] = lambda line: print_line(line, sys.stderr)) -> Iterator[None]:
    """Within the context, activities of more than ten seconds are shown through `say`, from a thread of its own.

    Without `say` the lines go to standard error, so that standard output holds results alone.
    """
    stopped = threading.Event()

    def watch() -> None:
        last = 0.0  # time of the last line
        while not stopped.wait(SECONDS / 10):
            if (running := [*_activities]) and (now := time.monotonic()) >= max(last, running[0][1]) + SECONDS:
                last = now
                say(_line(now - running[0][1], *(text for text, _ in running[:2])))

    thread = threading.Thread(target=watch, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def _line(seconds: float, *texts: Text) -> str:
    """The outermost activity with its time, and the one within it."""
    outer, *inner = (text if isinstance(text, str) else text() for text in texts)
    return "; ".join([f"{outer}: {seconds:.0f} s so far", *inner])
