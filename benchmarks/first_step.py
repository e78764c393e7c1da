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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.common import Column, Point
from linrnn.config import CONFIG_DIR, cli, last_of_each, load_config
from linrnn.config.compose import add_command
from linrnn.config.schema import Config, option
from linrnn.core.errors import LinrnnError
from linrnn.core.output import say
from linrnn.core.plot_style import save
from linrnn.core.tables import Table, show
from linrnn.data import prepare
from linrnn.models.facts import model_in_words
from linrnn.runs.directory import ENVIRONMENT
from linrnn.runs.environment import command_line
from linrnn.runs.intervals import AT_MOST, LEAST_PAIRS, Estimate, answer, estimate
from linrnn.runs.provenance import read_processes

TRAIN = CONFIG_DIR.parent / "train.py"
FIRST_STEP = "step 1 took "  # how the line begins that train.py prints after its first step
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")  # environment variables: where compiled kernels are kept
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
    repeats: int = option(5, "runs of every line, the lines in turn; from 5 on the interval decides", minimum=1)
    limit_seconds: float = option(
        30.0, "s that a first step may take: what a line's interval is held against; > 0", minimum=1e-3, maximum=1e8
    )


add_command("bench_first_step", BenchConfig)


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

    def at(self, stage: str) -> float | None:
        """Seconds from the start of the process to the end of a stage; None if the run has no such stage."""
        if stage not in self.seconds_to:
            return None
        return self.seconds - self.seconds_to["first_step"] + self.seconds_to[stage]


def read_rows(directory: Path) -> list[Row]:
    """All rows, in the order in which they were measured.

    Raises:
        DataError: nothing was measured, or the file is damaged.
    """
    return common.last_rows(directory, Row, key=lambda row: (row.run, row.number))


# ------------------------------------------------------------------------------------------------------ measuring
def run_benchmark(config: BenchConfig, command: str, say: common.Say) -> None:
    """Measure every line `repeats` times. A run's row is written as soon as its first step has ended.

    Args:
        command: the command line, for the record.

    Raises:
        ConfigError: a line is no configuration of train.py.
        LinrnnError: a run ended before the end of its first step.
    """
    runs = {line: load_config([*line.split(), f"device={config.device}"]) for line in config.lines}
    for run in runs.values():
        prepare(run.data)
    directory = common.results_directory(config, "bench_first_step")
    run_id = common.begin_run(directory, command, config)["id"]
    planned = list(runs.items()) * config.repeats
    for number, (line, run) in enumerate(planned, start=1):
        row = _measure(line, run, run_id, number, say)
        common.append_rows(directory, [row])
        say(f"{number} of {len(planned)}, {run.model.name} {run.size.name}: first step after {row.seconds:.1f} s")


def _measure(line: str, run: Config, run_id: str, number: int, say: common.Say) -> Row:
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
    counts: dict[str, Any] = {name: choices.get(name) for name in ("stored", "near", "first", "tuned")}
    names = run.model.name, run.size.name, run.loss.name
    return Row(line, *names, run_id, number, round(seconds, 2), record["seconds_to"], **counts)


def _until_first_step(process: "subprocess.Popen[str]", line: str, say: common.Say) -> float:
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


