"""Python's garbage collector, which runs at known points of a run only.

By itself it runs whenever a thread has created many objects. A full collection looks at every object of the process,
which takes some 0.2 s once torch and transformers are imported. A GPU may wait for that. With several ranks each of
them stops at another moment, and all ranks wait for each one.
"""

import contextlib
import gc
from collections.abc import Iterator

ALL_AFTER = 1000  # steps between collections of all garbage: objects that live longer than a step are rarely garbage


@contextlib.contextmanager
def collected_at_known_points() -> Iterator[None]:
    """Inside the block only :func:`collect_after` collects garbage.

    The objects of before the block are set apart, and no collection looks at them, until the block ends. A server
    of forked processes may have set objects apart already. The block then sets no others apart, because Python can only
    take back all of them together.
    """
    enabled, apart = gc.isenabled(), gc.get_freeze_count() > 0
    if not apart:
        gc.collect()
        gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if not apart:
            gc.unfreeze()
        if enabled:
            gc.enable()


def collect_after(step: int) -> None:
    """Collect garbage among the objects created since the last call, which takes far less than a millisecond.

    Every :data:`ALL_AFTER` steps collect it among all objects that are not set apart.
    """
    gc.collect(1 if step % ALL_AFTER else 2)
