"""Measure time, memory and errors of the output layer alone: `python benchmarks/loss.py shapes=[mve]`.

A set (loss_sets.yaml) names shapes, backends and kinds of logits. Each shape with each kind of logits is a problem, and
one process measures all backends on it. A GPU's clock drifts by 10-15 % from day to day, so a time alone means little.
Repetitions are interleaved: each runs every loss, one matmul and the lower bound (three matmuls) once, in shuffled
order, on the same tensors, and divides a loss's time by that of torch.compile, of the matmul and of the bound. The
figure is the median of these ratios, with a bootstrap interval. torch.compile runs twice under two names (an A/A test):
a ratio inside the interval of the second one is noise. Errors and memory are measured in passes of their own. Rows go
to rows.json after each backend's errors and again between rounds, so a crash loses little.
"""

import math
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common, problems
from benchmarks.loss_pictures import kind_in_words, of_libraries, on_named_shapes, shape_in_words
from benchmarks.loss_rows import AGAIN, BAR, BASELINE, EAGER, FLOOR, Row, merge_rows, read_rows, rows_path
from benchmarks.problems import DTYPES, KINDS, Problem, Shape, Solution
from linrnn.config import cli
from linrnn.config.compose import add_command
from linrnn.config.schema import LossConfig, option
from linrnn.core.errors import DataError
from linrnn.core.garbage import collect_after, collected_at_known_points
from linrnn.core.output import say
from linrnn.core.tables import show
from linrnn.losses import LossBackend, build_loss
from linrnn.runs.environment import gpu_state
from linrnn.training.runtime import resolve_device, synchronize

SEED = 0  # of weights, data, order and bootstrap
_ROTATING_PROBLEMS = 4  # sets of inputs, used where one set would stay in the L2 cache
_SAVE_EVERY = 10  # rounds
# What a set leaves out.
_EVERY_SET = {"logits": ["flat", "peaked"], "gradients": ["same"], "batches": 1}
SETS: dict[str, dict[str, Any]] = {
    name: _EVERY_SET | content
    for name, content in yaml.safe_load(Path(__file__).with_name("loss_sets.yaml").read_text(encoding="utf-8")).items()
}


@dataclass
class BenchConfig(common.Keys):
    """Keys of the command line."""

    set: str = option("shapes", f"a set of benchmarks/loss_sets.yaml: {', '.join(SETS)}", choices=tuple(SETS))
    shapes: list[str] = option(
        [], "[]: the set's. Names, or tokens x hidden dimensions x vocabulary as in 4096x512x32000"
    )
    backends: list[str] = option(
        [],
        "[]: the set's. Losses with their options ('name option=value …' as in 'liger accumulate=fp32'), and those "
        "of benchmarks/other_losses.py. torch.compile (`compiled`) always runs twice: ratios are to its first entry, "
        "and the second is the A/A test. The lower bound (`three_products_cublas`: three matmuls and no loss) is "
        "always timed, too. A backend that cannot run gets a row with the reason",
    )
    logits: list[str] = option(
        [],
        "[]: the set's. flat (random-init) | peaked (trained-like) | half_ignored (peaked, and half of the labels "
        "ignored)",
    )
    gradients: list[str] = option([], "[]: the set's. same (in dtype) | fp32 (fp32 tensors and gradients)")
    batches: int = option(
        0, "0: the set's. Batches of N tokens over which dC is summed for one more error; 1: none", minimum=0
    )
    dtype: str = option("bf16", "bf16 | fp32: dtype of the products", choices=("bf16", "fp32"))
    rounds: int = option(30, "timed calls of every backend, in shuffled order", minimum=2)
    warmup: int = option(2, "calls before the timed ones, for compiling and tuning kernels", minimum=1)


add_command("bench_loss", BenchConfig)


