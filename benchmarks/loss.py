"""Measure time, memory and errors of the output layer alone: `python benchmarks/loss.py shapes=[mve]`.

A set (loss_sets.yaml) names shapes, backends and kinds of logits. Each shape with each kind of logits is a problem, and
one process measures all backends on it. A GPU's clock drifts by 10-15 % from day to day, so a time alone means little.
Repetitions are interleaved: each runs every loss and the lower bound (three matmuls) once, in shuffled order, on the
same tensors, and divides a loss's time by that of torch.compile and of the bound. The figure is the median of these
ratios, with a bootstrap interval. torch.compile runs twice under two names (an A/A test): a ratio inside the interval
of the second one is noise. Errors and memory are measured in passes of their own.
"""

import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common, problems
from benchmarks.loss_pictures import kind_in_words, of_libraries, on_named_shapes, shape_in_words
from benchmarks.loss_rows import AGAIN, BAR, BASELINE, FLOOR, Row, read_rows
from benchmarks.problems import DTYPES, KINDS, Problem, Shape, Solution
from linrnn.config import cli
from linrnn.config.schema import COMMANDS, LossConfig, option
from linrnn.core.errors import DataError
from linrnn.core.garbage import collect_after, collected_at_known_points
from linrnn.core.output import say
from linrnn.core.tables import show
from linrnn.losses import LossBackend, build_loss
from linrnn.training.runtime import resolve_device

SEED = 0  # of weights, data, order and bootstrap
_ROTATING_PROBLEMS = 4  # sets of inputs, used where one set would stay in the L2 cache
_EVERY_SET = {"logits": ["flat", "peaked"], "gradients": ["same"]}  # what a set leaves out
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
    dtype: str = option("bf16", "bf16 | fp32: dtype of the products", choices=("bf16", "fp32"))
    rounds: int = option(30, "timed calls of every backend, in shuffled order", minimum=2)
    warmup: int = option(2, "calls before the timed ones, for compiling and tuning kernels", minimum=1)


COMMANDS["bench_loss"] = BenchConfig


# ------------------------------------------------------------------------------------------------------ measuring
Setting = tuple[Shape, str, str]  # with the dtypes of products and of gradients: problems that share compiled graphs


def run_benchmark(config: BenchConfig) -> list[Row]:
    """Measure every backend on every problem. A problem's rows are written as soon as it is done."""
    own = SETS[config.set]
    config = replace(config, **{key: getattr(config, key) or value for key, value in own.items()})
    common.check_known("logits", config.logits, KINDS)
    common.check_known("gradients", config.gradients, ("same", "fp32"))
    texts = [BASELINE, f"{BASELINE} {AGAIN}", *config.backends]
    losses = {text: common.parse_loss(text.removesuffix(f" {AGAIN}")) for text in texts}
    dtypes = [config.dtype if name == "same" else name for name in config.gradients]
    shapes = [problems.parse_shape(shape) for shape in config.shapes]
    settings: list[Setting] = list(dict.fromkeys((shape, config.dtype, dtype) for shape in shapes for dtype in dtypes))
    device, measured = resolve_device(config.device), list[Row]()
    record = common.Record(config, "bench_loss")
    for number, setting in enumerate(settings, start=1):
        torch._dynamo.reset()  # compiled graphs for this setting alone, far from the recompile limit
        common.free(device)
        built: dict[str, LossBackend] = {}
        for kind in config.logits:
            say(f"[{number}/{len(settings)}] {', '.join([setting[0].name, kind, *setting[1:]])}")
            rows = Bench(config, setting, kind, built, record).measure(losses)
            record.add(*rows)
            measured += rows
            ran = [row for row in rows if row.status == "ok"]
            refused = [f"{row.label}: {row.status}. {row.reason}" for row in rows if row.status != "ok"]
            say("\n".join([*common.table({name: COLUMNS[name] for name in _SHOWN}, ran), *refused]))
    return measured


