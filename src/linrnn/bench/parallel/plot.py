"""The picture of the page on several GPUs: the weak scaling of training steps."""

from collections.abc import Sequence
from typing import Any

from linrnn.bench.parallel.rows import Measured, StepRow
from linrnn.core.plot_style import COLOURS, GREY, TARGET, legend_below, subplots
from linrnn.runs.intervals import estimate

ASKED, ASKED_OF = 0.9, ("350m", 8)  # a model's size, and sequences of a rank
NOTE = (
    "Hollow: one measurement (n = 1), a point for each run. Filled: the median over n repeats, with its 90 % interval."
)


def weak_scaling(runs: Sequence[Measured]) -> Any:
    """A line for each model, batch and way to spread a step; a colour for each number of GPUs.

    Returns the figure, or None if no run measured weak scaling.
    """
    rows = [row for run in runs for row in run.steps if row.scaling == "weak" and row.efficiency is not None]
    if not rows:
        return None
    settings = list(dict.fromkeys(_setting(row) for row in sorted(rows, key=_order)))
    gpus = sorted({row.ranks for row in rows})
    figure, axes = subplots(figsize=(8.2, 0.34 * len(settings) + 1.9))
    drawn: dict[str, Any] = {}
    for row in rows:
        place = settings.index(_setting(row)) + (gpus.index(row.ranks) - (len(gpus) - 1) / 2) * 0.2
        look = {"color": COLOURS[gpus.index(row.ranks)], "marker": "o", "linestyle": "none", "markersize": 5.5}
        repeated = len(row.efficiencies) > 1
        if repeated:
            found = estimate(row.efficiencies, ratios=True)
            axes.plot([found.low, found.high], [place] * 2, color=look["color"], linewidth=1.6)
        axes.plot(row.efficiency, place, **look, markerfacecolor=look["color"] if repeated else "white")
        [drawn[f"{row.ranks} GPUs"]] = axes.plot([], [], **look)
    asked = {_setting(row) for row in rows if (row.size, row.sequences_of_rank) == ASKED_OF}
    for place, setting in enumerate(settings):
        if setting in asked:
            [drawn[f"asked: {ASKED:.2f}"]] = axes.plot([ASKED] * 2, [place - 0.5, place + 0.5], **TARGET)
    axes.axvline(1, color=GREY, linewidth=0.8)
    axes.set_yticks(range(len(settings)), settings)
    axes.set_ylim(len(settings) - 0.5, -0.5)
    axes.set_xlabel("tokens/s of N GPUs / (N x tokens/s of one)")
    axes.grid(visible=False, axis="y")
    figure.suptitle("Weak scaling of training steps")
    legend_below(figure, dict(sorted(drawn.items())), NOTE)
    return figure


def _setting(row: StepRow) -> str:
    return f"{row.model} {row.size}, {row.sequences_of_rank} a rank: {row.method}"


def _order(row: StepRow) -> tuple[object, ...]:
    return (row.model, row.size, -row.sequences_of_rank, row.cuda_graph, row.method)
