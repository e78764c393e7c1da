"""The loss layer alone, forward and backward: all backends interleaved in one process, against one reference.

A GPU's clock drifts by 10-15 % from day to day, so a time alone means little. Every round runs every
entry once, in shuffled order, on the same tensors; an entry's figure is the median over rounds of its
time divided by the reference's time in that round, with a bootstrap interval. The reference is entered
twice under two names: a ratio inside the second one's interval is noise. Errors and memory are taken in
passes of their own. Each call starts with an idle device, so that times include the launches.
"""

import json
import random
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from linrnn.config import load_config
from linrnn.config.schema import BenchLossConfig, LossConfig
from linrnn.environment import describe_environment
from linrnn.errors import ConfigError, LinrnnError, OutOfMemoryError, UnsupportedError
from linrnn.loss_problems import (
    KINDS,
    Problem,
    Shape,
    Truth,
    make_problem,
    parse_shape,
    relative_error,
    truth_of,
)
from linrnn.losses import LossBackend, build_loss
from linrnn.runtime import resolve_device

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_MIB = 2**20
_PRODUCT_ROWS = 4096
_ROTATING_PROBLEMS = 4
_RESAMPLES = 2000
_CLOCK_EVERY = 10  # rounds
_CLOCKS = {
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "watts": "power.draw",
    "celsius": "temperature.gpu",
}


@dataclass
class Row:
    """One backend on one problem: what the JSON file holds.

    Times are medians in ms; `ratio` is to the reference, `products` to one N x D x V product, both by round.
    `extra_mib` is the peak above what was allocated before the call, the two gradients included, and
    `beyond_gradients_mib` without them (null on a CPU). Errors are relative to fp64 on the same tensors.
    """

    shape: str
    n: int
    d: int
    v: int
    logits: str
    backend: str
    status: str = "ok"  # ok | unsupported | out_of_memory | failed
    reason: str = ""
    forward_ms: float | None = None
    backward_ms: float | None = None
    total_ms: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    products: float | None = None
    extra_mib: float | None = None
    beyond_gradients_mib: float | None = None
    loss_nats: float | None = None
    loss_error: float | None = None
    hidden_gradient_error: float | None = None
    weight_gradient_error: float | None = None


@dataclass
class Entry:
    """A backend in the running, and its times in ms, one a round."""

    row: Row
    loss: LossBackend
    forward_ms: list[float] = field(default_factory=list)
    backward_ms: list[float] = field(default_factory=list)

    def total_ms(self) -> np.ndarray:
        return np.add(self.forward_ms, self.backward_ms)


def run_benchmark(config: BenchLossConfig, command: str, say: Callable[[str], None]) -> list[Row]:
    """Measure every backend on every shape and kind of logits; write `config.output` after each.

    Args:
        config: see configs/bench_loss.yaml.
        command: the command line, for the record.
        say: shows text to the user.

    Raises:
        ConfigError: an unknown shape, kind of logits, backend or option.
        UnsupportedError, OutOfMemoryError: the reference cannot run; of others, the row gives the reason.
    """
    shapes = [parse_shape(text) for text in config.shapes]
    if unknown := sorted(set(config.logits) - set(KINDS)):
        raise ConfigError(f"logits: {', '.join(unknown)} is no kind of logits", f"choose from {', '.join(KINDS)}")
    losses = {text: parse_loss(text) for text in (config.reference, *config.backends)}
    again = f"{config.reference} (again)"
    losses = {config.reference: losses[config.reference], again: losses[config.reference]} | losses
    device = resolve_device(config.device)

    record = {"command": command, "config": asdict(config), "environment": describe_environment()}
    rows: list[Row] = []
    clocks: list[dict[str, Any]] = []
    for shape in shapes:
        for kind in config.logits:
            say(f"{shape.name} ({shape.n} x {shape.d} x {shape.v}), {kind}, {config.dtype}, {device.type}")
            measured, readings = _measure(config, losses, shape, kind, device)
            rows += measured
            clocks += readings
            _write(Path(config.output), record | {"rows": [asdict(row) for row in rows], "clocks": clocks})
            say(table(measured))
    return rows


def parse_loss(text: str) -> LossConfig:
    """`name [option=value …]`, as in `liger accumulate=fp32`."""
    name, *options = text.split()
    return load_config([f"loss={name}", *(f"loss.{option}" for option in options)]).loss