@dataclass
class Bench:
    """All backends on one problem: errors (which warms up) and memory of each, then the timed rounds."""

    config: BenchConfig
    setting: Setting
    kind: str
    built: dict[str, LossBackend]  # what the other problems of this setting have built
    record: common.Record
    rows: list[Row] = field(default_factory=list)

    def measure(self, losses: dict[str, LossConfig]) -> list[Row]:
        problem = self._problem(SEED)
        bar, floor = self._row(BAR), self._row(FLOOR)  # errors alone, times alone
        own = {text: self._row(text, loss) for text, loss in losses.items()}
        self._record_errors_and_memory(problem, bar, own, losses)
        seeds = range(1, _ROTATING_PROBLEMS) if problems.fits_cache(problem) else []
        turns = [problem, *map(self._problem, seeds)]
        self._run_rounds(turns, floor, [(row, self.built[text]) for text, row in own.items() if row.status == "ok"])
        record_times(floor, own[BASELINE], [floor, *own.values()])
        return self.rows

    def _problem(self, seed: int) -> Problem:
        shape, dtype, gradients = self.setting
        return problems.make_problem(shape, self.kind, DTYPES[dtype], self.record.device, seed, DTYPES[gradients])

    def _record_errors_and_memory(
        self, problem: Problem, bar: Row, rows: dict[str, Row], losses: dict[str, LossConfig]
    ) -> None:
        device, truth = self.record.device, problems.truth_of(problem)
        _compare(bar, problems.fp32_logits_of(problem), truth)
        bar.de_err_ratio = bar.dc_err_ratio = 1.0

        def record(text: str, row: Row) -> None:
            if text not in self.built:
                self.built[text] = build_loss(losses[text], device=device, dtype=problem.compute_dtype)
            _record_errors(row, self.built[text], problem, truth, bar, self.config.warmup)
            _record_memory(row, self.built[text], problem)

        for text, row in rows.items():
            common.attempt(row, device, partial(record, text, row))
            problem.clear_gradients()
            say(f"  {row.label}: {row.reason or 'errors and memory are measured'}")

    def _row(self, text: str, loss: LossConfig | None = None) -> Row:
        """A new row. `text`: the backend as in the configuration."""
        backend = " ".join(word for word in text.split() if not word.startswith("workspace_mib="))
        shape, dtype, gradients = self.setting
        row = Row(
            shape.name, shape.n, shape.d, shape.v, dtype, gradients, self.kind, backend,
            getattr(loss, "workspace_mib", None), self.record.id, self.config.set,
        )  # fmt: skip
        self.rows.append(row)
        return row

    def _run_rounds(self, turns: list[Problem], floor: Row, losses: list[tuple[Row, LossBackend]]) -> None:
        """Once a round, in shuffled order: every loss's forward pass and step, and the floor.

        Python's garbage is collected between them. A loss that fails takes part in no later job.
        """
        device, shuffle, products = self.record.device, random.Random(SEED).shuffle, list[Callable[[], None]]()
        common.attempt(floor, device, lambda: products.extend([problems.three_products(turn) for turn in turns]))

        def job(row: Row, times: list[float], action: Callable[[], object]) -> tuple[Row, Callable[[], None]]:
            return row, lambda: times.append(problems.time_ms(action, device))

        with collected_at_known_points():
            for index in range(self.config.rounds):
                problem = turns[index % len(turns)]
                jobs = [job(floor, floor.rounds_ms, products[index % len(turns)])] if products else []
                for row, loss in losses:
                    jobs.append(job(row, row.forward_rounds_ms, partial(problems.evaluate, loss, problem)))
                    jobs.append(job(row, row.rounds_ms, partial(problems.step, loss, problem)))
                shuffle(jobs)
                for row, measure in jobs:
                    if row.status == "ok" and not common.attempt(row, device, measure):
                        say(f"  {row.label}: {row.reason}")
                    problem.clear_gradients()
                    collect_after(1)


# ------------------------------------------------------------------------------------------------- filling a row
def _compare(row: Row, got: Solution, truth: Solution) -> None:
    row.loss_nats, row.loss_err = got.loss, abs(got.loss - truth.loss) / truth.loss
    row.de_err = problems.relative_error(got.hidden_ND, truth.hidden_ND)
    row.dc_err = problems.relative_error(got.weight_VD, truth.weight_VD)
    if not math.isfinite(row.loss_err + row.de_err + row.dc_err):
        row.loss_nats = row.loss_err = row.de_err = row.dc_err = None
        raise FloatingPointError("loss or gradients are not finite")


