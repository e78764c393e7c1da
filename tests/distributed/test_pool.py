"""A pool serves runs until a rank dies, hangs or leaves something behind; then the next run gets new ranks."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pool import Pool


def note(folder: Path) -> None:
    """Leave the process's number, and a variable for the next run."""
    assert "LEFT" not in os.environ
    os.environ["LEFT"] = ""
    (folder / str(os.getpid())).touch()


def exits(folder: Path) -> None:
    sys.exit(3)


def raises(folder: Path) -> None:
    raise KeyError


def dies(folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(folder: Path) -> None:
    time.sleep(1000)


def leaves_a_thread(folder: Path) -> None:
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()


@pytest.mark.parametrize(
    ("happens", "code"), [(exits, 3), (raises, 1), (dies, -signal.SIGKILL), (hangs, None), (leaves_a_thread, 1)]
)
def test_after_a_rank_that_failed_the_next_run_has_new_ones(
    happens: Callable[[Path], None], code: int | None, tmp_path: Path, pool: Pool
) -> None:
    for _ in range(2):
        assert pool.run(note, [(tmp_path,), (tmp_path,)], seconds=60) == [0, 0]
    first = set(tmp_path.iterdir())
    assert len(first) == 2, "the same two served both runs"
    seconds = 0.5 if happens is hangs else 60
    assert pool.run(happens, [(tmp_path,)], seconds) == [code]
    assert pool.run(note, [(tmp_path,), (tmp_path,)], seconds=60) == [0, 0]
    assert len(set(tmp_path.iterdir()) - first) == 2
