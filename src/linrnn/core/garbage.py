"""Python's garbage collector, which runs at known points of a run only.

By itself it runs whenever a thread has created many objects. A full collection looks at every object of the process,
which takes some 0.2 s, and a GPU may wait for that. Several ranks stop at other moments, and all wait for each one.
"""

import contextlib
import gc
from collections.abc import Iterator

ALL_AFTER = 1000  # steps between collections of all garbage: objects that live longer than a step are rarely garbage


@contextlib.contextmanager
def collected_at_known_points() -> Iterator[None]:
    """Inside the block only :func:`collect_after` collects garbage, and it leaves out the objects of before."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()


def collect_after(step: int) -> None:
    """Collect garbage among the objects created since the last call; every :data:`ALL_AFTER` steps among all."""
    gc.collect(1 if step % ALL_AFTER else 2)
