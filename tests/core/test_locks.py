"""One process at a time writes to a run directory. Asking whether it is locked never disturbs anyone."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from linrnn.core.errors import ConfigError
from linrnn.core.locks import DirectoryLock
from linrnn.runs.directory import RunDirectory


def in_a_child(action: Callable[[], bool]) -> bool:
    """The result of `action` in a process forked from this one."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(int(action()))
        finally:
            os._exit(77)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 1)
    return bool(code)


def run_directory(path: Path) -> RunDirectory:
    return RunDirectory(path, identity={"seed": 0}, resume="auto")


def test_one_owner_at_a_time_in_one_process_and_among_several(tmp_path):
    first, second = DirectoryLock(tmp_path), DirectoryLock(tmp_path)
    assert not second.taken()
    assert first.take()
    assert not second.take()
    assert in_a_child(lambda: DirectoryLock(tmp_path).taken())
    assert not in_a_child(lambda: DirectoryLock(tmp_path).take())
    first.release()
    first.release()
    assert not in_a_child(lambda: DirectoryLock(tmp_path).taken())
    assert second.take()
    second.release()


def test_a_directory_that_is_not_there_is_not_taken(tmp_path):
    assert not DirectoryLock(tmp_path / "not" / "yet").taken()
    with pytest.raises(FileNotFoundError):
        DirectoryLock(tmp_path / "not" / "yet").take()


def test_an_owner_that_died_has_it_no_more(tmp_path):
    assert in_a_child(lambda: DirectoryLock(tmp_path).take())
    assert not DirectoryLock(tmp_path).taken()
    lock = DirectoryLock(tmp_path)
    assert lock.take()
    lock.release()


def test_asking_again_and_again_refuses_no_opener(tmp_path):
    """If asking took the lock itself, a tenth of the attempts to open would fail."""
    path = tmp_path / "run"
    first = run_directory(path)
    first.open()
    first.begin("")
    first.close()
    asking = os.fork()
    if asking == 0:
        while True:
            run_directory(path).in_use()
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            run_directory(path).in_use()

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        refused = 0
        for _ in range(300):
            directory = run_directory(path)
            try:
                directory.open()
                directory.close()
            except ConfigError:
                refused += 1
        assert refused == 0
    finally:
        done.set()
        os.kill(asking, 9)
        os.waitpid(asking, 0)
        for thread in threads:
            thread.join()


def test_a_run_that_is_moved_aside_is_locked_meanwhile(tmp_path):
    path = tmp_path / "run"
    owner = run_directory(path)
    owner.open()
    owner.begin("")
    other = RunDirectory(path, identity={"seed": 0}, resume="never")
    with pytest.raises(ConfigError, match="another process"):
        other.open()
    assert not (tmp_path / "run.1").exists()
    owner.close()
    other.open()
    other.begin("")
    other.close()
    assert (tmp_path / "run.1").is_dir()


def test_a_directory_that_was_opened_and_left_empty_goes(tmp_path):
    directory = run_directory(tmp_path / "run")
    directory.open()
    directory.close()
    assert not (tmp_path / "run").exists()
