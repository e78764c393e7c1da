"""Where the time of the loss layer goes: its kernels on the GPU, and what the GPU waits for.

Each loss runs some steps under torch's profiler, and as many without it. A kernel's time is divided by one product: a
third of cuBLAS's three products of the same shape, timed in the same process. Kernels that run side by side both count,
so their sum may exceed the step. The step begins on an idle GPU. The host's time is what a call takes until it returns,
without waiting for the GPU. The loss `nothing` is an autograd function that computes nothing: the floor of the host's
time.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from linrnn.bench.loss import timing
from linrnn.bench.loss.problems import make_problem, parse_shape
from linrnn.bench.loss.sets import parse_loss
from linrnn.core.files import write_text
from linrnn.core.tables import Table
from linrnn.losses import build_loss
from linrnn.runs.environment import commit_in_words
from linrnn.training.runtime import synchronize

STEPS = 10  # of each loss, profiled and timed
WARMUP = 3
LONGEST_NAME = 72  # characters of a kernel's name
STEP, HOST = "(step)", ("(host, forward)", "(host, backward)")


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


def profiled(shapes: Sequence[str], losses: Sequence[str], logits: str, device: torch.device) -> Iterator[KernelRow]:
    """The rows of every shape and loss: the step, the host's two times, then the kernels, the longest first.

    Raises:
        ConfigError: an unknown shape, loss or option.
    """
    settings = [(name, parse_loss(name)) for name in losses]
    for shape in map(parse_shape, shapes):
        torch._dynamo.reset()  # compiled graphs for this shape alone
        problem = make_problem(shape, logits, torch.bfloat16, device, seed=0)
        three = timing.three_products(problem)
        for _ in range(WARMUP):
            three()
        product_ms = median(timing.time_ms(three, device) for _ in range(STEPS)) / 3
        for name, config in settings:
            loss = build_loss(config, device=device, dtype=torch.bfloat16)
            for _ in range(WARMUP):
                timing.step(loss, problem)
            step_ms = median(timing.time_step_ms(loss, problem)[0] for _ in range(STEPS))
            passes = zip(*(timing.host_ms(loss, problem) for _ in range(STEPS)), strict=True)
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
            timing.step(loss, problem)
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
    directory.mkdir(parents=True, exist_ok=True)
    paths = directory / "profile.jsonl", directory / "profile.md"
    lines = [json.dumps(run), *(json.dumps(asdict(row)) for row in rows)]
    write_text(paths[0], "\n".join(lines) + "\n")
    write_text(paths[1], page(rows, run, directory.name))
    return list(paths)


def page(rows: Sequence[KernelRow], run: dict[str, Any], device: str) -> str:
    """The rows as tables, one for each shape and loss."""
    lines = [f"# Where the loss layer's time goes, {device}", "", *(__doc__ or "").strip().splitlines()[2:], ""]
    for shape, logits, loss in dict.fromkeys((row.shape, row.logits, row.loss) for row in rows):
        own = [row for row in rows if (row.shape, row.logits, row.loss) == (shape, logits, loss)]
        (step, forward, backward), kernels = own[:3], own[3:]
        busy = sum(row.products for row in kernels)
        cells = [
            (f"`{row.kernel[:LONGEST_NAME]}`", f"{row.launches:g}", f"{row.ms:.3f}", f"{row.products:.3f}")
            for row in kernels
            if row.products >= 0.001
        ]
        lines += [
            f"**{shape}, {logits}, {loss}**: a step takes {step.ms:.2f} ms, {step.products:.2f} products; its kernels "
            f"{busy:.2f}. The host takes {forward.ms:.2f} ms for the forward and {backward.ms:.2f} ms for the backward "
            "pass.", "",
            *Table(("kernel", "launches", "ms", "products"), cells, frozenset({"kernel"})).markdown(), "",
        ]  # fmt: skip
    environment = run["environment"]
    versions = ", ".join(f"{name} {environment['packages'][name]}" for name in ("torch", "triton"))
    commit = commit_in_words(environment["git"])
    return "\n".join([*lines, f"`{run['command']}`: commit {commit}, {versions}, {STEPS} steps each", ""])
