"""Signs of life: which ranks stand still, by a clock that the test sets."""

from collections.abc import Callable

import pytest
import torch.distributed as dist

from linrnn.distributed.launch import Launch
from linrnn.distributed.watch import SignsOfLife

PATIENCE = 100.0


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def signs(clock: Clock) -> Callable[[int], SignsOfLife]:
    """The signs of a rank of three that share a store."""
    store = dist.HashStore()
    return lambda rank: SignsOfLife(Launch(rank, world_size=3), store, PATIENCE, clock)


def test_a_rank_without_a_new_sign_stands_still(signs: Callable[[int], SignsOfLife], clock: Clock) -> None:
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


def test_a_rank_that_is_still_starting_may_take_its_time(signs: Callable[[int], SignsOfLife], clock: Clock) -> None:
    first = signs(0)
    for _ in range(50):
        assert first.still() == []
        clock.seconds += PATIENCE / 10


def test_a_pause_of_all_ranks_is_nobodys_fault(signs: Callable[[int], SignsOfLife], clock: Clock) -> None:
    ranks = [signs(rank) for rank in range(2)]
    for _ in range(3):
        assert [rank.still() for rank in ranks] == [[], []]
        clock.seconds += PATIENCE / 10
    clock.seconds += 10 * PATIENCE  # a scheduler stops the job, and lets it go on
    assert ranks[0].still() == []
    clock.seconds += PATIENCE / 10
    assert [rank.still() for rank in reversed(ranks)] == [[], []]


def test_signs_are_given_ten_times_in_the_patience(signs: Callable[[int], SignsOfLife], clock: Clock) -> None:
    rank, other = signs(0), signs(1)
    for _ in range(1000):  # looks in 100 s
        rank.still()
        clock.seconds += PATIENCE / 1000
    other.still()
    assert 10 <= int(rank._store.get("alive/0")) <= 11
