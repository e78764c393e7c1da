"""Show which kernels the output layer spends its time in, and what the GPU waits for: `python benchmarks/kernels.py`.

Each loss runs some steps under torch's profiler, and as many without it. A kernel's time is divided by one matmul: a
third of cuBLAS's three matmuls of the same shape, timed in the same process. Kernels that run side by side both count,
so their sum may exceed the step. The step begins on an idle GPU. The CPU's time is what a call takes until it returns,
without waiting for the GPU. The loss `nothing` is an autograd function that computes nothing: the lower bound of the
CPU's time.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
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
from linrnn.core.output import say
from linrnn.losses import build_loss
from linrnn.runs.environment import command_line
from linrnn.training.runtime import resolve_device, synchronize

STEPS = 10  # of each loss, profiled and timed
WARMUP = 3
LONGEST_NAME = 72  # characters of a kernel's name
STEP, HOST = "(step)", ("(host, forward)", "(host, backward)")


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
class Row:
    """One kernel of one loss. `launches` and `ms` are those of one step.

    The kernel `(step)` is the whole step from an idle GPU, and the HOST ones are what the host takes to launch each
    pass; medians of STEPS.
    """

    shape: str
    logits: str
    loss: str
    run: str  # id in runs.jsonl
    kernel: str
    launches: float
    ms: float
    products: float
    status: str = "ok"

    @property
    def problem(self) -> tuple[str, str, str]:
        return self.shape, self.logits, self.loss


def measure(config: BenchConfig, device: torch.device, run: str) -> Iterator[list[Row]]:
    """The rows of every shape and loss: the step, the host's two times, then the kernels, the longest first."""
    settings = [(name, common.parse_loss(name)) for name in config.losses]
    for shape in map(parse_shape, config.shapes):
        torch._dynamo.reset()  # compiled graphs for this shape alone
        problem = make_problem(shape, config.logits, torch.bfloat16, device, seed=0)
        three = problems.three_products(problem)
        for _ in range(WARMUP):
            three()
        product_ms = median(problems.time_ms(three, device) for _ in range(STEPS)) / 3
        for name, loss_config in settings:
            loss = build_loss(loss_config, device=device, dtype=torch.bfloat16)
            for _ in range(WARMUP):
                problems.step(loss, problem)
            step_ms = median(problems.time_step_ms(loss, problem)[0] for _ in range(STEPS))
            passes = zip(*(problems.host_ms(loss, problem) for _ in range(STEPS)), strict=True)
            whole = zip((STEP, *HOST), (1, 1, 1), (step_ms, *map(median, passes)), strict=True)
            yield [
                Row(shape.name, config.logits, name, run, kernel, launches, ms, ms / product_ms)
                for kernel, launches, ms in [*whole, *_kernels(loss, problem, device)]
            ]
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


COLUMNS: common.Columns = {
    "kernel": lambda row: f"`{row.kernel[:LONGEST_NAME]}`",
    "launches": "launches:g",
    "ms": "ms:.3f",
    "products": "products:.3f",
}


def write_report(directory: Path) -> list[Path]:
    """Write kernels.md: a table for each shape and loss, without kernels below a thousandth of a product."""
    rows = common.last_rows(directory, Row, lambda row: (row.problem, row.kernel))
    last = {row.problem: row.run for row in rows}  # an earlier version's kernels have other names
    sections = {}
    for own in common.grouped([row for row in rows if row.run == last[row.problem]], lambda row: row.problem):
        busy = sum(row.products for row in own[3:])
        heading = f"{', '.join(own[0].problem)}: the kernels take {busy:.2f} products"
        sections[heading] = [row for row in own if row.products >= 0.001]
    return common.write_report(directory, "kernels", "Where the output layer's time goes", sections, COLUMNS)


def main(config: BenchConfig) -> None:
    directory = common.results_directory(config, "bench_kernels")
    if config.measure:
        run = common.begin_run(directory, command_line(), config)["id"]
        for rows in measure(config, resolve_device(config.device), run):
            common.append_rows(directory, rows)
            for row in rows[:3]:
                say(f"{row.shape}, {row.loss} {row.kernel}: {row.ms:.2f} ms, {row.products:.2f} products")
    common.say_written(write_report(directory))


if __name__ == "__main__":
    cli.run(main, "kernels", __doc__)
