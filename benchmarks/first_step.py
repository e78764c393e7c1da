"""Measure how long runs take to the end of their first step: `python benchmarks/first_step.py`.

First steps as a fresh machine takes them: every run is a train.py of its own that finds no compiled kernel, and it is
ended after its first step. The data are prepared before, because they belong to no single run. The files of Python's
packages are on the disk, and the machine's first run reads them from there.
"""

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from linrnn.config import CONFIG_DIR, last_of_each, load_config
from linrnn.config.schema import COMMANDS, Config, option
from linrnn.core.errors import LinrnnError
from linrnn.core.output import say
from linrnn.data import prepare
from linrnn.models.facts import model_in_words
from linrnn.runs.directory import ENVIRONMENT
from linrnn.runs.intervals import estimate
from linrnn.runs.origins import read_processes

TRAIN = CONFIG_DIR.parent / "train.py"
FIRST_STEP = "step 1 took "  # how the line begins that train.py prints after its first step
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")  # environment variables: where compiled kernels are kept
CHOICES = ("stored", "near", "first", "tuned")  # of kernels, see Row
LAST_LINES = 15  # of a run that ends before its first step
# The stages of a run's start, as environment.json names them, in words.
STAGES = {
    "libraries": "Python and libraries imported",
    "model": "FLA imported, model built without weights",
    "weights": "weights drawn, on threads of their own",
    "kernels": "kernels compiled",
    "first_step": "first step",
}
_LINE = "model={} size=1b3 loss=cce_kahan trainer.batch_size=8 trainer.seq_len=2048 data=markov"


@dataclass
class BenchConfig(common.Keys):
    """Keys of the command line."""

    lines: list[str] = option(
        [_LINE.format(model) for model in ("gla", "kda", "transformer")],
        "each line holds overrides of train.py: what is trained",
    )
    repeats: int = option(5, "runs of every line, the lines in turn", minimum=1)


COMMANDS["bench_first_step"] = BenchConfig


@dataclass
class Row:
    """One run of train.py, from its command to the end of its first step.

    Attributes:
        line: of the configuration: overrides of train.py.
        run: id in runs.jsonl: one call of the benchmark, on one machine.
        number: its place among all runs of that call, from 1. Later runs find the machine's files in memory.
        seconds: from the start of the process to the line that it prints after its first step.
        seconds_to: of each stage, as `environment.json` records them, from an instant less than a second later.
        stored, near, first, tuned: kernels whose choice was stored, was stored for another batch, was not made (the
            first configuration ran), or was tuned in this run; null where no kernel has configurations.
    """

    line: str
    model: str
    size: str
    loss: str
    run: str
    number: int
    seconds: float
    seconds_to: dict[str, float]
    stored: int | None = None
    near: int | None = None
    first: int | None = None  # older rows have none: there was no such mode
    tuned: int | None = None

    status: ClassVar[str] = "ok"  # a run that fails ends the benchmark

    def seconds_at(self, stage: str) -> str:
        """From the start of the process to the end of a stage; `-` if the run has no such stage."""
        before = self.seconds - self.seconds_to["first_step"]
        return f"{before + self.seconds_to[stage]:.1f}" if stage in self.seconds_to else "-"


def read_rows(directory: Path) -> list[Row]:
    """All rows, in the order in which they were measured."""
    return common.last_rows(directory, Row, key=lambda row: (row.run, row.number))


# ------------------------------------------------------------------------------------------------------ measuring
def run_benchmark(config: BenchConfig) -> None:
    """Measure every line `repeats` times. A run's row is written as soon as its first step has ended."""
    runs = {line: load_config([*line.split(), f"device={config.device}"]) for line in config.lines}
    for run in runs.values():
        prepare(run.data)
    record = common.Record(config, "bench_first_step")
    planned = list(runs.items()) * config.repeats
    for number, (line, run) in enumerate(planned, start=1):
        row = _measure(line, run, record.id, number)
        record.add(row)
        say(f"{number} of {len(planned)}, {run.model.name} {run.size.name}: first step after {row.seconds:.1f} s")


def _measure(line: str, run: Config, run_id: str, number: int) -> Row:
    """Start a run, and end it after its first step."""
    with tempfile.TemporaryDirectory() as scratch:
        own = [
            *("group=first_step", f"results_dir={scratch}/results", "trainer.max_steps=2", "trainer.max_tokens=null"),
            *("trainer.resume=never", "logger.wandb.mode=disabled", f"device={run.device}"),
        ]
        caches = {name: f"{scratch}/{name.lower()}" for name in CACHES}
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, str(TRAIN), *last_of_each([*line.split(), *own])], text=True, errors="replace",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**os.environ, **caches, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        try:
            seconds = _until_first_step(process, line) - began
        finally:
            process.kill()
            process.wait()
        [environment] = Path(scratch, "results", "first_step").glob(f"*/{ENVIRONMENT}")
        record = read_processes(environment)[-1]
    choices = record["kernel_choices"] or {}
    counts: dict[str, Any] = {name: choices.get(name) for name in CHOICES}
    names = run.model.name, run.size.name, run.loss.name
    return Row(line, *names, run_id, number, round(seconds, 2), record["seconds_to"], **counts)


def _until_first_step(process: "subprocess.Popen[str]", line: str) -> float:
    """The time at which the process prints that its first step has ended."""
    assert process.stdout is not None
    lines: list[str] = []
    for printed in process.stdout:
        if printed.startswith(FIRST_STEP):
            return time.perf_counter()
        lines.append(f"  {printed.rstrip()}")
    say("\n".join(lines[-LAST_LINES:]))
    failure = LinrnnError(
        f"lines: the run of {line!r} ended with exit code {process.wait()} before the end of its first step",
        "mend what its last lines above name, and call the benchmark again",
    )
    failure.exit_code = max(process.returncode, 1)  # the run's own, which says what kind of failure it was
    raise failure


# ------------------------------------------------------------------------------------------------------- the page
def write_report(directory: Path) -> list[Path]:
    """Write first_step.md; returns its path.

    The runs of a configuration stand apart for each call of the benchmark: machines differ.
    """
    sections: dict[str, list[Row]] = {}
    for own in common.grouped(read_rows(directory), key=lambda row: (row.run, row.line)):
        found = estimate([row.seconds for row in own], ratios=False)
        figures = f"{found.value:.1f} s ({common.interval(found.low, found.high, '.1f')}), n = {found.n}"
        model = f"{model_in_words(own[0].model)} {own[0].size}, {own[0].loss}"
        sections[f"{own[0].run}: {model}: {figures}: `{own[0].line}`"] = own
    stages: common.Columns = {words: partial(Row.seconds_at, stage=stage) for stage, words in STAGES.items()}
    columns: common.Columns = {"run": "number:d", **stages, **{name: f"{name}:d" for name in CHOICES}}
    title = "Seconds to the end of the first step, without compiled kernels"
    return common.write_report(directory, "first_step", title, sections, columns)


if __name__ == "__main__":
    common.run("bench_first_step", __doc__, run_benchmark, write_report)