# ------------------------------------------------------------------------------------------------------ measuring
@dataclass(frozen=True)
class Setting:
    """All problems that share shape and dtypes, and therefore the compiled graphs."""

    shape: Shape
    dtype: str
    gradients: str

    def problem(self, kind: str, device: torch.device, seed: int = SEED, batch: int = 0) -> Problem:
        return problems.make_problem(self.shape, kind, DTYPES[self.dtype], device, seed, DTYPES[self.gradients], batch)

    def row(self, kind: str, text: str, run: str, of_set: str, loss: LossConfig | None = None) -> Row:
        """An empty row. `text`: the backend as in the configuration."""
        backend = " ".join(word for word in text.split() if not word.startswith("workspace_mib="))
        return Row(
            self.shape.name, self.shape.n, self.shape.d, self.shape.v, self.dtype, self.gradients, kind, backend,
            getattr(loss, "workspace_mib", None), run=run, set=of_set,
        )  # fmt: skip


def run_benchmark(config: BenchConfig) -> list[Row]:
    """Measure every backend on every problem, and return the rows. They go to `results_directory`."""
    own = SETS[config.set]
    config = replace(config, **{key: getattr(config, key) or value for key, value in own.items()})
    common.check_known("logits", config.logits, KINDS)
    common.check_known("gradients", config.gradients, ("same", "fp32"))
    texts = [BASELINE, f"{BASELINE} {AGAIN}", *config.backends]
    losses = {text: common.parse_loss(text.removesuffix(f" {AGAIN}")) for text in texts}
    dtypes = [config.dtype if name == "same" else name for name in config.gradients]
    shapes = [problems.parse_shape(shape) for shape in config.shapes]
    settings = list(dict.fromkeys(Setting(shape, config.dtype, dtype) for shape in shapes for dtype in dtypes))
    device, measured = resolve_device(config.device), list[Row]()
    record = common.Record(config, "bench_loss")
    for number, setting in enumerate(settings, start=1):
        torch._dynamo.reset()  # compiled graphs for this setting alone, far from the recompile limit
        common.free(device)
        built: dict[str, LossBackend] = {}
        for kind in config.logits:
            say(f"[{number}/{len(settings)}] {setting.shape.name}, {kind}, {setting.dtype}, {setting.gradients}")
            rows = Bench(config, setting, kind, losses, built, record).measure()
            measured += rows
            ran = [row for row in rows if row.status == "ok"]
            refused = [f"{row.label}: {row.status}. {row.reason}" for row in rows if row.status != "ok"]
            say("\n".join([*common.table({name: COLUMNS[name] for name in _SHOWN}, ran), *refused]))
    return measured


@dataclass
class Entry:
    """A backend, and its times in ms, one a round."""

    row: Row
    loss: LossBackend
    forward_ms: list[float] = field(default_factory=list)
    forward_backward_ms: list[float] = field(default_factory=list)
    backward_ms: list[float] = field(default_factory=list)