def _measure(
    config: BenchLossConfig, losses: dict[str, LossConfig], shape: Shape, kind: str, device: torch.device
) -> tuple[list[Row], list[dict[str, Any]]]:
    """All backends on one problem: errors (which warms up), memory, then the timed rounds."""
    torch._dynamo.reset()  # a compiled graph for this shape alone, far from the recompile limit
    torch.cuda.empty_cache()
    dtype = _DTYPES[config.dtype]
    problem = make_problem(shape, kind, dtype, device, config.seed)
    truth = truth_of(problem)
    rows, entries = [], []
    for label, loss_config in losses.items():
        row = Row(shape.name, shape.n, shape.d, shape.v, kind, label)
        rows.append(row)
        try:
            entry = Entry(row, build_loss(loss_config, device=device, dtype=dtype))
            _record_errors(entry, problem, truth, config.warmup)
        except Exception as error:
            _refuse(row, error, is_reference=label == config.reference)
        else:
            entries.append(entry)
    del truth
    for entry in entries:
        _record_memory(entry, problem)
    problems = [problem]
    if _fits_cache(problem):
        seeds = range(config.seed + 1, config.seed + _ROTATING_PROBLEMS)
        problems += [make_problem(shape, kind, dtype, device, seed) for seed in seeds]
    product_ms, clocks = _run_rounds(entries, problems, config)
    for entry in entries:
        _record_times(entry, entries[0], product_ms, config.seed)
    return rows, [{"shape": shape.name, "logits": kind, **reading} for reading in clocks]


def _refuse(row: Row, error: Exception, is_reference: bool) -> None:
    """Turn a backend's failure into its row; the reference's ends the benchmark."""
    out_of_memory = isinstance(error, torch.OutOfMemoryError)
    if is_reference and out_of_memory:
        raise OutOfMemoryError(
            f"the reference {row.backend} runs out of memory at {row.shape}",
            "choose a smaller shape, or a leaner reference=…",
        ) from error
    if is_reference:
        raise error
    row.status = "failed"
    if isinstance(error, UnsupportedError):
        row.status = "unsupported"
    elif out_of_memory:
        row.status = "out_of_memory"
    text = error.cause if isinstance(error, LinrnnError) else f"{type(error).__name__}: {error}"
    row.reason = text.strip().splitlines()[0]


# ----------------------------------------------------------------------------------------- one call, measured
class _Stamp:
    """A moment: a CUDA event on a GPU, the host's clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self.event is None:
            self.seconds = time.perf_counter()
        else:
            self.event.record()

    def ms_until(self, later: "_Stamp") -> float:
        if self.event is None or later.event is None:
            return 1e3 * (later.seconds - self.seconds)
        return self.event.elapsed_time(later.event)


def _call(loss: LossBackend, problem: Problem) -> tuple[torch.Tensor, float, float]:
    """Forward and backward of the mean loss, from an idle device: (loss, forward ms, backward ms)."""
    problem.clear_gradients()
    device = problem.labels_N.device
    _synchronize(device)
    begin = _Stamp(device)
    mean_nats = loss(problem.hidden_ND, problem.weight_VD, problem.labels_N).sum_nats / len(problem.labels_N)
    middle = _Stamp(device)
    mean_nats.backward()
    end = _Stamp(device)
    _synchronize(device)
    return mean_nats.detach(), begin.ms_until(middle), middle.ms_until(end)


def _product_ms(problem: Problem, buffer: torch.Tensor) -> float:
    """One N x D x V product, the unit of `Row.products`: blocks of 4096 rows into one buffer."""
    device = problem.labels_N.device
    _synchronize(device)
    begin = _Stamp(device)
    with torch.no_grad():
        for block in problem.hidden_ND.split(_PRODUCT_ROWS):
            torch.mm(block, problem.weight_VD.T, out=buffer[: len(block)])
    end = _Stamp(device)
    _synchronize(device)
    return begin.ms_until(end)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _read_clocks(device: torch.device) -> dict[str, float] | None:
    """Clocks, power and temperature of the GPU; None on a CPU or where nvidia-smi does not answer."""
    if device.type != "cuda":
        return None
    card = f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"
    query = ["nvidia-smi", card, f"--query-gpu={','.join(_CLOCKS.values())}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
        return dict(zip(_CLOCKS, map(float, answer.split(",")), strict=True))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _fits_cache(problem: Problem) -> bool:
    """Whether the tensors may still lie in a GPU's L2 cache when the next call starts."""
    device = problem.labels_N.device
    return device.type == "cuda" and problem.gradient_bytes < 2 * torch.cuda.get_device_properties(device).L2_cache_size