# ------------------------------------------------------------------------------------------------------- the page
def write_report(directory: Path, limit_seconds: float) -> list[Path]:
    """Write first_step.md, and first_step.png; returns the paths of page and PNG.

    The runs of a line stand apart for each call of the benchmark: machines differ.

    Raises:
        DataError: nothing was measured, or a file is damaged.
    """
    rows = read_rows(directory)
    calls = [run["id"] for run in common.runs_of(directory, [row.run for row in rows])]
    groups = common.grouped(rows, key=lambda row: (row.run, row.line))
    page = [
        f"# Seconds to the end of the first step: {directory.name}", "",
        "![Seconds to the end of the first step](first_step.png)", "",
        "Every run is a `train.py` of its own, and finds no compiled kernel. All times count from the start of its "
        "process, in seconds. The data are prepared before. *call*: the place in the list of runs below. *90 %*: "
        f"Student's interval of the mean, which decides from n = {LEAST_PAIRS} on.", "",
    ]  # fmt: skip
    points: dict[str, list[Point]] = {}
    cells = []
    for own in groups:
        found, call = estimate([row.seconds for row in own], ratios=False), _call(own[0], calls)
        ends = "-" if found.low is None else f"{found.low:.1f} to {found.high:.1f}"
        verdict = f"**{_verdict(found, limit_seconds)}**"
        cells.append((_title(own[0]), call, found.n, f"{found.value:.1f}", ends, verdict, _choices(own)))
        point = Point(_title(own[0]), found.value, found.low, found.high, f"{found.value:.1f} s, n = {found.n}")
        points.setdefault(f"call {call}", []).append(point)
    heads = ("line", "call", "n", "seconds, median", "90 %", f"at most {limit_seconds:g} s", "kernel choices")
    stages = [Column("line", _title), Column("call", lambda row: _call(row, calls)), Column("run", "number:d")]
    stages += [Column(words, _end_of(stage)) for stage, words in STAGES.items()]
    page += [
        *Table(heads, cells, words=("line", *heads[5:])).markdown(), "",
        "## Every run", "", "The end of each stage. Weights are drawn while kernels are compiled.", "",
        *common.table(stages, rows), "",
        *(f"* {_title(own[0])}: `{own[0].line}`" for own in common.grouped(rows, key=lambda row: row.line)), "",
    ]  # fmt: skip
    axis = f"seconds from the command, median; bars: 90 % intervals of the mean; line: {limit_seconds:g} s, as asked"
    figure = common.forest(points, "The end of the first step, without compiled kernels", axis, limit_seconds)
    path = common.write_page(directory / "first_step.md", page, directory, calls)
    return [path, save(figure, directory / "first_step.png")]


def _call(row: Row, calls: Sequence[str]) -> str:
    return str(calls.index(row.run) + 1) if row.run in calls else "-"


def _title(row: Row) -> str:
    """Model, size and loss, and the last words of further keys: `rwkv7 350m, cce_kahan, kernel_choices=first`."""
    told = ("model=", "model.config=", "size=", "loss=", "data", "trainer.batch_size=", "trainer.seq_len=")
    words = row.line.split()
    of_fla = [word.removeprefix("model.config=") for word in words if word.startswith("model.config=")]
    rest = [word.removeprefix("trainer.").removeprefix("model.options.") for word in words if not word.startswith(told)]
    return ", ".join([f"{model_in_words((of_fla or [row.model])[0])} {row.size}, {row.loss}", *rest])


def _end_of(stage: str) -> Callable[[Row], str]:
    return lambda row: show(row.at(stage), ".1f")


def _verdict(found: Estimate, limit_seconds: float) -> str:
    if found.low is None or found.high is None or found.n < LEAST_PAIRS:
        return "undecided"
    return {True: "met", False: "missed", None: "undecided"}[answer(found.low, found.high, AT_MOST, limit_seconds)]


def _choices(rows: Sequence[Row]) -> str:
    """How many kernels had a stored choice, how many ran untuned; the largest number that a run tuned."""
    if rows[0].stored is None:
        return "none"
    tuned = max(row.tuned or 0 for row in rows)
    first = f"{rows[0].first} first, " if rows[0].first else ""
    return f"{rows[0].stored} stored, {rows[0].near} near, {first}{tuned} tuned"


def main(config: BenchConfig) -> None:
    if config.measure:
        run_benchmark(config, command_line(), say)
    directory = common.results_directory(config, "bench_first_step")
    say("wrote " + ", ".join(str(path) for path in write_report(directory, config.limit_seconds)))


if __name__ == "__main__":
    cli.run(main, "bench_first_step", __doc__)