@dataclass
class Bench:
    """All backends on one problem: errors (which warms up) and memory of each, then the timed rounds."""

    config: BenchConfig
    setting: Setting
    kind: str
    losses: dict[str, LossConfig]
    built: dict[str, LossBackend]  # what the other problems of this setting have built
    record: common.Record
    rows: list[Row] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)

    def measure(self) -> list[Row]:
        device = self.record.device
        problem = self.setting.problem(self.kind, device)
        truth = problems.truth_of(problem)
        summed_VD = self._sum_over_batches(lambda part: problems.truth_of(part).weight_VD)
        bar = self._row(BAR)  # it has errors only, because its time means nothing
        _compare(bar, problems.fp32_logits_of(problem), truth)
        bar.de_err_ratio = bar.dc_err_ratio = 1.0
        self._record_sum(bar, lambda part: problems.fp32_logits_of(part).weight_VD, summed_VD)
        bar.status = "ok"
        floor = self._row(FLOOR)
        for text, loss_config in self.losses.items():
            row, begin = self._row(text, loss_config), time.perf_counter()
            try:
                new = text not in self.built
                if new:
                    self.built[text] = build_loss(loss_config, device=device, dtype=problem.compute_dtype)
                loss = self.built[text]
                first_call_s = _record_errors(row, loss, problem, truth, bar, self.config.warmup)
                row.first_call_s = first_call_s if new else None
                self._record_sum(row, partial(_weight_gradient, loss), summed_VD)
                _record_memory(row, loss, problem)
            except Exception as error:  # a backend's failure is a result
                common.failed(row, error)
            else:
                self.entries.append(Entry(row, loss))
            problem.clear_gradients()
            done = row.reason or f"errors and memory in {time.perf_counter() - begin:.1f} s"
            say(f"  {row.label}: {done}")
            self._save()
        del truth, summed_VD
        seeds = range(1, _ROTATING_PROBLEMS) if problems.fits_cache(problem) else []
        self._run_rounds([problem, *(self.setting.problem(self.kind, device, seed) for seed in seeds)], floor)
        for row in (floor, *(entry.row for entry in self.entries)):
            row.status = "ok" if row.rounds else row.status
        self._save()
        return self.rows

    def _row(self, text: str, loss: LossConfig | None = None) -> Row:
        self.rows.append(self.setting.row(self.kind, text, self.record.id, self.config.set, loss))
        return self.rows[-1]

    def _save(self) -> None:
        merge_rows(rows_path(self.record.directory), self.rows)

    def _sum_over_batches(self, gradient: Callable[[Problem], torch.Tensor]) -> torch.Tensor | None:
        """Gradients of the weight, added up over the batches; None for a single batch."""
        total = None
        for batch in range(self.config.batches if self.config.batches > 1 else 0):
            found = gradient(self.setting.problem(self.kind, self.record.device, batch=batch))
            wide = found if found.dtype == torch.float64 else found.float()
            total = wide if total is None else total.add_(wide)
        return total

    def _record_sum(
        self, row: Row, gradient: Callable[[Problem], torch.Tensor], summed_VD: torch.Tensor | None
    ) -> None:
        """The error of dC summed over batches. Noise averages out there, and a bias does not."""
        found = None if summed_VD is None else self._sum_over_batches(gradient)
        if found is not None and summed_VD is not None:
            row.batches, row.dc_sum_err = self.config.batches, problems.relative_error(found, summed_VD)

    def _run_rounds(self, turns: list[Problem], floor: Row) -> None:
        """Once a round, in shuffled order: every entry's forward pass and step, the product and the floor.

        Python's garbage is collected between them.
        """
        shuffle = random.Random(SEED).shuffle
        product, three_products = [problems.one_product(problem) for problem in turns], []
        try:
            three_products = [problems.three_products(problem) for problem in turns]
        except torch.OutOfMemoryError as error:  # N x V does not fit
            common.failed(floor, error)
        one_ms, three_ms, clocks = list[float](), list[float](), list[dict[str, Any]]()
        begin = time.perf_counter()
        with collected_at_known_points():
            for index in range(self.config.rounds):
                turn = index % len(turns)
                problem = turns[turn]
                jobs: list[tuple[Entry | None, Callable[[], None]]] = [(None, self._job(one_ms, product[turn]))]
                if three_products:
                    jobs.append((None, self._job(three_ms, three_products[turn])))
                for entry in self.entries:
                    jobs.append((entry, self._job(entry.forward_ms, partial(problems.evaluate, entry.loss, problem))))
                    jobs.append((entry, partial(_time_step, entry, problem)))
                shuffle(jobs)
                for owner, job in jobs:
                    self._try(owner, job)
                    problem.clear_gradients()
                    collect_after(1)
                if (index + 1) % _SAVE_EVERY == 0 or index + 1 == self.config.rounds:
                    clocks += filter(None, [gpu_state(self.record.device)])
                    self._record(floor, np.array(one_ms), np.array(three_ms), clocks)
                    left = (time.perf_counter() - begin) / (index + 1) * (self.config.rounds - index - 1)
                    say(f"  round {index + 1}/{self.config.rounds}, {left:.0f} s left")

    def _job(self, times: list[float], action: Callable[[], object]) -> Callable[[], None]:
        return lambda: times.append(problems.time_ms(action, self.record.device))

    def _try(self, owner: Entry | None, job: Callable[[], None]) -> None:
        """Run a job. If it fails, its entry takes part in no later job, and its row says why."""
        if owner is None:
            job()
        elif any(entry is owner for entry in self.entries):
            try:
                job()
            except Exception as error:
                common.failed(owner.row, error)
                self.entries = [entry for entry in self.entries if entry is not owner]
                say(f"  {owner.row.label}: {owner.row.reason}")

    def _record(self, floor: Row, one_ms: np.ndarray, three_ms: np.ndarray, clocks: list[dict[str, Any]]) -> None:
        """Write the rounds so far into all rows, and the rows to their file."""
        by_name = {entry.row.backend: entry for entry in self.entries}
        baseline, rows = by_name.get(BASELINE), [entry.row for entry in self.entries]
        if len(three_ms):
            record_total(floor, three_ms, baseline, one_ms, three_ms)
            rows.append(floor)
        for entry in self.entries:
            record_times(entry, baseline, by_name.get(EAGER), one_ms, three_ms)
        for key in ("sm_mhz", "watts"):
            if known := [reading[key] for reading in clocks if reading[key] is not None]:
                for row in rows:
                    setattr(row, key, float(np.median(known)))
        self._save()


