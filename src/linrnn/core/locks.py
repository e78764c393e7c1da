"""A lock on a directory: one process at a time may write there. Any process may test the lock without disturbing it."""

import contextlib
import fcntl
import os
import struct
from pathlib import Path

SIGN = ".lock"
_WRITE = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)  # struct flock of Linux: the whole file


class DirectoryLock:
    """An exclusive lock on a directory. The system releases it when the process ends, in whatever way it ends.

    It is an open file description lock on the file `.lock` in the directory: two objects of one process exclude each
    other, it works between the machines of a network file system, and the system tells whether it is taken without
    taking it (Linux: man 2 fcntl, F_OFD_SETLK).
    """

    def __init__(self, directory: Path) -> None:
        self._sign = directory / SIGN
        self._descriptor: int | None = None

    def take(self) -> bool:
        """Try to take the lock; return whether this object now has it. The directory must exist.

        Raises:
            OSError: the file cannot be opened or written.
        """
        with contextlib.ExitStack() as undo:
            descriptor = os.open(self._sign, os.O_RDWR | os.O_CREAT, 0o666)  # less the umask
            undo.callback(os.close, descriptor)
            try:
                fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _WRITE)
                if not os.path.samestat(os.fstat(descriptor), os.stat(self._sign)):
                    return False  # an owner has removed the file, and somebody made another
            except (BlockingIOError, PermissionError, FileNotFoundError):  # the last: removed meanwhile
                return False
            undo.pop_all()
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        """Release the lock. Releasing twice is harmless."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None

    def taken(self) -> bool:
        """Whether any process, this one included, has the lock. Asking locks nothing."""
        try:
            with self._sign.open("rb") as sign:
                found = fcntl.fcntl(sign, fcntl.F_OFD_GETLK, _WRITE)
        except FileNotFoundError:
            return False
        return struct.unpack_from("h", found)[0] != fcntl.F_UNLCK
