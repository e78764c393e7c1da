"""A directory that one process at a time may write to, and that anyone may ask about without getting in its way."""

import contextlib
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

SIGN = ".lock"
_owned: set[tuple[int, int]] = set()  # device and inode of the signs that this process holds


class DirectoryLock:
    """An exclusive lock on a directory; the system releases it when the process ends, however it ends.

    Two locks stand behind it. `flock` on the directory itself decides who has it, also within one process. A POSIX
    record lock on the file `.lock` below is for those who only ask: `lockf` can test such a lock without taking it,
    so that no question ever refuses an owner. It holds between the machines of a network file system as well. A
    process does not see its own record locks, and loses one when it closes the file: it keeps a list of them.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._descriptors: list[int] = []

    def take(self) -> bool:
        """Whether it is now this object's; the directory must be there.

        Raises:
            OSError: the directory cannot be opened or written.
        """
        with contextlib.ExitStack() as undo:
            owner = os.open(self._directory, os.O_RDONLY)
            undo.callback(os.close, owner)
            if not _locked(lambda: fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)):
                return False
            sign = os.open(self._directory / SIGN, os.O_RDWR | os.O_CREAT, 0o644)
            undo.callback(os.close, sign)
            if not _locked(lambda: os.lockf(sign, os.F_TLOCK, 0)):
                return False
            undo.pop_all()
        self._descriptors = [sign, owner]
        _owned.add(_file(sign))
        return True

    def release(self) -> None:
        """Let others have it; releasing twice is harmless."""
        if self._descriptors:
            _owned.discard(_file(self._descriptors[0]))
        while self._descriptors:
            os.close(self._descriptors.pop(0))

    def taken(self) -> bool:
        """Whether a process, this one included, has it. Nothing is locked by asking."""
        try:
            if _file(self._directory / SIGN) in _owned:
                return True
            sign = os.open(self._directory / SIGN, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            return not _locked(lambda: os.lockf(sign, os.F_TEST, 0))
        finally:
            os.close(sign)


def _file(which: Path | int) -> tuple[int, int]:
    stat = os.stat(which)
    return stat.st_dev, stat.st_ino


def _locked(ask: Callable[[], None]) -> bool:
    """Whether a request to lock was granted; systems refuse it in one of two ways."""
    try:
        ask()
    except (BlockingIOError, PermissionError):
        return False
    return True
