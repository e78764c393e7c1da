"""Hold two versions of the kernels beside each other, in one process: `python benchmarks/before_after.py before=PATH`.

PATH is another checkout, as `git worktree add PATH COMMIT` makes it. Both versions take the same tensors, in shuffled
order. A row says whether loss and gradients are equal bit by bit, and what this version takes in units of the other.
"""

import importlib
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import cce_kernels
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.problems import KINDS, Problem, extra_mib, make_problem, parse_shape, time_ms
from linrnn.config.schema import COMMANDS, option
from linrnn.core.errors import ConfigError
from linrnn.core.output import say

BEFORE, NOW = "before", "now"
OPTIONS: dict[str, dict[str, Any]] = {
    "exact": {}, "256 MiB": {"workspace_mib": 256}, "filter": {"preset": "cce_filter"},
    "metrics": {"return_metrics": True}, "4 targets": {},
}  # fmt: skip
SEED = 0


@dataclass
class BenchConfig(common.Keys):
    """Keys of the command line."""

    before: str = option("before", "another checkout of this repository")
    shapes: list[str] = option(["llama_1b3", "mve", "2048x2048x32000"], "NxDxV, or names of benchmarks/loss.py's")
    options: list[str] = option(["exact", "256 MiB", "filter"], f"of {', '.join(OPTIONS)}")
    logits: str = option("peaked", " | ".join(KINDS), choices=KINDS)
    rounds: int = option(10, "timed calls of each version", minimum=2)
    warmup: int = option(5, "calls of each version before the timed ones", minimum=4)


COMMANDS["bench_before_after"] = BenchConfig


@dataclass
class Row:
    """Forward and backward pass of one version."""

    shape: str
    options: str
    label: str  # before | now
    run: str  # id in runs.jsonl
    ms: float  # median
    ratio: float  # to `before` in the same round, median
    ratio_low: float  # ends of the bootstrap interval of 95 %
    ratio_high: float
    equal: bool  # loss and gradients have the bits of `before`
    mib: float | None  # beyond inputs and gradients
    rounds_ms: list[float] = field(default_factory=list)
    status: str = "ok"


# -------------------------------------------------------------------------------------------------------- measuring
def load(checkout: Path, folder: Path) -> ModuleType:
    """The kernels of another checkout, as a package of another name: torch knows operators by their name."""
    source, name = checkout / "kernels" / "cce_kernels", f"cce_kernels_{folder.name}"
    if not source.is_dir():
        raise ConfigError(f"before: {source} does not exist", "git worktree add PATH COMMIT, then before=PATH")
    shutil.copytree(source, folder / name)
    for path in (folder / name).rglob("*.py"):
        path.write_text(path.read_text(encoding="utf-8").replace("cce_kernels", name), encoding="utf-8")
    sys.path.insert(0, str(folder))
    return importlib.import_module(name)


def measure(config: BenchConfig, before: ModuleType, record: common.Record) -> Iterator[list[Row]]:
    """The rows of each shape and each of its options."""
    versions = {BEFORE: before, NOW: cce_kernels}
    shuffled = random.Random(SEED).sample
    for text in config.shapes:
        problem = make_problem(parse_shape(text), config.logits, torch.bfloat16, record.device, SEED)
        for options in config.options:
            arguments = targets_of(problem, options) | OPTIONS[options]
            calls = {name: partial(call, of, problem, arguments) for name, of in versions.items()}
            found = {}
            for name, action in calls.items():
                losses = [action() for _ in range(config.warmup)]
                found[name] = [losses[-1].clone(), *(x.clone() for x in problem.gradients())]
            equal = {name: all(map(torch.equal, found[BEFORE], tensors)) for name, tensors in found.items()}
            found.clear()
            ms: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(config.rounds):
                for name in shuffled([*calls], len(calls)):
                    ms[name].append(time_ms(calls[name], record.device))
            yield [
                Row(
                    text, options, name, record.id, median(ms[name]), *common.ratio_to(ms[name], ms[BEFORE], SEED),
                    equal[name], extra_mib(action, problem), ms[name],
                )
                for name, action in calls.items()
            ]  # fmt: skip
        del calls, action
        common.free(record.device)


def targets_of(problem: Problem, options: str) -> dict[str, Any]:
    """The labels. For `4 targets` three random tokens beside each, with weights that sum to 1."""
    labels = problem.labels_N
    if options != "4 targets":
        return {"targets": labels}
    generator = torch.Generator(labels.device).manual_seed(SEED)
    size = (len(labels), 4)
    targets = torch.randint(len(problem.weight_VD), size, generator=generator, device=labels.device)
    targets[:, 0] = labels
    targets[labels < 0] = -100
    weights = torch.rand(size, generator=generator, device=labels.device).softmax(1)
    return {"targets": targets, "target_weights": weights}


def call(of: ModuleType, problem: Problem, arguments: dict[str, Any]) -> torch.Tensor:
    problem.clear_gradients()
    found = of.linear_cross_entropy(problem.hidden_ND, problem.weight_VD, **arguments)
    loss = found[0] if isinstance(found, tuple) else found
    loss.backward()
    return loss.detach()


def run_benchmark(config: BenchConfig) -> None:
    """Measure every shape. Its rows are written as soon as it is done."""
    common.check_known("options", config.options, [*OPTIONS])
    with tempfile.TemporaryDirectory() as folder:
        before = load(Path(config.before), Path(folder))
        record = common.Record(config, "bench_before_after")
        for rows in measure(config, before, record):
            record.add(*rows)
            times = ", ".join(f"{row.label} {row.ms:.2f} ms ({row.ratio:.3f})" for row in rows)
            bits = "" if all(row.equal for row in rows) else ", bits differ"
            say(f"{rows[0].shape}, {rows[0].options}: {times}{bits}")


# --------------------------------------------------------------------------------------------------------- the page
COLUMNS: common.Columns = {
    "shape": lambda row: row.shape,
    "options": lambda row: row.options,
    "version": lambda row: row.label,
    "n": lambda row: len(row.rounds_ms),
    "ms": "ms:.2f",
    "/ before": "ratio:.3f",
    "95 %": lambda row: common.interval(row.ratio_low, row.ratio_high),
    "MiB": "mib:.0f",
    "equal bits": lambda row: "yes" if row.equal else "no",
}


def write_report(directory: Path) -> list[Path]:
    """Write before_after.md from the last row of every shape, options and version; returns its path."""
    rows = common.last_rows(directory, Row, key=lambda row: (row.shape, row.options, row.label))
    return common.write_report(directory, "before_after", "Two versions of the kernels", {"Calls": rows}, COLUMNS)


if __name__ == "__main__":
    common.run("bench_before_after", __doc__, run_benchmark, write_report)
