"""Signs of life: which ranks stand still, by a clock that the test sets. And the end of a process that hangs."""

import os
import queue
import subprocess
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from linrnn.core.errors import ConfigError
from linrnn.distributed.launch import Launch
from linrnn.distributed.watch import Failure, Watch

PATIENCE = 100.0


@pytest.fixture
def clock() -> SimpleNamespace:
    return SimpleNamespace(seconds=1000.0)


@pytest.fixture
def signs(clock: SimpleNamespace) -> Callable[[int], Watch]:
    """The signs of a rank of three that share a store."""
    store = dist.HashStore()
    return lambda rank: Watch(Launch(rank, world_size=3), store, timedelta(seconds=PATIENCE), lambda: clock.seconds)


def test_a_rank_without_a_new_sign_stands_still(signs, clock):
    ranks = [signs(rank) for rank in range(3)]
    for _ in range(5):
        assert [rank.still() for rank in ranks] == [[], [], []]
        clock.seconds += PATIENCE / 10
    found = []
    for _ in range(11):  # rank 2 was stopped
        found.append([ranks[0].still(), ranks[1].still()])
        clock.seconds += PATIENCE / 10
    assert found[:9] == [[[], []]] * 9
    assert found[10] == [[2], [2]]


def test_a_rank_that_is_still_starting_may_take_its_time(signs, clock):
    first = signs(0)
    for _ in range(50):
        assert first.still() == []
        clock.seconds += PATIENCE / 10


def test_a_pause_of_all_ranks_is_nobodys_fault(signs, clock):
    ranks = [signs(rank) for rank in range(2)]
    for _ in range(3):
        assert [rank.still() for rank in ranks] == [[], []]
        clock.seconds += PATIENCE / 10
    clock.seconds += 10 * PATIENCE  # a scheduler stops the job, and lets it go on
    assert ranks[0].still() == []
    clock.seconds += PATIENCE / 10
    assert [rank.still() for rank in reversed(ranks)] == [[], []]


def test_a_process_of_another_machine_is_not_looked_for_here():
    """Four ranks on two machines. The numbers of processes that ended there mean nothing here.

    Here a launcher may not have read the exit code of a process that ended: a zombie.
    """
    gone = subprocess.Popen(["true"])
    os.waitid(os.P_PID, gone.pid, os.WEXITED | os.WNOWAIT)
    store = dist.HashStore()
    watch = Watch(Launch(2, 0, world_size=4, local_world_size=2), store, timedelta(seconds=PATIENCE))
    for rank in (0, 1):
        store.set(f"process/{rank}", str(gone.pid))
    watch.start()
    try:
        assert watch.wait_for_failure(4 * Watch.POLL_SECONDS) is None
        store.set("process/3", str(gone.pid))
        assert watch.wait_for_failure(9) == Failure(3, "its process has died", "see its output and the system's log", 1)
    finally:
        watch.end()
        gone.wait()


def test_a_process_that_hangs_ends_even_if_its_summary_cannot_be_written(monkeypatch, capsys):
    exit_codes: queue.Queue[int] = queue.Queue()
    monkeypatch.setattr(os, "_exit", exit_codes.put)
    monkeypatch.setattr(Watch, "GRACE_SECONDS", 0.0)
    watch = Watch(Launch(0, world_size=2), dist.HashStore(), timedelta(seconds=PATIENCE)).start()
    watch.when_lost = Mock(side_effect=ConfigError("no such step", "choose another"))
    watch.record(Failure(1, "its process has died", "see its output", 6))
    assert exit_codes.get(timeout=60) == 6
    errors = capsys.readouterr().err
    assert "the summary was not written: no such step" in errors
    assert "error: rank 1 stopped: its process has died" in errors
