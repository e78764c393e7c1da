"""One problem of benchmarks/loss.py: every backend's errors and memory, then the timed rounds.

A GPU's clock drifts by 10-15 % from day to day, so a time alone means little. Every round runs every entry, one product
and the floor (three products) once, in shuffled order, on the same tensors. In each round an entry's time is divided by
that of torch.compile, of the product and of the floor. The entry's figure is the median of these ratios, with a
bootstrap interval. torch.compile runs twice under two names: a ratio inside the interval of the second entry is noise.
Errors and memory are measured in passes of their own. Rows are written after each backend's errors and again between
rounds, so a crash loses little.
"""

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import timing
from benchmarks.common import Say, status_and_reason
from benchmarks.loss_rows import BAR, BASELINE, EAGER, FLOOR, Row, merge_rows, rows_path
from benchmarks.problems import (
    DTYPES,
    Problem,
    Shape,
    Solution,
    TrainedTensors,
    fp32_logits_of,
    make_problem,
    relative_error,
    truth_of,
)
from linrnn.config.schema import LossConfig
from linrnn.core.errors import first_line
from linrnn.core.garbage import collect_after, collected_at_known_points
from linrnn.losses import LossBackend, build_loss
from linrnn.runs.environment import gpu_state
from linrnn.runs.intervals import interval_of_median
from linrnn.training.runtime import synchronize

_MIB = 2**20
_ROTATING_PROBLEMS = 4  # sets of inputs, used where one set would stay in the L2 cache
_SAVE_EVERY = 10  # rounds


@dataclass(frozen=True)
class Setting:
    """All problems that share shape and dtypes, and therefore the compiled graphs."""

    shape: Shape
    dtype: str
    gradients: str
    trained: TrainedTensors | None = None  # where logits are a trained model's

    def problem(self, kind: str, device: torch.device, seed: int, batch: int = 0) -> Problem:
        dtype, gradients = DTYPES[self.dtype], DTYPES[self.gradients]
        if self.trained is not None:
            return self.trained.problem(dtype, device, seed, gradients, batch)
        return make_problem(self.shape, kind, dtype, device, seed, gradients, batch)

    def row(self, kind: str, text: str, run: str = "", loss: LossConfig | None = None, of_set: str = "") -> Row:
        """An empty row. `text`: the backend as in the configuration."""
        shape, backend = self.shape, " ".join(word for word in text.split() if not word.startswith("workspace_mib="))
        return Row(
            shape.name, shape.n, shape.d, shape.v, self.dtype, self.gradients, kind, backend,
            getattr(loss, "workspace_mib", None),
            trained="" if self.trained is None else self.trained.origin, run=run, set=of_set,
        )  # fmt: skip


@dataclass
class Entry:
    """A backend, and its times in ms, one a round."""

    row: Row
    loss: LossBackend
    forward_ms: list[float] = field(default_factory=list)
    forward_backward_ms: list[float] = field(default_factory=list)
    backward_ms: list[float] = field(default_factory=list)
    graph_ms: list[float] = field(default_factory=list)


