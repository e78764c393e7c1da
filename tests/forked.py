"""Processes forked from one that has imported what the repository's commands need: they start at once.

It has imported libraries alone: each process imports linrnn itself, in the order in which a new interpreter would.
"""

import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "transformers"]
NEEDED += ["fla.layers", "fla.models", "hydra", "matplotlib.pyplot", "wandb"]


def start(function: Callable[..., None], *arguments: object) -> BaseProcess:
    """Call a function of a module that can be imported in such a process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(NEEDED)
    process = context.Process(target=function, args=arguments)
    process.start()
    return process


def run_script(script: str, arguments: list[str], stdout: Path, stderr: Path | None = None) -> None:
    """A command of the repository in this process; raises SystemExit where it fails.

    What it prints is added to `stdout`, errors to `stderr` (None: there too).
    """
    for stream, path in ((1, stdout), (2, stderr or stdout)):
        with path.open("a") as file:
            os.dup2(file.fileno(), stream)
    sys.argv = [script, *arguments]
    runpy.run_path(str(ROOT / script), run_name="__main__")


def run_elsewhere(
    environment: dict[str, str], cwd: Path, script: str, arguments: list[str], stdout: Path, stderr: Path
) -> None:
    """As :func:`run_script`, with an environment and a working directory of its own."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    run_script(script, arguments, stdout, stderr)
