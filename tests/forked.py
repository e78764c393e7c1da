"""Processes that start at once: they are forked from one that has imported warm.py."""

import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO
from unittest.mock import patch

from linrnn.core import garbage

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent


_server = forkserver._forkserver  # type: ignore[attr-defined]


def freeze() -> None:
    """Freeze all that is there. A run, which would unfreeze it at its end, leaves it frozen."""
    gc.freeze()
    garbage.gc = SimpleNamespace(**{**vars(gc), "freeze": lambda: None, "unfreeze": lambda: None})  # type: ignore


def start(function: Callable[..., None], *arguments: object) -> BaseProcess:
    """Call a function of an importable module in such a process."""
    start_server()
    process = multiprocessing.get_context("forkserver").Process(target=function, args=arguments)
    process.start()
    return process


def ended(processes: list[BaseProcess], seconds: float = 60) -> list[int | None]:
    """Exit codes once all processes have ended. A process that does not end is killed and has no exit code."""
    until = time.monotonic() + seconds
    for process in processes:
        process.join(max(until - time.monotonic(), 0))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def start_server() -> str:
    """Start the process from which all others are forked, unless it runs. Returns its address."""
    if _server._forkserver_address and _server._forkserver_pid is None:  # another process has started it
        _server.ensure_running = resource_tracker.ensure_running
    forkserver.set_forkserver_preload(["warm"])
    path = os.environ.get("PYTHONPATH")
    with patch.dict(os.environ, PYTHONPATH=f"{TESTS}{os.pathsep}{path}" if path else str(TESTS)):
        _server.ensure_running()
    return _server._forkserver_address


def use_server(address: str) -> None:
    """Fork from the server that another process has started, and that ends with that process."""
    _server._forkserver_address = address
    _server._forkserver_alive_fd = os.open(os.devnull, os.O_WRONLY)  # stands in for the owner's pipe


def spawn(function: Callable[..., None], *arguments: object) -> BaseProcess:
    """As :func:`start`, in a new interpreter: CUDA does not survive a fork."""
    process = multiprocessing.get_context("spawn").Process(target=function, args=arguments)
    process.start()
    return process


def print_into(stdout: Path | str, stderr: Path | str | None = None, anew: bool = True) -> None:
    """From now on this process prints into a file, and its errors into another (None: into the same).

    anew: what `stdout` holds goes; else this output is added to it.
    """
    if anew:
        Path(stdout).write_text("")
    for stream, path in ((1, stdout), (2, stderr or stdout)):
        with open(path, "a") as file:
            os.dup2(file.fileno(), stream)


def run_script(script: str, arguments: list[str], stdout: Path, stderr: Path | None = None) -> None:
    """Run a command of the repository in this process.

    Its output is added to `stdout`, its errors to `stderr` (None: `stdout`).

    Raises:
        SystemExit: the command failed.
    """
    print_into(stdout, stderr, anew=False)
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
    """What a sweep or torchrun needs of `subprocess.Popen`: `python train.py …` in such a process."""

    def __init__(
        self,
        args: Sequence[str],
        *,
        env: dict[str, str],
        stdout: BinaryIO | None,
        start_new_session: bool = False,
        **_: Any,
    ) -> None:
        _, script, *overrides = (argument for argument in args if argument != "-u")
        log = Path(stdout.name if stdout else "/proc/self/fd/1").resolve()
        self._process = start(
            run_in_session if start_new_session else run_elsewhere,
            *(env, Path.cwd(), Path(script).name, overrides, log, log),
        )
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> None:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def run_in_session(*arguments: Any) -> None:
    """As :func:`run_elsewhere`, in a session of its own: whoever started the command signals its process group."""
    os.setsid()
    run_elsewhere(*arguments)


def run_torchrun(arguments: list[str], printed: Path) -> None:
    """Run torchrun in this process. The ranks that it starts are forked."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    with patch.object(subprocess_handler, "Popen", Popen):
        run_script(run.__file__, arguments, printed)


def torchrun_anew(arguments: list[str], printed: Path) -> None:
    """As :func:`run_torchrun`, and this process becomes torchrun itself: its ranks are new interpreters."""
    print_into(printed)
    os.chdir(ROOT)
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *arguments])
