"""A lock on a directory: one process at a time may write there."""

from pathlib import Path

from filelock import FileLock, Timeout

SIGN = ".lock"
PATIENCE = 1.0  # seconds that a taker waits: somebody may hold the lock for a moment, to ask whether it is taken


class DirectoryLock:
    """An exclusive lock on a directory. The system releases it when the process ends, in whatever way it ends.

    Two objects of one process exclude each other.
    """

    def __init__(self, directory: Path) -> None:
        self._sign = directory / SIGN
        self._lock = FileLock(self._sign, thread_local=False)

    def take(self) -> bool:
        """Try to take the lock; return whether this object now has it.

        Raises:
            OSError: the file cannot be opened or written.
        """
        try:
            self._lock.acquire(timeout=PATIENCE, poll_interval=0.01)
        except Timeout:
            return False
        return True

    def release(self) -> None:
        """Release the lock. Releasing twice is harmless."""
        self._lock.release()

    def taken(self) -> bool:
        """Whether any process, this one included, has the lock."""
        if not self._sign.exists():
            return False
        try:
            with FileLock(self._sign, timeout=0):
                return False
        except Timeout:
            return True