def _time_step(entry: Entry, problem: Problem) -> None:
    whole_ms, backward_ms = problems.time_step_ms(entry.loss, problem)
    entry.forward_backward_ms.append(whole_ms)
    entry.backward_ms.append(backward_ms)


# ------------------------------------------------------------------------------------------------- filling a row
def _compare(row: Row, got: Solution, truth: Solution) -> None:
    row.loss_nats, row.loss_err = got.loss, abs(got.loss - truth.loss) / truth.loss
    row.de_err = problems.relative_error(got.hidden_ND, truth.hidden_ND)
    row.dc_err = problems.relative_error(got.weight_VD, truth.weight_VD)
    if not math.isfinite(row.loss_err + row.de_err + row.dc_err):
        row.loss_nats = row.loss_err = row.de_err = row.dc_err = None
        raise FloatingPointError("loss or gradients are not finite")


def _weight_gradient(loss: LossBackend, problem: Problem) -> torch.Tensor:
    problems.step(loss, problem)
    return problem.gradients()[1]


def _record_errors(row: Row, loss: LossBackend, problem: Problem, truth: Solution, bar: Row, warmup: int) -> float:
    """Warm up, compare a call with the truth, then a second call with the first.

    Returns the seconds of the first call, in which kernels compile.
    """
    begin = time.perf_counter()
    for call in range(warmup):
        problems.step(loss, problem)
        problems.evaluate(loss, problem)
        synchronize(problem.device)
        if call == 0:
            first_call_s = time.perf_counter() - begin
    first = Solution(problems.step(loss, problem).item(), *problem.gradients())
    _compare(row, first, truth)
    if bar.de_err and bar.dc_err and row.de_err is not None and row.dc_err is not None:  # 0: fp32 on tiny problems
        row.de_err_ratio, row.dc_err_ratio = row.de_err / bar.de_err, row.dc_err / bar.dc_err
    second = Solution(problems.step(loss, problem).item(), *problem.gradients())
    same = torch.equal(first.hidden_ND, second.hidden_ND) and torch.equal(first.weight_VD, second.weight_VD)
    row.deterministic = first.loss == second.loss and same
    return first_call_s


def _record_memory(row: Row, loss: LossBackend, problem: Problem) -> None:
    row.extra_mib = problems.extra_mib(partial(problems.step, loss, problem), problem)
    problem.clear_gradients()
    alone = problems.peak_bytes(partial(problems.evaluate, loss, problem), problem.device)
    row.forward_extra_mib = None if alone is None else alone / 2**20


def record_times(
    entry: Entry, baseline: Entry | None, eager: Entry | None, one_ms: np.ndarray, three_ms: np.ndarray
) -> None:
    """Medians and ratios of the rounds so far, and the rounds' times. Ratios are taken round by round."""

    def ratio(times: list[float], unit: Any) -> float:
        return float(np.median(np.array(times) / np.array(unit)))

    row = entry.row
    row.forward_rounds_ms = list(entry.forward_ms)
    record_total(row, np.array(entry.forward_backward_ms), baseline, one_ms, three_ms)
    row.forward_ms, row.backward_ms = float(np.median(entry.forward_ms)), float(np.median(entry.backward_ms))
    row.forward_ratio_to_product = ratio(entry.forward_ms, one_ms)
    if eager is not None:
        row.backward_ratio_to_eager = ratio(entry.backward_ms, eager.backward_ms)


