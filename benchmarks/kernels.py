"""Show which kernels the output layer spends its time in, and what the GPU waits for: `python benchmarks/kernels.py`.

Each loss runs some steps under torch's profiler, and as many without it. A kernel's time is divided by one matmul: a
third of cuBLAS's three matmuls of the same shape, timed in the same process. Kernels that run side by side both count,
so their sum may exceed the step. The step begins on an idle GPU. The CPU's time is what a call takes until it returns,
without waiting for the GPU. The loss `nothing` is an autograd function that computes nothing: the lower bound of the
CPU's time. Rows replace earlier ones.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common, problems
from benchmarks.problems import KINDS, make_problem, parse_shape
from linrnn.config import cli
from linrnn.config.compose import add_command
from linrnn.config.schema import option
from linrnn.core.errors import DataError
from linrnn.core.files import write_text
from linrnn.core.output import say
from linrnn.losses import build_loss
from linrnn.runs.environment import command_line, describe_environment
from linrnn.training.runtime import resolve_device, synchronize

STEPS = 10  # of each loss, profiled and timed
WARMUP = 3
LONGEST_NAME = 72  # characters of a kernel's name
STEP, HOST = "(step)", ("(host, forward)", "(host, backward)")
FILE = "profile.jsonl"


@dataclass
class BenchConfig(common.Keys):
    """Keys of the command line."""

    shapes: list[str] = option(
        [
            *("4096x7168x129280", "4096x8192x128256", "3001x2880x201088", "2048x2048x32000", "1536x8192x32000"),
            *("512x4096x128256", "1024x2048x50304", "mve", "llama_1b3"),
        ],
        "where cce_kahan misses its targets, and one where it meets them",
    )
    losses: list[str] = option(
        ["compiled", "cce_kahan", "cce_kahan workspace_mib=256", "nothing"], "with options as in benchmarks/loss.py"
    )
    logits: str = option("peaked", " | ".join(KINDS), choices=KINDS)


add_command("kernels", BenchConfig)


@dataclass(frozen=True)
class KernelRow:
    """One kernel of one loss. `launches` and `ms` are those of one step.

    The kernel `(step)` is the whole step from an idle GPU, and the HOST ones are what the host takes to launch each
    pass; medians of STEPS.
    """

    shape: str
    logits: str
    loss: str
    kernel: str
    launches: float
    ms: float
    products: float


def read(path: Path) -> tuple[dict[str, Any], list[KernelRow]]:
    """The run in the first line of a profile.jsonl, and its rows."""
    try:
        run, *rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        return run, [KernelRow(**row) for row in rows]
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} cannot be read as a profile ({error})", "measure it: measure=true") from error


def profiled(shapes: Sequence[str], losses: Sequence[str], logits: str, device: torch.device) -> Iterator[KernelRow]:
    """The rows of every shape and loss: the step, the host's two times, then the kernels, the longest first."""
    settings = [(name, common.parse_loss(name)) for name in losses]
    for shape in map(parse_shape, shapes):
        torch._dynamo.reset()  # compiled graphs for this shape alone
        problem = make_problem(shape, logits, torch.bfloat16, device, seed=0)
        three = problems.three_products(problem)
        for _ in range(WARMUP):
            three()
        product_ms = median(problems.time_ms(three, device) for _ in range(STEPS)) / 3
        for name, config in settings:
            loss = build_loss(config, device=device, dtype=torch.bfloat16)
            for _ in range(WARMUP):
                problems.step(loss, problem)
            step_ms = median(problems.time_step_ms(loss, problem)[0] for _ in range(STEPS))
            passes = zip(*(problems.host_ms(loss, problem) for _ in range(STEPS)), strict=True)
            for kernel, ms in zip((STEP, *HOST), (step_ms, *map(median, passes)), strict=True):
                yield KernelRow(shape.name, logits, name, kernel, 1, ms, ms / product_ms)
            for kernel, launches, ms in _kernels(loss, problem, device):
                yield KernelRow(shape.name, logits, name, kernel, launches, ms, ms / product_ms)
            problem.clear_gradients()


def _kernels(loss: Any, problem: Any, device: torch.device) -> list[tuple[str, float, float]]:
    """(name, launches, ms) of one step's kernels, the longest first. On a CPU, operators take the kernels' place."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        for _ in range(STEPS):
            problems.step(loss, problem)
        synchronize(device)
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    found = [
        (event.key, event.count / STEPS, (event.self_device_time_total if on_gpu else event.self_cpu_time_total))
        for event in seen.key_averages()
        if event.device_type == kind
    ]
    return sorted(((name, count, us / STEPS / 1e3) for name, count, us in found if us), key=lambda row: -row[2])


def write(directory: Path, rows: Sequence[KernelRow], run: dict[str, Any]) -> list[Path]:
    """Write profile.jsonl (the run in the first line, then a row a line) and profile.md."""
    lines = [json.dumps(run), *(json.dumps(asdict(row)) for row in rows)]
    write_text(directory / FILE, "\n".join(lines) + "\n")
    write_text(directory / "profile.md", "\n".join([*page(rows, directory.name), *common.runs_section([run])]))
    return [directory / FILE, directory / "profile.md"]


COLUMNS: common.Columns = {
    "kernel": lambda row: f"`{row.kernel[:LONGEST_NAME]}`",
    "launches": "launches:g",
    "ms": "ms:.3f",
    "products": "products:.3f",
}


def page(rows: Sequence[KernelRow], device: str) -> list[str]:
    """A table for each shape and loss, without kernels below a thousandth of a product."""
    lines = [f"# Where the output layer's time goes, {device}", ""]
    for own in common.grouped(rows, key=lambda row: (row.shape, row.logits, row.loss)):
        busy, shown = sum(row.products for row in own[3:]), [row for row in own if row.products >= 0.001]
        heading = f"## {own[0].shape}, {own[0].logits}, {own[0].loss}: the kernels take {busy:.2f} products"
        lines += [heading, "", *common.table(COLUMNS, shown), ""]
    return lines


def main(config: BenchConfig) -> None:
    directory, rows = common.results_directory(config, "bench_loss"), list[KernelRow]()
    run: dict[str, Any] = {"command": command_line(), "environment": describe_environment()}
    try:
        if not config.measure:
            run, rows = read(directory / FILE)
            return
        for row in profiled(config.shapes, config.losses, config.logits, resolve_device(config.device)):
            rows.append(row)
            if row.kernel in (STEP, *HOST):
                say(f"{row.shape}, {row.loss} {row.kernel}: {row.ms:.2f} ms, {row.products:.2f} products")
    finally:  # a crash of the device loses no row
        if rows:
            directory.mkdir(parents=True, exist_ok=True)
            say("wrote " + ", ".join(str(path) for path in write(directory, rows, run)))


if __name__ == "__main__":
    cli.run(main, "kernels", __doc__)
