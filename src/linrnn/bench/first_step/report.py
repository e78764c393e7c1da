"""The page of the benchmark of first steps: a table of lines, a table of runs, and a plot of where the time goes."""

from pathlib import Path
from statistics import median
from textwrap import wrap
from typing import Any

from linrnn.bench.first_step.rows import Row, read_rows
from linrnn.bench.records import grouped, read_runs, runs_section
from linrnn.core.files import write_text
from linrnn.core.plot_style import COLOURS, GREY, legend_below, save, subplots
from linrnn.core.tables import Table, show
from linrnn.models.facts import model_in_words
from linrnn.runs.intervals import AT_MOST, LEAST_PAIRS, answer, estimate

# The stages of a run's start, as environment.json names them: the stage that comes before, and words for readers.
STAGES = {
    "libraries": (None, "Python and libraries imported"),
    "model": ("libraries", "FLA imported, model built without weights"),
    "weights": ("model", "weights drawn, on threads of their own"),
    "kernels": ("model", "kernels compiled"),
    "first_step": (None, "first step"),
}


def write_report(directory: Path, limit_seconds: float) -> list[Path]:
    """Write first_step.md and first_step.png; returns the paths of page and PNG.

    Raises:
        DataError: nothing was measured, or a file is damaged.
    """
    rows, runs = read_rows(directory), read_runs(directory)
    ids = sorted({row.run for row in rows if row.run in runs})
    page = directory / "first_step.md"
    text = markdown(rows, directory.name, ids, limit_seconds) + "\n".join(runs_section([runs[run] for run in ids]))
    write_text(page, text)
    return [page, save(plot(rows, ids, limit_seconds), directory / "first_step.png")]


def markdown(rows: list[Row], device: str, runs: list[str], limit_seconds: float) -> str:
    """The page without its list of runs.

    Args:
        device: its directory's name.
        runs: the ids of the list, in its order.
    """
    limit = f"at most {limit_seconds:g} s"
    summary = Table(
        ("line", "call", "n", "seconds, median", "90 %", limit, "kernel choices"),
        [
            [_title(own[0]), _call(own[0], runs), len(own), *_judged(own, limit_seconds), _choices(own)]
            for own in _groups(rows)
        ],
        words=("line", limit, "kernel choices"),
    )
    every = Table(
        ("line", "call", "run of the call", *(words for _, words in STAGES.values())),
        [
            [_title(row), _call(row, runs), row.number, *(show(row.at(stage), ".1f") for stage in STAGES)]
            for row in rows
        ],
        words=("line",),
    )
    lines = [
        f"# Seconds to the end of the first step: {device}", "",
        "![Where the time to the first step goes](first_step.png)", "",
        "Every run is a `train.py` of its own, and finds no compiled kernel. All times count from the start of its "
        "process, in seconds. The data are prepared before.", "",
        *summary.markdown(), "",
        "*call*: its place in the list of runs below. *90 %*: Student's interval of the mean. The verdict follows from "
        f"the interval, and needs n ≥ {LEAST_PAIRS}.", "",
        "## Every run", "",
        "The end of each stage. Weights are drawn while kernels are compiled.", "",
        *every.markdown(), "",
        *(f"* {_title(own[0])}: `{own[0].line}`" for own in grouped(rows, key=lambda row: row.line)), "",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def plot(rows: list[Row], runs: list[str], limit_seconds: float) -> Any:
    """A bar for each stage of each line, from medians, and a point for the end of every run."""
    groups = _groups(rows)
    figure, axes = subplots(figsize=(9, 0.55 * len(groups) + 1.9))
    looks = dict(zip(STAGES, (GREY, *COLOURS), strict=False))
    drawn: dict[str, Any] = {}
    for place, own in enumerate(groups):
        ends = {stage: median(at) for stage in STAGES if (at := [e for row in own if (e := row.at(stage)) is not None])}
        for stage, (before, words) in STAGES.items():
            if stage not in ends:
                continue
            others = [end for name, end in ends.items() if name != "first_step"]
            start = max(others, default=0.0) if stage == "first_step" else ends[before] if before else 0.0
            both = stage in ("weights", "kernels")
            bar = {"height": 0.28 if both else 0.6, "color": looks[stage], "align": "center"}
            shift = {"weights": 0.16, "kernels": -0.16}.get(stage, 0.0)
            drawn[words] = axes.barh(place + shift, ends[stage] - start, left=start, **bar)
        axes.plot([row.seconds for row in own], [place] * len(own), "o", color="black", markersize=4, zorder=5)
    axes.axvline(limit_seconds, color=GREY, linestyle="--", linewidth=1)
    several = len(runs) > 1
    names = [_title(own[0]) + (f", call {_call(own[0], runs)}" if several else "") for own in groups]
    names = [f"{name} (n = {len(own)})" for name, own in zip(names, groups, strict=True)]
    axes.set_yticks(range(len(groups)), ["\n".join(wrap(name, 50)) for name in names])
    axes.set_ylim(len(groups) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds from the command")
    figure.suptitle("From the command to the end of the first step, without compiled kernels")
    legend_below(figure, drawn, f"Bars: medians. Points: the end of every run. Dashed: {limit_seconds:g} s, as asked.")
    return figure


def _groups(rows: list[Row]) -> list[list[Row]]:
    """The runs of each line, apart for each call of the benchmark: machines differ."""
    return grouped(rows, key=lambda row: (row.run, row.line))


def _title(row: Row) -> str:
    """Model, size and loss, and the last words of further keys: `rwkv7 350m, cce_kahan, kernel_choices=first`."""
    told = ("model=", "model.config=", "size=", "loss=", "data", "trainer.batch_size=", "trainer.seq_len=")
    words = row.line.split()
    of_fla = [word.removeprefix("model.config=") for word in words if word.startswith("model.config=")]
    rest = [word.removeprefix("trainer.").removeprefix("model.options.") for word in words if not word.startswith(told)]
    return ", ".join([f"{model_in_words((of_fla or [row.model])[0])} {row.size}, {row.loss}", *rest])


def _call(row: Row, runs: list[str]) -> str:
    return str(runs.index(row.run) + 1) if row.run in runs else "-"


def _judged(rows: list[Row], limit_seconds: float) -> list[str]:
    """Median, interval and verdict."""
    found = estimate([row.seconds for row in rows], ratios=False)
    if found.low is None or found.high is None:
        return [f"{found.value:.1f}", "-", "**undecided**"]
    met = answer(found.low, found.high, AT_MOST, limit_seconds) if found.n >= LEAST_PAIRS else None
    verdict = {True: "met", False: "missed", None: "undecided"}[met]
    return [f"{found.value:.1f}", f"{found.low:.1f} to {found.high:.1f}", f"**{verdict}**"]


def _choices(rows: list[Row]) -> str:
    """How many kernels had a stored choice, how many ran untuned; the largest number that a run tuned."""
    if rows[0].stored is None:
        return "none"
    tuned = max(row.tuned or 0 for row in rows)
    first = f"{rows[0].first} first, " if rows[0].first else ""
    return f"{rows[0].stored} stored, {rows[0].near} near, {first}{tuned} tuned"
