"""`train.py` in a process that can be killed and starts at once."""

from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from forked import run_script, start

from linrnn.config import last_of_each


def start_run(overrides: list[str], log: Path) -> BaseProcess:
    """Start `train.py` with these overrides; its output is added to `log`."""
    return start(train, overrides, log)


def train(overrides: list[str], log: Path) -> None:
    """`train.py` in this process; raises SystemExit unless the run finishes."""
    torch.set_num_threads(1)
    run_script("train.py", last_of_each(overrides), log)
