"""A lock on a directory: one process at a time may write there. Any process may test the lock without disturbing it."""

import contextlib
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

SIGN = ".lock"
_owned: set[tuple[int, int]] = set()  # device and inode of every `.lock` file that this process has locked


class DirectoryLock:
    """An exclusive lock on a directory. The system releases it when the process ends, in whatever way it ends.

    Two locks are taken:

    * `flock` on the directory decides which object has the lock, also between two objects of one process.
    * A POSIX record lock on the file `.lock` in the directory lets others ask. `lockf` can test a record lock without
      taking it, so a test never makes an owner's attempt fail. It also works between the machines of a network file
      system.

    A process cannot see its own record locks, and it loses one when it closes the file. `_owned` therefore lists them.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._descriptors: list[int] = []

    def take(self) -> bool:
        """Try to take the lock; return whether this object now has it. The directory must exist.

        Raises:
            OSError: the directory cannot be opened or written.
        """
        with contextlib.ExitStack() as undo:
            owner = os.open(self._directory, os.O_RDONLY)
            undo.callback(os.close, owner)
            if not _locked(lambda: fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)):
                return False
            sign = os.open(self._directory / SIGN, os.O_RDWR | os.O_CREAT, 0o666)  # less the umask
            undo.callback(os.close, sign)
            if not _locked(lambda: os.lockf(sign, os.F_TLOCK, 0)):
                return False
            undo.pop_all()
        self._descriptors = [sign, owner]
        _owned.add(_file(sign))
        return True

    def release(self) -> None:
        """Release the lock. Releasing twice is harmless."""
        if self._descriptors:
            _owned.discard(_file(self._descriptors[0]))
        while self._descriptors:
            os.close(self._descriptors.pop(0))

    def taken(self) -> bool:
        """Whether any process, this one included, has the lock. Asking locks nothing."""
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
    """Whether the system granted a lock. Systems refuse in one of two ways."""
    try:
        ask()
    except (BlockingIOError, PermissionError):
        return False
    return True
