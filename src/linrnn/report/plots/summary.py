"""A report's first picture: each loss beside the baseline, in memory, speed and loss."""

from collections.abc import Sequence
from typing import Any

from linrnn.core.plot_style import GREY, TARGET, WIDTH, legend_below, looks, subplots
from linrnn.models.facts import model_in_words
from linrnn.report.targets import Target, Verdict
from linrnn.runs.intervals import WITHIN

PANELS = {  # the metrics that are drawn, with the words for their axes
    "peak_memory_bytes": "peak memory, ratio to",
    "tokens_per_second": "tokens/s, ratio to",
    "valid_loss_nats": "validation loss, nats above",
    "train_loss_nats": "training loss, nats above",
}
MOST = 3  # panels


def overview(compared: Sequence[Verdict], targets: Sequence[Target] = ()) -> Any | None:
    """A line per model and loss, a panel per metric, with 90 % intervals and what targets ask; None without values."""
    drawn = [v for v in compared if v.value is not None and v.target.metric.name in PANELS]
    metrics = [name for name in PANELS if any(v.target.metric.name == name for v in drawn)][:MOST]
    if not metrics:
        return None
    several = len({v.model for v in drawn}) > 1
    rows = list(dict.fromkeys(_name(v, several) for v in drawn))
    found = looks(v.backend for v in drawn)
    size = (min(2.6 + 2.7 * len(metrics), WIDTH), 0.42 * len(rows) + 1.5)
    figure, grid = subplots(1, len(metrics), figsize=size, sharey=True, squeeze=False)
    lines: dict[str, Any] = {}
    for axes, metric in zip(grid[0], metrics, strict=True):
        own = [v for v in drawn if v.target.metric.name == metric]
        for v in own:
            _point(axes, v, rows.index(_name(v, several)), found[v.backend])
        axes.axvline(1 if own[0].target.metric.ratio else 0, color=GREY, linewidth=0.8, zorder=1)
        for target in targets:
            if target.metric.name == metric:
                for bound in {target.bound, -target.bound if target.rule == WITHIN else target.bound}:
                    lines["target"] = axes.axvline(bound, **TARGET, zorder=2)
        axes.set_xlabel(f"{PANELS[metric]} {own[0].against}")
        axes.margins(x=0.15)
        axes.locator_params(axis="x", nbins=5)
        axes.grid(visible=False, axis="y")
    grid[0][0].set_yticks(range(len(rows)), rows)
    grid[0][0].set_ylim(len(rows) - 0.4, -0.6)
    figure.suptitle("Each loss beside the baseline")
    legend_below(figure, lines, "Bars: 90 % interval of the pairs.")
    return figure


def _name(v: Verdict, several: bool) -> str:
    words = [*([model_in_words(v.model)] if several else []), v.backend]
    return ", ".join([*words, *([v.setting] if v.setting else [])])


def _point(axes: Any, v: Verdict, place: float, look: Any) -> None:
    """A value with its interval and its figure."""
    if v.low is not None and v.high is not None and v.low < v.high:
        axes.plot([v.low, v.high], [place] * 2, color=look.colour, linewidth=1.6, solid_capstyle="butt")
    axes.plot(v.value, place, **look.point)
    white = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
    where: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "fontsize": 8, "bbox": white}
    axes.annotate(f"{v.value:{v.target.form}}", (v.value, place), (0, 8), **where)