# ------------------------------------------------------------------------------------------------- the passes
def _record_errors(entry: Entry, problem: Problem, truth: Truth, warmup: int) -> None:
    """Warm up (compiling and tuning happen here) and compare the last call with the truth."""
    for _ in range(warmup):
        loss, _, _ = _call(entry.loss, problem)
    assert problem.hidden_ND.grad is not None
    assert problem.weight_VD.grad is not None
    row = entry.row
    row.loss_nats = loss.item()
    row.loss_error = abs(row.loss_nats - truth.loss) / truth.loss
    row.hidden_gradient_error = relative_error(problem.hidden_ND.grad, truth.hidden_ND)
    row.weight_gradient_error = relative_error(problem.weight_VD.grad, truth.weight_VD)


def _record_memory(entry: Entry, problem: Problem) -> None:
    device = problem.labels_N.device
    if device.type != "cuda":
        return
    problem.clear_gradients()
    _synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    _call(entry.loss, problem)
    extra = torch.cuda.max_memory_allocated(device) - before
    entry.row.extra_mib = extra / _MIB
    entry.row.beyond_gradients_mib = (extra - problem.gradient_bytes) / _MIB


def _run_rounds(
    entries: list[Entry], problems: list[Problem], config: BenchLossConfig
) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """Every entry and the product once a round, in shuffled order: (ms of the product, clock readings)."""
    shuffle = random.Random(config.seed).shuffle
    first = problems[0]
    buffer = first.hidden_ND.new_empty(min(_PRODUCT_ROWS, len(first.labels_N)), len(first.weight_VD))
    product_ms, clocks = [], []
    for index in range(config.rounds):
        if index % _CLOCK_EVERY == 0 and (reading := _read_clocks(first.labels_N.device)):
            clocks.append({"round": index, **reading})
        problem = problems[index % len(problems)]
        order: list[Entry | None] = [*entries, None]
        shuffle(order)
        for entry in order:
            if entry is None:
                product_ms.append(_product_ms(problem, buffer))
                continue
            _, forward_ms, backward_ms = _call(entry.loss, problem)
            entry.forward_ms.append(forward_ms)
            entry.backward_ms.append(backward_ms)
        problem.clear_gradients()
    return np.array(product_ms), clocks


def _record_times(entry: Entry, reference: Entry, product_ms: np.ndarray, seed: int) -> None:
    row, ratios = entry.row, entry.total_ms() / reference.total_ms()
    row.forward_ms = float(np.median(entry.forward_ms))
    row.backward_ms = float(np.median(entry.backward_ms))
    row.total_ms = float(np.median(entry.total_ms()))
    row.ratio = float(np.median(ratios))
    row.ratio_low, row.ratio_high = bootstrap_interval(ratios, seed)
    row.products = float(np.median(entry.total_ms() / product_ms))


def bootstrap_interval(values: np.ndarray, seed: int) -> tuple[float, float]:
    """The 95 % bootstrap interval of the median."""
    samples = np.random.default_rng(seed).choice(values, size=(_RESAMPLES, len(values)))
    low, high = np.quantile(np.median(samples, axis=1), (0.025, 0.975))
    return float(low), float(high)


# ----------------------------------------------------------------------------------------------------- report
_COLUMNS: dict[str, Callable[[Row], str]] = {
    "backend": lambda row: row.backend,
    "ms": lambda row: _number(row.total_ms, ".2f"),
    "forward": lambda row: _number(row.forward_ms, ".2f"),
    "backward": lambda row: _number(row.backward_ms, ".2f"),
    "ratio": lambda row: _number(row.ratio, ".3f"),
    "95 %": lambda row: f"{_number(row.ratio_low, '.3f')}-{_number(row.ratio_high, '.3f')}",
    "products": lambda row: _number(row.products, ".2f"),
    "extra MiB": lambda row: _number(row.extra_mib, ".0f"),
    "beyond grads": lambda row: _number(row.beyond_gradients_mib, ".0f"),
    "loss": lambda row: _number(row.loss_nats, ".4f"),
    "loss err": lambda row: _number(row.loss_error, ".1e"),
    "dE err": lambda row: _number(row.hidden_gradient_error, ".1e"),
    "dC err": lambda row: _number(row.weight_gradient_error, ".1e"),
}


def table(rows: list[Row]) -> str:
    """Rows of one problem as aligned text; those that did not run stand below with the reason."""
    ran = [row for row in rows if row.status == "ok"]
    cells = [list(_COLUMNS), *([column(row) for column in _COLUMNS.values()] for row in ran)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(_COLUMNS))]
    lines = [
        "  ".join([line[0].ljust(widths[0]), *(text.rjust(w) for text, w in zip(line[1:], widths[1:], strict=True))])
        for line in cells
    ]
    lines += [f"{row.backend.ljust(widths[0])}  {row.status}: {row.reason}" for row in rows if row not in ran]
    return "\n".join(lines) + "\n"


def _number(value: float | None, style: str) -> str:
    return "-" if value is None else format(value, style)


def _write(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