@dataclass
class Bench:
    """All backends on one problem: errors (which warms up) and memory of each, then the timed rounds."""

    config: Any  # benchmarks.loss.BenchConfig
    setting: Setting
    kind: str
    losses: dict[str, LossConfig]
    built: dict[str, LossBackend]  # what the other problems of this setting have built
    device: torch.device
    directory: Path
    run: str
    say: Say
    rows: list[Row] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)

    def measure(self) -> list[Row]:
        problem = self.setting.problem(self.kind, self.device, self.config.seed)
        truth = truth_of(problem)
        summed_VD = self._sum_over_batches(lambda part: truth_of(part).weight_VD)
        bar = self._bar(problem, truth, summed_VD)
        floor = self.setting.row(self.kind, FLOOR, self.run, of_set=self.config.set)
        self.rows.append(floor)
        for text, loss_config in self.losses.items():
            row = self.setting.row(self.kind, text, self.run, loss_config, self.config.set)
            self.rows.append(row)
            begin = time.perf_counter()
            try:
                new = text not in self.built
                if new:
                    self.built[text] = build_loss(loss_config, device=self.device, dtype=problem.compute_dtype)
                _record_errors(row, self.built[text], problem, truth, bar, self.config.warmup)
                row.first_call_s = row.first_call_s if new else None
                self._record_sum(row, partial(_weight_gradient, self.built[text]), summed_VD)
                _record_memory(row, self.built[text], problem)
            except Exception as error:  # a backend's failure is a result
                row.status, row.reason = status_and_reason(error)
            else:
                self.entries.append(Entry(row, self.built[text]))
                shape = self.setting.shape
                if remark := self.built[text].remark(shape.n, shape.d, shape.v, problem.compute_dtype):
                    self.say(f"  {remark}")
            problem.clear_gradients()
            done = row.reason or f"errors and memory in {time.perf_counter() - begin:.1f} s"
            self.say(f"  {row.label}: {done}")
            self._save()
        del truth, summed_VD
        self._run_rounds(self._rotation(problem), floor)
        for row in (floor, *(entry.row for entry in self.entries)):
            row.status = "ok" if row.rounds else row.status
        self._save()
        return self.rows

    def _bar(self, problem: Problem, truth: Solution, summed_VD: torch.Tensor | None) -> Row:
        """The row of true fp32 logits. It has errors only, because its time means nothing."""
        row = self.setting.row(self.kind, BAR, self.run, of_set=self.config.set)
        self.rows.append(row)
        _compare(row, fp32_logits_of(problem), truth)
        row.de_err_ratio = row.dc_err_ratio = 1.0
        self._record_sum(row, lambda part: fp32_logits_of(part).weight_VD, summed_VD)
        row.status = "ok"
        return row

    def _sum_over_batches(self, gradient: Callable[[Problem], torch.Tensor]) -> torch.Tensor | None:
        """Gradients of the weight, added up over the batches; None for a single batch."""
        if self.config.batches == 1:
            return None
        total = None
        for batch in range(self.config.batches):
            found = gradient(self.setting.problem(self.kind, self.device, self.config.seed, batch))
            wide = found if found.dtype == torch.float64 else found.float()
            total = wide if total is None else total.add_(wide)
        return total

    def _record_sum(
        self, row: Row, gradient: Callable[[Problem], torch.Tensor], summed_VD: torch.Tensor | None
    ) -> None:
        """The error of dC summed over batches. Noise averages out there, and a bias does not."""
        found = None if summed_VD is None else self._sum_over_batches(gradient)
        if found is not None and summed_VD is not None:
            row.batches, row.dc_sum_err = self.config.batches, relative_error(found, summed_VD)

    def _save(self) -> None:
        merge_rows(rows_path(self.directory), self.rows)

    def _rotation(self, problem: Problem) -> list[Problem]:
        seeds = range(self.config.seed + 1, self.config.seed + _ROTATING_PROBLEMS) if timing.fits_cache(problem) else []
        return [problem, *(self.setting.problem(self.kind, self.device, seed) for seed in seeds)]

    def _run_rounds(self, problems: list[Problem], floor: Row) -> None:
        """Once a round, in shuffled order: every entry's forward pass, step and graph, the product and the floor.

        Python's garbage is collected between them.
        """
        shuffle = random.Random(self.config.seed).shuffle
        product = [timing.one_product(problem) for problem in problems]
        try:
            three_products = [timing.three_products(problem) for problem in problems]
        except torch.OutOfMemoryError as error:  # N x V does not fit
            floor.status, floor.reason = status_and_reason(error)
            three_products = []
        graphs = {id(entry): self._graphs(entry, problems) for entry in self.entries}
        one_ms: list[float] = []
        three_ms: list[float] = []
        clocks: list[dict[str, Any]] = []
        begin = time.perf_counter()
        with collected_at_known_points():
            for index in range(self.config.rounds):
                turn = index % len(problems)
                problem = problems[turn]
                jobs: list[tuple[Entry | None, Callable[[], None]]] = [(None, self._job(one_ms, product[turn]))]
                if three_products:
                    jobs.append((None, self._job(three_ms, three_products[turn])))
                for entry in self.entries:
                    jobs.append((entry, self._job(entry.forward_ms, partial(timing.evaluate, entry.loss, problem))))
                    jobs.append((entry, partial(self._time_step, entry, problem)))
                    if graphs[id(entry)]:
                        jobs.append((entry, self._job(entry.graph_ms, graphs[id(entry)][turn].replay)))
                shuffle(jobs)
                for owner, job in jobs:
                    self._try(owner, job)
                    problem.clear_gradients()
                    collect_after(1)
                if (index + 1) % _SAVE_EVERY == 0 or index + 1 == self.config.rounds:
                    if reading := gpu_state(self.device):
                        clocks.append(reading)
                    self._record(floor, np.array(one_ms), np.array(three_ms), clocks)
                    left = (time.perf_counter() - begin) / (index + 1) * (self.config.rounds - index - 1)
                    self.say(f"  round {index + 1}/{self.config.rounds}, {left:.0f} s left")

    def _try(self, owner: Entry | None, job: Callable[[], None]) -> None:
        """Run a job. If it fails, its entry takes part in no later job, and its row says why."""
        if owner is not None and all(entry is not owner for entry in self.entries):
            return
        try:
            job()
        except Exception as error:
            if owner is None:
                raise
            owner.row.status, owner.row.reason = status_and_reason(error)
            self.entries = [entry for entry in self.entries if entry is not owner]
            self.say(f"  {owner.row.label}: {owner.row.reason}")

    def _record(self, floor: Row, one_ms: np.ndarray, three_ms: np.ndarray, clocks: list[dict[str, Any]]) -> None:
        """Write the rounds so far into all rows, and the rows to their file."""
        baseline, eager = self._entry(BASELINE), self._entry(EAGER)
        if len(three_ms):
            record_total(floor, three_ms, baseline, one_ms, three_ms, self.config.seed)
            _record_clocks(floor, clocks)
        for entry in self.entries:
            record_times(entry, baseline, eager, one_ms, three_ms, self.config.seed)
            _record_clocks(entry.row, clocks)
        self._save()

    def _job(self, times: list[float], action: Callable[[], object]) -> Callable[[], None]:
        return lambda: times.append(timing.time_ms(action, self.device))

    def _time_step(self, entry: Entry, problem: Problem) -> None:
        whole_ms, backward_ms = timing.time_step_ms(entry.loss, problem)
        entry.forward_backward_ms.append(whole_ms)
        entry.backward_ms.append(backward_ms)

    def _entry(self, backend: str) -> Entry | None:
        return next((entry for entry in self.entries if entry.row.backend == backend), None)

    def _graphs(self, entry: Entry, problems: list[Problem]) -> list[torch.cuda.CUDAGraph]:
        """The step of each set of inputs as a CUDA graph; empty for large inputs and backends without capture."""
        if len(problems) == 1 or not entry.loss.capturable:
            return []
        try:
            return [timing.capture(entry.loss, problem) for problem in problems]
        except RuntimeError as error:
            entry.row.reason = f"no CUDA graph: {first_line(error)}"
            return []


