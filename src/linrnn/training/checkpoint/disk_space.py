"""Whether the disk has room for the checkpoints of a run, asked before the run trains."""

import shutil
from pathlib import Path

from linrnn.core.errors import StorageError

GIB = 2**30


def check_room(directory: Path, size: int, *, there: int, keep: int, writes: int, by_clock: bool) -> str:
    """Compare what a run's checkpoints will take with what is free; returns a sentence for people.

    Args:
        directory: the run's.
        size: bytes of a checkpoint.
        there: checkpoints that the run has already.
        keep: checkpoints that are kept. The one being written lies beside them, until the oldest is deleted.
        writes: checkpoints that the run will write for certain.
        by_clock: whether it may write more than that.

    Raises:
        StorageError: the disk has no room for those written for certain.
    """
    free = shutil.disk_usage(directory).free
    most = keep + 1 - min(there, keep)  # at once, beside those already there
    certain = min(most, writes)
    facts = f"a checkpoint takes {_gib(size)}, and {_gib(free)} are free in {directory}"
    if certain * size > free:
        raise StorageError(
            f"the disk has no room for {certain} checkpoint(s): {facts}",
            "free space, choose another results_dir, lower trainer.keep_checkpoints, or trainer.checkpoint_every=0 "
            "for a run without checkpoints",
        )
    if by_clock and most * size > free:
        facts += f"; warning: too little for the {most} that a long run has at once (trainer.keep_checkpoints={keep})"
    return facts


def _gib(size: int) -> str:
    return f"{size / GIB:.3g} GiB"
