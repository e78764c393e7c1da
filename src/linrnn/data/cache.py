"""`data.cache_dir`: a prepared data set is written there once, by one process, and swept clean of what others left.

Work in progress lies under `<directory>.partial` and holds the lock `<directory>.lock`. The system releases a lock when
its process ends, however it ends, so that a lock that can be taken belongs to nobody.
"""

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from linrnn.config.schema import DataConfig
from linrnn.core.errors import StorageError
from linrnn.core.machine import GIB, free_disk
from linrnn.data.progress import Progress, ProgressCallback
from linrnn.data.shards import FORMAT_VERSION, META, read_meta, storage_errors, write_meta
from linrnn.data.tokenise import RECORD

LOCK, PARTIAL = ".lock", ".partial"
KEPT_SECONDS = 7 * 24 * 3600  # an interrupted tokenisation is kept so long for the same command to continue


def write_once(
    config: DataConfig,
    recipe: dict[str, Any],
    check_room: Callable[[Path], None],
    write_shards: Callable[[Path], dict[str, Any]],
    progress: ProgressCallback | None,
) -> tuple[Path, dict[str, Any]]:
    """The directory for `recipe` and its meta.json; written by one process alone if it is not there.

    Args:
        check_room: refuses, given the cache directory, to write more than fits.
        write_shards: writes into a directory, and returns the splits of meta.json.
    """
    directory = Path(config.cache_dir).expanduser() / f"{config.name}-{key_of([FORMAT_VERSION, recipe])}"
    if not directory.is_dir():
        with locked(directory, progress):
            if not directory.is_dir():
                sweep(directory.parent, progress)
                partial = directory.with_name(directory.name + PARTIAL)
                if not partial.is_dir():
                    check_room(directory.parent)
                with storage_errors(partial):
                    partial.mkdir(exist_ok=True)
                if not (partial / META).is_file():  # it is the last file to be written
                    meta = {"format": FORMAT_VERSION, **recipe, "splits": write_shards(partial)}
                    with storage_errors(partial):
                        write_meta(partial, meta)
                with storage_errors(partial):
                    for leftover in [*partial.glob("*.part"), *partial.glob("*.tmp"), *partial.glob(RECORD)]:
                        leftover.unlink()
                    os.rename(partial, directory)
    return directory, read_meta(directory)


def check_disk(directory: Path, n_bytes: int, what: str, remedy: str) -> None:
    """Refuse to write more than the disk has free, before the first byte.

    Args:
        directory: where; it need not exist.
        n_bytes: the least that will be written.
        what: that needs them, the beginning of a sentence.

    Raises:
        StorageError: the disk has less.
    """
    there = free_disk(directory)
    if n_bytes > there:
        raise StorageError(
            f"{what} needs {n_bytes / GIB:,.1f} GiB in {directory}, and {there / GIB:,.1f} GiB are free there",
            f"{remedy}, free space, or set data.cache_dir on a larger disk",
        )


def sweep(cache: Path, progress: ProgressCallback | None) -> None:
    """Remove what killed preparations left in `cache`: locks, and partial directories that nobody can continue.

    Nothing that a living process holds is touched. A tokenisation that can be continued stays for `KEPT_SECONDS`.
    """
    for path in sorted(cache.glob(f"*{LOCK}")) + sorted(cache.glob(f"*{PARTIAL}")):
        with suppress(OSError, StorageError):  # another process sweeps at the same time, or they are another user's
            target = path.with_name(path.name.removesuffix(LOCK).removesuffix(PARTIAL))
            if (lock := _try_lock(target)) is None:
                continue
            with lock:
                partial = target.with_name(target.name + PARTIAL)
                if partial.is_dir() and not _continues(partial):
                    if progress:
                        progress(Progress(f"removing {partial}, which a killed preparation left", finished=True))
                    shutil.rmtree(partial, ignore_errors=True)
                _unlink(target, lock)


def _continues(partial: Path) -> bool:
    """Whether the same command would continue it: it has a record of what is done, or all but its last rename."""
    records = [path for path in (partial / RECORD, partial / META) if path.is_file()]
    return bool(records) and time.time() - max(path.stat().st_mtime for path in records) < KEPT_SECONDS


@contextmanager
def locked(path: Path, progress: ProgressCallback | None) -> Iterator[None]:
    """Hold the lock of `path`, whose file is gone afterwards.

    A process that waited for a lock finds its file removed, and takes the one that is there now.
    """
    with storage_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    said = False
    while (lock := _try_lock(path)) is None:
        if progress and not said:
            progress(Progress("waiting for another process that prepares it", finished=True))
            said = True
        with storage_errors(path.parent), _open(path) as other:
            fcntl.flock(other, fcntl.LOCK_EX)  # waits; the next turn takes the file that is there then
    with lock:
        try:
            yield
        finally:
            _unlink(path, lock)


def _try_lock(path: Path) -> TextIOWrapper | None:
    """The lock of `path`, or None while another process holds it."""
    with storage_errors(path.parent):
        lock = _open(path)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    if _is_there(path, lock):
        return lock
    lock.close()  # its holder removed the file after it was opened here
    return _try_lock(path)


def _open(path: Path) -> TextIOWrapper:
    return open(path.with_name(path.name + LOCK), "w", encoding="utf-8")


def _is_there(path: Path, lock: TextIOWrapper) -> bool:
    """Whether the lock's name still stands for the file that is held."""
    try:
        return path.with_name(path.name + LOCK).stat().st_ino == os.fstat(lock.fileno()).st_ino
    except FileNotFoundError:
        return False


def _unlink(path: Path, lock: TextIOWrapper) -> None:
    """Remove a lock that is held."""
    if _is_there(path, lock):
        with suppress(OSError):
            path.with_name(path.name + LOCK).unlink()


def key_of(content: Any) -> str:
    """A short hash of what decides which tokens come out."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
