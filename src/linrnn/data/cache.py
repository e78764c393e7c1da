"""`data.cache_dir`: one process writes a prepared data set there, once, and removes what killed processes left.

Work in progress lies in `<directory>.partial`, under the lock `<directory>.lock`. The system releases a lock when its
process ends, in whatever way it ends. A lock that can be taken therefore belongs to nobody.
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
KEPT_SECONDS = 7 * 24 * 3600  # how long an interrupted tokenisation waits for the same command to continue it


def write_once(
    config: DataConfig,
    recipe: dict[str, Any],
    check_room: Callable[[Path], None],
    write_shards: Callable[[Path], dict[str, Any]],
    progress: ProgressCallback | None,
) -> tuple[Path, dict[str, Any]]:
    """The directory for `recipe` and the content of its meta.json. If it does not exist, one process writes it.

    Args:
        check_room: raises if the data does not fit on the disk of the given cache directory.
        write_shards: writes into a directory, and returns the splits for meta.json.
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
                if not (partial / META).is_file():  # meta.json is written last
                    meta = {"format": FORMAT_VERSION, **recipe, "splits": write_shards(partial)}
                    with storage_errors(partial):
                        write_meta(partial, meta)
                with storage_errors(partial):
                    for leftover in [*partial.glob("*.part"), *partial.glob("*.tmp"), *partial.glob(RECORD)]:
                        leftover.unlink()
                    os.rename(partial, directory)
    return directory, read_meta(directory)


def check_disk(directory: Path, n_bytes: int, what: str, remedy: str) -> None:
    """Raise if the disk has too little free space, before the first byte is written.

    Args:
        directory: where the data will be written; it need not exist.
        n_bytes: the least that will be written.
        what: what needs the space; the message begins with it.

    Raises:
        StorageError: the disk has less than `n_bytes` free.
    """
    there = free_disk(directory)
    if n_bytes > there:
        raise StorageError(
            f"{what} needs {n_bytes / GIB:,.1f} GiB in {directory}, and {there / GIB:,.1f} GiB are free there",
            f"{remedy}, free space, or set data.cache_dir on a larger disk",
        )


def sweep(cache: Path, progress: ProgressCallback | None) -> None:
    """Remove what killed preparations left in `cache`: locks, and partial directories that nobody can continue.

    Whatever a living process holds is left alone. A tokenisation that can be continued stays for `KEPT_SECONDS`.
    """
    for path in sorted(cache.glob(f"*{LOCK}")) + sorted(cache.glob(f"*{PARTIAL}")):
        with suppress(OSError, StorageError):  # another process removes it now, or it belongs to another user
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
    """Whether the same command would continue `partial`: it holds a progress record, or only the last rename is
    missing."""
    records = [path for path in (partial / RECORD, partial / META) if path.is_file()]
    return bool(records) and time.time() - max(path.stat().st_mtime for path in records) < KEPT_SECONDS


@contextmanager
def locked(path: Path, progress: ProgressCallback | None) -> Iterator[None]:
    """Hold the lock of `path`; its file is removed afterwards.

    A process that waited for a lock finds the lock's file removed. It then takes the current file.
    """
    with storage_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    said = False
    while (lock := _try_lock(path)) is None:
        if progress and not said:
            progress(Progress("waiting for another process that prepares the same data", finished=True))
            said = True
        with storage_errors(path.parent), _open(path) as other:
            fcntl.flock(other, fcntl.LOCK_EX)  # only waits: the next round of the loop takes the current file
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
    """Whether the lock's name still leads to the file that is held."""
    try:
        return path.with_name(path.name + LOCK).stat().st_ino == os.fstat(lock.fileno()).st_ino
    except FileNotFoundError:
        return False


def _unlink(path: Path, lock: TextIOWrapper) -> None:
    """Remove the file of a lock that is held."""
    if _is_there(path, lock):
        with suppress(OSError):
            path.with_name(path.name + LOCK).unlink()


def key_of(content: Any) -> str:
    """A short hash of `content`: everything that decides which tokens are written."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
