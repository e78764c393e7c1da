"""Files for other programs: a trace of some steps, a snapshot of the allocator."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from linrnn.core.errors import StorageError
from linrnn.core.files import storing


@contextlib.contextmanager
def trace(profile_steps: int, path: Path, skip: int) -> Iterator[Callable[[], None]]:
    """Trace `profile_steps` steps with torch.profiler into `path` (.json or .json.gz; for Perfetto).

    Yields a function to call at the end of every step. The first `skip` steps are not recorded. The profiler starts
    during the last of them, because starting takes time. With `profile_steps=0` nothing happens. If the run ends
    earlier, the steps recorded so far are written.

    Raises:
        StorageError: the trace cannot be written.
    """
    if profile_steps == 0:
        yield lambda: None
        return

    def export(profiler: torch.profiler.profile) -> None:
        with storing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))

    warmup = min(1, skip)
    schedule = torch.profiler.schedule(wait=skip - warmup, warmup=warmup, active=profile_steps, repeat=1)
    with torch.profiler.profile(schedule=schedule, on_trace_ready=export, record_shapes=True) as profiler:
        yield profiler.step


@contextlib.contextmanager
def memory_snapshot(path: Path) -> Iterator[None]:
    """Record the block's CUDA allocations, with stack traces, into `path` (open at pytorch.org/memory_viz).

    The snapshot is also written if the block raises, since it explains an out-of-memory error best.

    Raises:
        StorageError: the snapshot cannot be written.
    """
    torch.cuda.memory._record_memory_history(max_entries=200_000)
    failed = True
    try:
        yield
        failed = False
    finally:
        try:  # the block's own error matters more
            with contextlib.suppress(StorageError) if failed else contextlib.nullcontext(), storing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                torch.cuda.memory._dump_snapshot(str(path))
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