def record_total(
    row: Row, total_ms: np.ndarray, baseline: Entry | None, one_ms: np.ndarray, three_ms: np.ndarray
) -> None:
    """The time of forward and backward pass, and its ratios with intervals. `three_ms` is empty without a floor."""
    row.rounds, row.rounds_ms = len(total_ms), total_ms.tolist()
    quartiles = map(float, np.quantile(total_ms, (0.25, 0.5, 0.75)))
    row.forward_backward_ms_q25, row.forward_backward_ms, row.forward_backward_ms_q75 = quartiles
    compiled_ms = [] if baseline is None else baseline.forward_backward_ms
    for name, unit_ms in (("product", one_ms), ("three_products", three_ms), ("compiled", compiled_ms)):
        if len(unit_ms):
            found = common.ratio_to(row.rounds_ms, unit_ms, SEED)
            for end, value in zip(("", "_low", "_high"), found, strict=True):
                setattr(row, f"ratio_to_{name}{end}", value)


# ------------------------------------------------------------------------------------------------------ the page
def _ratio(name: str) -> Callable[[Row], str]:
    """A ratio with its interval, if it has one."""

    def cell(row: Row) -> str:
        value, low, high = (getattr(row, f"ratio_to_{name}{end}") for end in ("", "_low", "_high"))
        return show(value, ".3f") + ("" if low is None else f" ({common.interval(low, high)})")

    return cell


COLUMNS: common.Columns = {
    "backend": lambda row: row.label,
    "n": lambda row: row.rounds or "-",
    "ms": "forward_backward_ms:.2f",
    "/ compiled (95 %)": _ratio("compiled"),
    "/ product (95 %)": _ratio("product"),
    "/ 3 products (95 %)": _ratio("three_products"),
    "forward ms": "forward_ms:.2f",
    "backward ms": "backward_ms:.2f",
    "extra MiB": "extra_mib:,.0f",
    "forward MiB": "forward_extra_mib:,.1f",
    "loss err": "loss_err:.1e",
    "dE err": "de_err:.2e",
    "dE err / bar's": "de_err_ratio:.2f",
    "dC err": "dc_err:.2e",
    "dC err / bar's": "dc_err_ratio:.2f",
    "dC err, sum": "dc_sum_err:.2e",
    "same bits": lambda row: {True: "yes", False: "no", None: "-"}[row.deterministic],
    "first call s": "first_call_s:.1f",
}
_SHOWN = ("backend", "n", "ms", "/ compiled (95 %)", "/ 3 products (95 %)", "extra MiB", "dE err", "dC err")


def report_set(config: BenchConfig) -> list[Path]:
    """Write page and picture from all rows of the set in this device's directory; returns their paths.

    Shapes outside the set get a page of their own, `custom`.
    """
    name, shapes, directory = config.set, SETS[config.set]["shapes"], common.results_directory(config, "bench_loss")
    if not set(config.shapes) <= set(shapes):
        name, shapes = "custom", config.shapes
    rows = [row for row in read_rows(rows_path(directory)) if row.set == config.set and row.shape in shapes]
    if not rows:
        raise DataError(f"no rows of set {name} under {directory}", "measure them first: measure=true")
    sections: dict[str, list[Row]] = {}
    rows = sorted(rows, key=lambda row: shapes.index(row.shape))
    for own in common.grouped(rows, key=lambda row: row.problem):
        sections[f"{shape_in_words(own[0])}: {kind_in_words(own[0])}, matmuls in {own[0].dtype}"] = own
    figure = (of_libraries if name == "every_rival" else on_named_shapes)(rows, common.devices_of(directory))
    pictures = {} if figure is None else {name: figure}
    return common.write_report(directory, name, f"The output layer alone, {name}", sections, COLUMNS, pictures)


def main(config: BenchConfig) -> None:
    if config.measure:
        run_benchmark(config)
    say("wrote " + ", ".join(map(str, report_set(config))))


if __name__ == "__main__":
    cli.run(main, "bench_loss", __doc__)
