"""How a rank learns that another rank has failed.

A rank that fails leaves the cause in the store that all ranks share. Every rank watches this store and the processes of
its own machine. A rank that waits for a lost rank ends with the lost rank's cause.

Every rank also counts up a number in the store as a sign of life. A rank whose number stays the same for
`parallel.timeout_seconds` stands still: its process was stopped, or its machine has vanished. The other ranks then end.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from linrnn.core.errors import LinrnnError, RankFailedError, first_line
from linrnn.core.output import say
from linrnn.distributed.launch import Launch

_FAILURE, _PROCESS, _ALIVE = "failure", "process", "alive"
_SIGNS = 10  # signs of life that a rank gives within parallel.timeout_seconds


@dataclass(frozen=True)
class Failure:
    """Why a rank ended, as it tells all other ranks."""

    rank: int
    cause: str
    remedy: str
    exit_code: int

    def error(self) -> RankFailedError:
        return RankFailedError(f"rank {self.rank} stopped: {self.cause}", self.remedy, self.exit_code)


class Watch:
    """Notices the failure of another rank, and ends this process if it hangs because of that. :meth:`start` starts it.

    Args:
        timeout: a rank without a sign of life for so long stands still.
        clock: gives the time in seconds.

    Attributes:
        failure: the first known failure of any rank.
        when_lost: called before this process is ended; None while the rank is being set up.
        patient: whether this rank is known not to hang.
    """

    POLL_SECONDS = 0.2  # between looks at the store and the processes of this machine
    NOTICE_SECONDS = 5 * POLL_SECONDS  # after this time every rank knows of a failure
    GRACE_SECONDS = 10.0  # a rank's time to end by itself after another has failed; torchrun kills it after 30

    def __init__(
        self, launch: Launch, store: dist.Store, timeout: timedelta, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.failure: Failure | None = None
        self.when_lost: Callable[[LinrnnError], None] | None = None
        self.patient = False
        self._rank, self._store = launch.rank, store
        self._others = [rank for rank in range(launch.world_size) if rank != launch.rank]
        self._here = launch.ranks_here
        self._neighbours: dict[int, int] = {}  # process ids of the other ranks of this machine
        self._timeout, self._clock = timeout.total_seconds(), clock
        self._signs: dict[int, tuple[bytes, float]] = {}  # rank -> its number, and when this process first read it
        self._looked = clock() - self._timeout
        self._noticed, self._ended = threading.Event(), threading.Event()
        store.set(f"{_PROCESS}/{launch.rank}", str(os.getpid()))
        self._thread = threading.Thread(target=self._run, name="linrnn-ranks", daemon=True)

    def start(self) -> "Watch":
        """Start the thread that looks at the other ranks until :meth:`end`."""
        self._thread.start()
        return self

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()
        self._thread.join()

    def wait_for_failure(self, seconds: float) -> Failure | None:
        """The first known failure, after waiting for one at most so long."""
        self._noticed.wait(seconds)
        return self.failure

    def record(self, failure: Failure) -> Failure:
        """Leave `failure` for all ranks. Returns the failure that was recorded first."""
        return self._notice(self._store.compare_set(_FAILURE, "", json.dumps(asdict(failure))))

    def dead(self) -> list[int]:
        """Ranks of this machine whose processes are gone."""
        return [rank for rank, process in self._neighbours.items() if not _alive(process)]

    def still(self) -> list[int]:
        """Give a sign of life, and find the ranks without a new one for so long; both ten times in that time.

        A rank that has not given its first sign yet may still be starting. If this process itself stood still, the ages
        of all signs begin anew: a scheduler may have stopped all ranks at once.
        """
        now, since = self._clock(), self._clock() - self._looked
        if since < self._timeout / _SIGNS:
            return []
        self._looked = now
        if since > self._timeout / 2:
            self._signs.clear()
        self._store.add(f"{_ALIVE}/{self._rank}", 1)
        for rank in self._others:
            number = self._known(f"{_ALIVE}/{rank}")
            if number is not None and self._signs.get(rank, (b"", 0.0))[0] != number:
                self._signs[rank] = number, now
        return [rank for rank, (_, read) in self._signs.items() if now - read >= self._timeout]

    def _run(self) -> None:
        while self.failure is None and not self._ended.wait(self.POLL_SECONDS):
            try:
                self._look()
            except (RuntimeError, OSError):  # the process that held the store is gone
                gone = Failure(0, "the process that joins the ranks is gone", "see its output", 1)
                self._notice(json.dumps(asdict(gone)))
        if self._ended.wait(self.GRACE_SECONDS) or self.failure is None or self.patient:
            return
        error = self.failure.error()
        try:
            if self.when_lost:
                self.when_lost(error)
        except Exception as problem:
            say(f"error: the summary was not written: {first_line(problem)}", sys.stderr)
        finally:
            say(f"error: {error}", sys.stderr)
            os._exit(error.exit_code)

    def _look(self) -> None:
        if failure := self._known(_FAILURE):
            self._notice(failure)
        for rank in self._others:
            if rank in self._here and rank not in self._neighbours and (process := self._known(f"{_PROCESS}/{rank}")):
                self._neighbours[rank] = int(process)
        for rank in self.dead():
            self.record(Failure(rank, "its process has died", "see its output and the system's log", 1))
        for rank in self.still():
            cause = f"its process stands still: no sign of life for {self._timeout:g} s"
            self.record(Failure(rank, cause, "see whether it was stopped, and whether its machine answers", 1))

    def _known(self, key: str) -> bytes | None:
        """The value of a key of the store, if it has one."""
        return self._store.get(key) if self._store.check([key]) else None

    def _notice(self, text: str | bytes) -> Failure:
        failure = Failure(**json.loads(text))
        self.failure = self.failure or failure
        self._noticed.set()
        return failure


def _alive(process: int) -> bool:
    """Whether a process runs. A zombie has ended, but its parent has not read its exit code yet."""
    try:
        return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