# ------------------------------------------------------------------------------------------------- filling a row
def _compare(row: Row, got: Solution, truth: Solution) -> None:
    row.loss_nats = got.loss
    row.loss_err = abs(got.loss - truth.loss) / truth.loss
    row.de_err = relative_error(got.hidden_ND, truth.hidden_ND)
    row.dc_err = relative_error(got.weight_VD, truth.weight_VD)


def _weight_gradient(loss: LossBackend, problem: Problem) -> torch.Tensor:
    timing.step(loss, problem)
    return problem.gradients()[1]


def _record_errors(row: Row, loss: LossBackend, problem: Problem, truth: Solution, bar: Row, warmup: int) -> None:
    """Warm up, compare a call with the truth, then a second call with the first. Kernels compile in the warm-up."""
    begin = time.perf_counter()
    for call in range(warmup):
        timing.step(loss, problem)
        timing.evaluate(loss, problem)
        synchronize(problem.device)
        row.first_call_s = row.first_call_s if call else time.perf_counter() - begin
    first = Solution(timing.step(loss, problem).item(), *problem.gradients())
    _compare(row, first, truth)
    assert row.loss_err is not None
    assert row.de_err is not None
    assert row.dc_err is not None
    if not math.isfinite(row.loss_err + row.de_err + row.dc_err):
        row.loss_nats = row.loss_err = row.de_err = row.dc_err = None
        raise FloatingPointError("loss or gradients are not finite")
    if bar.de_err and bar.dc_err:  # 0 where nothing is rounded, in fp32 on tiny problems
        row.de_err_ratio, row.dc_err_ratio = row.de_err / bar.de_err, row.dc_err / bar.dc_err
    second = Solution(timing.step(loss, problem).item(), *problem.gradients())
    row.deterministic = (
        first.loss == second.loss
        and torch.equal(first.hidden_ND, second.hidden_ND)
        and torch.equal(first.weight_VD, second.weight_VD)
    )


