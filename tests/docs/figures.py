"""What the tests of the documents' figures share: rows, tables and words."""

import re
from pathlib import Path
from typing import Any

from blocks import ROOT

from linrnn.bench.steps.rows import Row
from linrnn.study.benchmarks.step_speed import names_of
from linrnn.study.criteria import Criterion, Verdict
from linrnn.study.curves import difference
from linrnn.study.results import Run, read_committed
from linrnn.study.verdicts import verdicts

README = (ROOT / "README.md").read_text(encoding="utf-8")
FIRST_SCREEN = " ".join(README.split("## Install")[0].split())
# The first screen's table: the cells of each row, and the unit of its range, by what was measured.
_ROWS = [line.strip("| ").split(" | ") for line in README.split("## Install")[0].splitlines() if line.startswith("| ")]
MEASURED = {cells[0]: [*cells[1:3], *cells[4:]] for cells in _ROWS}
UNITS = {cells[0]: cells[3] for cells in _ROWS[1:]}


def linked(measured: str) -> Path:
    """The page that a row of the table links to."""
    [page] = re.findall(r"\((results/[\w/.]+\.md)\)", MEASURED[measured][3])
    return ROOT / page


STEPS = ROOT / "results" / "bench_steps" / "nvidia_h100_80gb_hbm3"
H100 = ROOT / "results" / "bench_loss" / "nvidia_h100_80gb_hbm3"


def interval(row: dict[str, Any]) -> str:
    ratio, low, high = (row[f"ratio_to_compiled{end}"] for end in ("", "_low", "_high"))
    return f"{ratio:.3f} ({low:.3f} to {high:.3f})"


def table_of(page: str, head: str) -> list[list[str]]:
    """The rows below the only head of a page's tables that begins so."""
    text = (ROOT / "docs" / "study" / page).read_text(encoding="utf-8")
    [block] = [block for block in text.split("\n\n") if block.startswith(f"| {head} |")]
    return [line.strip("| ").split(" | ") for line in block.strip().splitlines()[2:]]


def index_rows(heading: str, head: str = "setting") -> list[list[str]]:
    """The rows of a table of the study's index: below a heading, the only table whose head begins so."""
    text = (ROOT / "docs/study/index.md").read_text(encoding="utf-8")
    [section] = [part for part in re.split(r"\n##+ ", text) if part.startswith(f"[{heading}](")]
    [block] = [block for block in section.split("\n\n") if block.startswith(f"| {head} |")]
    return [line.strip("| ").split(" | ") for line in block.strip().splitlines()[2:]]


def span(values: list[float], digits: int = 3) -> str:
    """The least and the largest of some figures, or the figure that both are."""
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low} to {high}"


def by_name(found: list[Row]) -> dict[str, dict[str, Row]]:
    """The rows of each model line, by the line's name and the loss."""
    names, lines = names_of(found), {}  # type: ignore[var-annotated]
    for row in found:
        lines.setdefault(names[row.line], {})[row.loss] = row
    return lines


def steps(folder: str) -> Path:
    """The directory of whole steps on the H100 whose name ends so."""
    return STEPS.parent / f"{STEPS.name}{folder}"


def answer_of(verdict: Verdict | None) -> str:
    if verdict is None:
        return "not measured"
    return f"**{verdict.verdict}**: {verdict.value:.3f} ({verdict.low:.3f} to {verdict.high:.3f})"


def tokens_per_second(row: Row) -> str:
    return f"{row.tokens_per_second:,.0f}" if row.status == "ok" else row.status.replace("_", " ")


def cell_of(folder: str, backend: str, against: str, criterion: Criterion, form: str = "+.4f", n: int = 12) -> str:
    """The verdict of a summary from n pairs, as the study's pages write it."""
    found = verdicts(read_committed(ROOT / "results" / "summaries" / folder))
    [v] = [v for v in found if (v.backend, v.against, v.criterion) == (backend, against, criterion)]
    assert v.n == n
    return f"**{v.verdict}**: {v.value:{form}} ({v.low:{form}} to {v.high:{form}})"


def above(runs: dict[tuple[str, int], Run], loss: str, base: str) -> list[dict[int, float]]:
    """For each seed the distance of two training losses by step, as a mean of 20 steps."""
    seeds = sorted({seed for _, seed in runs})
    return [dict(difference(runs[loss, seed].losses, runs[base, seed].losses)) for seed in seeds]


def percent(share: float | None) -> str:
    assert share is not None
    return f"{share:.1%}".replace("%", " %")


def with_interval(one: Any, digits: int = 3) -> str:
    return f"{one.value:.{digits}f} ({one.low:.{digits}f} to {one.high:.{digits}f})"