def _record_errors(row: Row, loss: LossBackend, problem: Problem, truth: Solution, bar: Row, warmup: int) -> None:
    """Warm up, compare a call with the truth, then a second call with the first."""
    for _ in range(warmup):
        problems.step(loss, problem)
        problems.evaluate(loss, problem)
    first = Solution(problems.step(loss, problem).item(), *problem.gradients())
    _compare(row, first, truth)
    if bar.de_err and bar.dc_err and row.de_err is not None and row.dc_err is not None:  # 0: fp32 on tiny problems
        row.de_err_ratio, row.dc_err_ratio = row.de_err / bar.de_err, row.dc_err / bar.dc_err
    second = Solution(problems.step(loss, problem).item(), *problem.gradients())
    same = torch.equal(first.hidden_ND, second.hidden_ND) and torch.equal(first.weight_VD, second.weight_VD)
    row.deterministic = first.loss == second.loss and same


def _record_memory(row: Row, loss: LossBackend, problem: Problem) -> None:
    row.extra_mib = problems.extra_mib(partial(problems.step, loss, problem), problem)
    problem.clear_gradients()
    alone = problems.peak_bytes(partial(problems.evaluate, loss, problem), problem.device)
    row.forward_extra_mib = None if alone is None else alone / 2**20


def record_times(floor: Row, baseline: Row, rows: list[Row]) -> None:
    """Medians of the rounds' times, and ratios with intervals, taken round by round, for the rows that ran them all."""
    for row in (row for row in rows if row.status == "ok"):
        row.rounds = len(row.rounds_ms)
        row.forward_backward_ms = median(row.rounds_ms)
        row.forward_ms = median(row.forward_rounds_ms) if row.forward_rounds_ms else None
        for name, unit in (("three_products", floor), ("compiled", baseline)):
            if unit.status == "ok":
                found = common.ratio_to(row.rounds_ms, unit.rounds_ms, SEED)
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
    "/ 3 products (95 %)": _ratio("three_products"),
    "forward ms": "forward_ms:.2f",
    "extra MiB": "extra_mib:,.0f",
    "forward MiB": "forward_extra_mib:,.1f",
    "loss err": "loss_err:.1e",
    "dE err": "de_err:.2e",
    "dE err / bar's": "de_err_ratio:.2f",
    "dC err": "dc_err:.2e",
    "dC err / bar's": "dc_err_ratio:.2f",
    "same bits": lambda row: {True: "yes", False: "no", None: "-"}[row.deterministic],
}
_SHOWN = ("backend", "n", "ms", "/ compiled (95 %)", "/ 3 products (95 %)", "extra MiB", "dE err", "dC err")


def report_set(config: BenchConfig) -> list[Path]:
    """Write page and picture from all rows of the set in this device's directory; returns their paths."""
    name, shapes, directory = config.set, SETS[config.set]["shapes"], common.results_directory(config, "bench_loss")
    rows = [row for row in read_rows(directory) if row.set == name]
    if not rows:
        raise DataError(f"no rows of set {name} under {directory}", "measure them first: measure=true")
    rows.sort(key=lambda row: shapes.index(row.shape) if row.shape in shapes else len(shapes))
    sections: dict[str, list[Row]] = {}
    for own in common.grouped(rows, key=lambda row: row.problem):
        sections[f"{shape_in_words(own[0])}: {kind_in_words(own[0])}, matmuls in {own[0].dtype}"] = own
    draw = {"grid": on_named_shapes, "every_rival": of_libraries}.get(name)
    figure = draw(rows, common.devices_of(directory)) if draw else None
    pictures = {} if figure is None else {name: figure}
    return common.write_report(directory, name, f"The output layer alone, {name}", sections, COLUMNS, pictures)


def main(config: BenchConfig) -> None:
    if config.measure:
        run_benchmark(config)
    say("wrote " + ", ".join(map(str, report_set(config))))


if __name__ == "__main__":
    cli.run(main, "bench_loss", __doc__)
