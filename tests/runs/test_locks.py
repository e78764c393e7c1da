"""One process at a time writes to a run directory. Asking whether it is locked never disturbs anyone."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from linrnn.config import load_config
from linrnn.core.errors import ConfigError
from linrnn.runs.directory import LOCK, RunDirectory


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


def run_directory(path: Path, resume: str = "auto") -> RunDirectory:
    place = [f"results_dir={path.parent.parent}", f"group={path.parent.name}", f"run_name={path.name}"]
    return RunDirectory(load_config([*place, f"trainer.resume={resume}"]))


def test_one_owner_at_a_time_in_one_process_and_among_several(tmp_path):
    path = tmp_path / "run"

    def opens() -> bool:
        try:
            run_directory(path).open()
        except ConfigError as error:
            return "another process" not in error.cause
        return True

    first, second = run_directory(path), run_directory(path)
    assert not second.in_use(), "it is not there yet"
    first.open()
    first.begin()
    assert not opens()
    assert not in_a_child(opens)
    assert in_a_child(second.in_use)
    first.close()
    first.close()
    assert in_a_child(opens)
    assert not second.in_use(), "the owner has died"


def test_an_opener_waits_for_the_moment_in_which_somebody_asks(tmp_path):
    directory = run_directory(tmp_path / "run")
    directory.open()
    directory.begin()
    directory.close()
    assert not directory.in_use()
    asking = FileLock(directory.path / LOCK, thread_local=False)
    asking.acquire()
    threading.Timer(0.2, asking.release).start()
    directory.open()
    directory.close()


def test_a_run_that_is_moved_aside_is_locked_meanwhile(tmp_path):
    path = tmp_path / "run"
    owner = run_directory(path)
    owner.open()
    owner.begin()
    other = run_directory(path, resume="never")
    with pytest.raises(ConfigError, match="another process"):
        other.open()
    assert not (tmp_path / "run.1").exists()
    owner.close()
    other.open()
    other.begin()
    assert run_directory(path).in_use()
    other.close()
    assert (tmp_path / "run.1").is_dir()


def test_a_directory_that_was_opened_and_left_empty_goes(tmp_path):
    directory = run_directory(tmp_path / "run")
    directory.open()
    directory.close()
    assert not (tmp_path / "run").exists()
