"""Sweeps and searches in the test's own process, whose points start at once."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest
import torch
from forked import run_elsewhere, start

from linrnn.experiments import max_batch, points, sweep


class Forked:
    """What a point needs of `subprocess.Popen`: `python train.py …` in a process that has imported the libraries."""

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


@pytest.fixture
def quick_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Points are forked. What asks another process in order to leave the GPU alone asks this one: it has the CPU only.

    tests/faults/test_kill_at_random.py runs points in new interpreters, as users do.
    """
    if not torch.cuda.is_available():  # CUDA does not survive a fork
        popen = SimpleNamespace(Popen=Forked, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT)
        monkeypatch.setattr(points, "subprocess", popen)
    for module in (sweep, max_batch):
        monkeypatch.setattr(module, "in_another_process", lambda function, *arguments: function(*arguments))
