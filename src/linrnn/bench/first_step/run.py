"""First steps as a fresh machine takes them: every run is a process of its own that finds no compiled kernel.

The data are prepared before, because they belong to no single run. The files of Python's packages are on the disk, and
the machine's first run reads them from there.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from linrnn.bench.first_step.rows import Row
from linrnn.bench.records import append_rows, begin_run, results_directory
from linrnn.config import CONFIG_DIR, last_of_each, load_config
from linrnn.config.schema import BenchFirstStepConfig, Config
from linrnn.core.errors import LinrnnError
from linrnn.data import prepare
from linrnn.runs.directory import ENVIRONMENT
from linrnn.runs.provenance import read_processes

TRAIN = CONFIG_DIR.parent / "train.py"
FIRST_STEP = "step 1 took "  # how the line begins that train.py prints after its first step
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")  # environment variables: where compiled kernels are kept
LAST_LINES = 15  # of a run that ends before its first step


def run_benchmark(config: BenchFirstStepConfig, command: str, say: Callable[[str], None]) -> None:
    """Measure every line `repeats` times. A run's row is written as soon as its first step has ended.

    Args:
        config: see configs/bench_first_step.yaml.
        command: the command line, for the record.
        say: shows text to the user.

    Raises:
        ConfigError: a line is no configuration of train.py.
        LinrnnError: a run ended before the end of its first step.
    """
    runs = {line: load_config([*line.split(), f"device={config.device}"]) for line in config.lines}
    for run in runs.values():
        prepare(run.data)
    directory = results_directory(config, "bench_first_step")
    run_id = begin_run(directory, command, config)["id"]
    planned = list(runs.items()) * config.repeats
    for number, (line, run) in enumerate(planned, start=1):
        row = _measure(line, run, run_id, number, say)
        append_rows(directory, [row])
        say(f"{number} of {len(planned)}, {run.model.name} {run.size.name}: first step after {row.seconds:.1f} s")


def _measure(line: str, run: Config, run_id: str, number: int, say: Callable[[str], None]) -> Row:
    """Start a run, and end it after its first step."""
    with tempfile.TemporaryDirectory() as scratch:
        own = [
            *("group=first_step", f"results_dir={scratch}/results", "trainer.max_steps=2", "trainer.max_tokens=null"),
            *("trainer.resume=never", "logger.wandb.mode=disabled", f"device={run.device}"),
        ]
        caches = {name: f"{scratch}/{name.lower()}" for name in CACHES}
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, str(TRAIN), *last_of_each([*line.split(), *own])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, **caches, "PYTHONUNBUFFERED": "1"},
        )
        try:
            seconds = _until_first_step(process, line, say) - began
        finally:
            process.kill()
            process.wait()
        [environment] = Path(scratch, "results", "first_step").glob(f"*/{ENVIRONMENT}")
        record = read_processes(environment)[-1]
    choices = record["kernel_choices"] or {}
    return Row(
        line=line,
        model=run.model.name,
        size=run.size.name,
        loss=run.loss.name,
        run=run_id,
        number=number,
        seconds=round(seconds, 2),
        seconds_to=record["seconds_to"],
        stored=choices.get("stored"),
        near=choices.get("near"),
        first=choices.get("first"),
        tuned=choices.get("tuned"),
    )


def _until_first_step(process: "subprocess.Popen[str]", line: str, say: Callable[[str], None]) -> float:
    """The time at which the process prints that its first step has ended.

    Raises:
        LinrnnError: the process ended before. Its last lines are shown.
    """
    assert process.stdout is not None
    lines: list[str] = []
    for printed in process.stdout:
        if printed.startswith(FIRST_STEP):
            return time.perf_counter()
        lines.append(printed.rstrip("\n"))
    for printed in lines[-LAST_LINES:]:
        say(f"  {printed}")
    failure = LinrnnError(
        f"lines: the run of {line!r} ended with exit code {process.wait()} before the end of its first step",
        "mend what its last lines above name, and call the benchmark again",
    )
    failure.exit_code = max(process.returncode, 1)  # the run's own, which says what kind of failure it was
    raise failure
