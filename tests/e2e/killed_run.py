"""`train.py` in a process to be killed: forked from one that has imported what it needs, it starts at once."""

import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from rank_process import NEEDED, ROOT


def start_run(overrides: list[str], log: Path) -> BaseProcess:
    """Start `train.py` with these overrides; what it prints is added to `log`."""
    return start(train, overrides, log)


def start(function: Callable[..., None], *arguments: object) -> BaseProcess:
    """Call a function of a module that can be imported in such a process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(NEEDED)
    process = context.Process(target=function, args=arguments)
    process.start()
    return process


def train(overrides: list[str], log: Path) -> None:
    """`train.py` in this process; raises SystemExit unless the run finishes."""
    run_script("train.py", overrides, log)


def run_script(script: str, overrides: list[str], log: Path) -> None:
    """A command of the repository in this process; raises SystemExit where it fails."""
    with log.open("a") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    torch.set_num_threads(1)
    sys.argv = [script, *overrides]
    runpy.run_path(str(ROOT / script), run_name="__main__")