def _record_memory(row: Row, loss: LossBackend, problem: Problem) -> None:
    problem.clear_gradients()
    whole = timing.peak_bytes(lambda: timing.step(loss, problem), problem.device)
    problem.clear_gradients()
    alone = timing.peak_bytes(lambda: timing.evaluate(loss, problem), problem.device)
    if whole is not None and alone is not None:
        row.extra_mib, row.forward_extra_mib = (whole - problem.gradient_bytes) / _MIB, alone / _MIB


def record_times(
    entry: Entry, baseline: Entry | None, eager: Entry | None, one_ms: np.ndarray, three_ms: np.ndarray, seed: int
) -> None:
    """Medians and ratios of the rounds so far, and the rounds' times. Ratios are taken round by round."""
    row = entry.row
    row.forward_rounds_ms = list(entry.forward_ms)
    record_total(row, np.array(entry.forward_backward_ms), baseline, one_ms, three_ms, seed)
    row.forward_ms = float(np.median(entry.forward_ms))
    row.forward_ratio_to_product = float(np.median(np.array(entry.forward_ms) / one_ms))
    row.backward_ms = float(np.median(entry.backward_ms))
    if eager is not None:
        row.backward_ratio_to_eager = float(np.median(np.array(entry.backward_ms) / np.array(eager.backward_ms)))
    if entry.graph_ms:
        row.graph_ms = float(np.median(entry.graph_ms))
    if baseline is not None and entry.graph_ms and baseline.graph_ms:
        row.graph_ratio_to_compiled = float(np.median(np.array(entry.graph_ms) / np.array(baseline.graph_ms)))


def record_total(
    row: Row, total_ms: np.ndarray, baseline: Entry | None, one_ms: np.ndarray, three_ms: np.ndarray, seed: int
) -> None:
    """The time of forward and backward pass, and its ratios with intervals. `three_ms` is empty without a floor."""
    row.rounds, row.rounds_ms = len(total_ms), total_ms.tolist()
    quartiles = map(float, np.quantile(total_ms, (0.25, 0.5, 0.75)))
    row.forward_backward_ms_q25, row.forward_backward_ms, row.forward_backward_ms_q75 = quartiles
    for name, unit_ms in (("product", one_ms), ("three_products", three_ms)):
        if len(unit_ms):
            _set_ratio(row, name, total_ms / unit_ms, seed)
    if baseline is not None:
        _set_ratio(row, "compiled", total_ms / np.array(baseline.forward_backward_ms), seed)


def _set_ratio(row: Row, name: str, ratios: np.ndarray, seed: int) -> None:
    """Median and the ends of its interval."""
    found = float(np.median(ratios)), *interval_of_median(ratios, seed)
    for end, value in zip(("", "_low", "_high"), found, strict=True):
        setattr(row, f"ratio_to_{name}{end}", value)


def _record_clocks(row: Row, clocks: list[dict[str, Any]]) -> None:
    """Medians of what nvidia-smi reported, in the readings of :func:`linrnn.runs.environment.gpu_state`."""
    for key in ("sm_mhz", "watts"):
        if known := [reading[key] for reading in clocks if reading[key] is not None]:
            setattr(row, key, float(np.median(known)))
