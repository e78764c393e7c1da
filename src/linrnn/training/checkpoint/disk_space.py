"""Check, before a run trains, that the disk has room for its checkpoints."""

import shutil
from pathlib import Path

from linrnn.core.errors import StorageError
from linrnn.core.machine import GIB


def check_room(directory: Path, size: int, *, there: int, keep: int, writes: int, by_clock: bool) -> str:
    """Compare the size of a run's checkpoints with the free space. Returns a sentence for people.

    Args:
        directory: the run's directory.
        size: bytes of one checkpoint.
        there: number of checkpoints that the run already has.
        keep: number of checkpoints to keep. A new one is complete before the oldest is deleted.
        writes: number of checkpoints that the run will certainly write.
        by_clock: whether it may write more.

    Raises:
        StorageError: the disk has no room for the certain ones.
    """
    free = shutil.disk_usage(directory).free
    most = keep + 1 - min(there, keep)  # new checkpoints that exist at once
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
