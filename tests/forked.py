"""Processes that start at once: they are forked from one that has imported warm.py.

Tests of how a command starts in a new interpreter use the fixture `fresh_command`.
"""

import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, BinaryIO
from unittest.mock import patch

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent


def start(function: Callable[..., None], *arguments: object) -> BaseProcess:
    """Call a function of an importable module in such a process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["warm"])
    path = os.environ.get("PYTHONPATH")
    with patch.dict(os.environ, PYTHONPATH=f"{TESTS}{os.pathsep}{path}" if path else str(TESTS)):
        forkserver.ensure_running()
    process = context.Process(target=function, args=arguments)
    process.start()
    return process


def spawn(function: Callable[..., None], *arguments: object) -> BaseProcess:
    """As :func:`start`, in a new interpreter: CUDA does not survive a fork."""
    process = multiprocessing.get_context("spawn").Process(target=function, args=arguments)
    process.start()
    return process


def run_script(script: str, arguments: list[str], stdout: Path, stderr: Path | None = None) -> None:
    """Run a command of the repository in this process.

    Its output is added to `stdout`, its errors to `stderr` (None: `stdout`).

    Raises:
        SystemExit: the command failed.
    """
    for stream, path in ((1, stdout), (2, stderr or stdout)):
        with path.open("a") as file:
            os.dup2(file.fileno(), stream)
    sys.argv = [script, *arguments]
    runpy.run_path(str(ROOT / script), run_name="__main__")


def run_elsewhere(
    environment: dict[str, str], cwd: Path, script: str, arguments: list[str], stdout: Path, stderr: Path
) -> None:
    """As :func:`run_script`, with its own environment and working directory.

    Where the command asks for a new interpreter by `spawn`, this process forks: it has imported everything already.
    """
    context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: context("fork" if method == "spawn" else method)  # type: ignore
    os.environ.clear()
    os.environ.update(environment)
    if threads := environment.get("OMP_NUM_THREADS"):  # torch read it when it was imported
        import torch

        torch.set_num_threads(int(threads.split(",")[0]))
    os.chdir(cwd)
    run_script(script, arguments, stdout, stderr)


class Popen:
    """What a sweep's point needs of `subprocess.Popen`: `python train.py …` in such a process."""

    def __init__(self, command: Sequence[str], *, stdout: BinaryIO, env: dict[str, str], **_: Any) -> None:
        _, script, *overrides = command
        log = Path(stdout.name)
        self._process = start(run_elsewhere, env, Path.cwd(), Path(script).name, overrides, log, log)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> None:
        self._process.join()

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)
