"""Verdicts on the speed of the filter's gradients, from the benchmark of the loss layer alone.

A pair is an interleaved repetition. Its value is the time that gradients add to a forward pass, of compiled over the
filter's. The interval holds the noise of these repetitions. It does not hold what differs between processes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.loss_rows import Row, read_rows
from linrnn.report.targets import Verdict, judge
from study.criteria import BACKWARD

SET, BASELINE, FILTER = "grid", "compiled", "cce_filter"
FILTERED = 1.5  # a filtered dE errs more than this multiple of fp32 logits' error; an exact one does not


@dataclass(frozen=True)
class FilterSpeed:
    """A verdict on one shape and kind of logits, and the filter's row."""

    verdict: Verdict
    row: Row

    @property
    def shape(self) -> str:
        return f"{self.row.n:,} x {self.row.d:,} x {self.row.v:,}"


def filter_speeds(directory: Path, *, filtered: bool = True) -> Iterator[FilterSpeed]:
    """A verdict for every row of the grid that the filter filters, by N, D and V.

    Args:
        directory: of one GPU's rows.
        filtered: False for the other rows, in which the planner made the loss exact.
    """
    rows = [row for path in directory.glob("*.json") for row in read_rows(path) if row.set == SET]
    bases = {row.problem: row for row in rows if row.backend == BASELINE}
    for row in sorted(rows, key=lambda row: (row.n, row.d, row.v, row.logits)):
        if row.backend == FILTER and ((row.de_err_ratio or 0) > FILTERED) == filtered:
            values = [base / own for base, own in zip(_added(bases[row.problem]), _added(row), strict=True)]
            yield FilterSpeed(judge(BACKWARD, "-", FILTER, BASELINE, values, setting=row.logits), row)


def _added(row: Row) -> list[float]:
    """What gradients add to the time of a forward pass, ms by round."""
    return [both - forward for both, forward in zip(row.rounds_ms, row.forward_rounds_ms, strict=True)]
