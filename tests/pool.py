"""Ranks that serve one run after the other, so that a run does not pay for the start of its processes.

Each run has a process group of its own. A run whose rank dies, hangs or leaves something behind ends the whole pool:
the next run starts new ranks.
"""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch.distributed as dist
from forked import start


@dataclass
class Member:
    """A process of the pool, and the connection over which it gets runs and sends their exit codes."""

    process: BaseProcess
    connection: Connection

    def answer(self, until: float) -> int | None:
        """The exit code of its run; None if there is none until then (in `time.monotonic`)."""
        try:
            if self.connection.poll(max(until - time.monotonic(), 0)):
                return self.connection.recv()
        except (EOFError, OSError):
            self.process.join(max(until - time.monotonic(), 0))
            return self.process.exitcode
        return None


class Pool:
    """Processes for runs on CPUs."""

    def __init__(self) -> None:
        self._members: list[Member] = []

    def run(self, rank_of_run: Callable[..., None], ranks: list[tuple], seconds: float) -> list[int | None]:
        """Call a function in as many processes as there are tuples of arguments, which it gets.

        Returns:
            the exit codes; None for a process that has not ended its run within so many seconds.
        """
        while len(self._members) < len(ranks):
            ours, theirs = Pipe()
            self._members.append(Member(start(_serve, theirs), ours))
            theirs.close()
        until = time.monotonic() + seconds
        members = self._members[: len(ranks)]
        for member, arguments in zip(members, ranks, strict=True):
            member.connection.send((rank_of_run, arguments))
        codes = [member.answer(until) for member in members]
        if any(code != 0 for code in codes):
            self.close()
        return codes

    def close(self) -> None:
        """End all processes."""
        for member in self._members:
            member.process.kill()
            member.process.join()
            member.connection.close()
        self._members = []


def _serve(connection: Connection) -> None:
    environment = dict(os.environ)
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        code = _exit_code(function, arguments)
        os.environ.clear()
        os.environ.update(environment)
        connection.send(code)


def _exit_code(function: Callable[..., None], arguments: tuple) -> int:
    """That of a process which calls the function and ends; 1 as well if the function left a group or a thread."""
    code = 0
    try:
        function(*arguments)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    left = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if not code and (left or dist.is_initialized()):
        print(f"the run left a process group ({dist.is_initialized()}) or threads ({left})")
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code
