"""Speed, and the output layer's share of time and memory, against what runs differ in. One panel per model."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from linrnn.core.machine import GIB
from linrnn.core.plot_style import GREY, WIDTH, in_words, legend_below, looks, subplots
from linrnn.report.plots.select import clock_of, family, heading, measured, named
from linrnn.report.runs import Run, loss_layer_share, loss_time_share
from linrnn.runs.intervals import estimate

# What tokens/s are drawn against: the words of the axis, and the question.
AXES = {
    "batch_size": ("sequences per batch", "Does a larger batch give speed?"),
    "chunk_size": ("tokens per chunk", "Which chunk size is fastest?"),
    "seq_len": ("tokens per sequence", "What do longer sequences cost?"),
    "vocab_size": ("vocabulary size", "What does a larger vocabulary cost?"),
}
SHARED_BY = ("seq_len", "vocab_size")  # what the output layer's shares of time and memory are drawn against
CROWDED = 0.12  # two ticks that are nearer than this part of a logarithmic axis would overlap


def pareto(runs: Sequence[Run]) -> Any:
    """Tokens/s against peak memory, one panel per model. Up and to the left is better."""
    return panels(
        runs,
        x=lambda s: s["peak_memory_bytes"] / GIB,
        x_label="peak memory, GiB",
        title="Speed against memory (better: up and left)",
    )


def scaling(runs: Sequence[Run], along: str) -> Any:
    """Tokens/s against `along`, a key of AXES, one panel per model. Runs without a value of it are left out."""
    x_label, title = AXES[along]
    return panels(
        [run for run in runs if run.summary.get(along)],
        x=lambda s: s[along],
        x_label=x_label,
        title=title,
        along=along,
        from_zero=along == "seq_len",
    )


def loss_time(runs: Sequence[Run], along: str) -> Any:
    """The output layer's share of a step's time against `along` (seq_len or vocab_size), one panel per model."""
    return _shares(runs, along, loss_time_share, "output layer / step, %", "How much of the time is the output layer?")


def loss_share(runs: Sequence[Run], along: str) -> Any:
    """The output layer's share of peak memory against `along` (seq_len or vocab_size), one panel per model."""
    y_label, title = "output layer / peak memory, %", "How much of the memory is the output layer?"
    return _shares(runs, along, loss_layer_share, y_label, title)


def _shares(runs: Sequence[Run], along: str, share: Callable[[Run], float | None], y_label: str, title: str) -> Any:
    """A share in per cent; runs that have none are left out."""
    return panels(
        [run for run in runs if share(run) is not None],
        x=lambda s: s[along],
        x_label=AXES[along][0],
        y=lambda run: 100 * (share(run) or 0),
        y_label=y_label,
        title=title,
        along=along,
        from_zero=True,
    )


def panels(
    runs: Sequence[Run],
    *,
    x: Callable[[dict[str, Any]], float],
    x_label: str,
    title: str,
    y: Callable[[Run], float] | None = None,
    y_label: str = "thousand tokens/s",
    along: str | None = None,
    level: float | None = None,
    from_zero: bool = False,
) -> Any:
    """One panel per model and kind of checkpointing, one colour per loss.

    A point is the median over seeds, with the 90 % interval if there are several; single seeds are pale. A line joins a
    loss's points. With `along`, these points are settings that differ only in that key. If a model has several such
    families of settings, its largest is drawn. A loss with one value of that key has no line, and is left out.

    Tokens/s start at zero, so that chance differences look as small as they are. `from_zero`: other values also start
    at zero, with one scale for all panels.
    """
    value = y or (lambda run: run.summary["tokens_per_second"] / 1e3)
    own = named(measured(runs)) if along is None else _lines(named(family(measured(runs), along)), x)
    panels = list(dict.fromkeys(_panel(run) for run, _ in own))
    columns = min(max(len(panels), 1), 2)
    rows = max(-(-len(panels) // columns), 1)
    size = (min(1.6 + 4.2 * columns, WIDTH), 1.3 + 3.1 * rows)
    figure, grid = subplots(rows, columns, figsize=size, squeeze=False, sharey=from_zero)
    for spare in grid.flat[len(panels) :]:
        spare.set_axis_off()
    found = looks(name for _, name in own)
    lines: dict[str, Any] = {}
    several = False
    for axes, panel in zip(grid.flat, panels, strict=False):
        points: dict[str, dict[Any, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
        for run, name in own:
            if _panel(run) == panel:
                points[name][x(run.summary) if along else run.setting].append((x(run.summary), value(run)))
        for name, by_setting in points.items():
            lines[in_words(name)] = _draw(axes, list(by_setting.values()), found[name])
            several |= any(len(seeds) > 1 for seeds in by_setting.values())
        if level is not None:
            axes.axhline(level, color=GREY, linewidth=0.8, zorder=1)
        _ticks(axes, sorted({x(run.summary) for run, _ in own}) if along else ())
        if y is not None:
            axes.ticklabel_format(axis="y", useOffset=False)
        axes.set_title(_heading(panel, [run for run, _ in own if _panel(run) == panel]))
        axes.set_xlabel(x_label)
    for row in grid:
        row[0].set_ylabel(f"{y_label}\n({clock_of(runs)})" if "tokens/s" in y_label else y_label)
    if from_zero or y is None:  # after all points are drawn
        for axes in grid.flat[: len(panels)]:
            axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
            axes.yaxis.set_major_formatter("{x:,.10g}")  # a tick at 2.5 is not 2
    figure.suptitle(title)
    legend_below(figure, lines, "Bars: 90 % interval over seeds. Pale: single seeds." if several else "")
    return figure


def _lines(own: Sequence[tuple[Run, str]], x: Callable[[dict[str, Any]], float]) -> list[tuple[Run, str]]:
    """The runs of losses that have several values of `x` in their panel."""
    values: dict[tuple[tuple[str, str], str], set[float]] = defaultdict(set)
    for run, name in own:
        values[_panel(run), name].add(x(run.summary))
    return [(run, name) for run, name in own if len(values[_panel(run), name]) > 1]


def _ticks(axes: Any, values: Sequence[float]) -> None:
    """Set the horizontal axis: logarithmic with ticks at `values`, or linear from zero without any."""
    if values:
        axes.set_xscale("log", base=2)
        ticks = _apart(values)
        axes.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
        axes.minorticks_off()
    else:
        axes.set_xlim(0, 1.1 * axes.get_xlim()[1])
        axes.locator_params(axis="x", nbins=6)  # more long numbers would overlap
        axes.ticklabel_format(axis="x", useOffset=False)


def _draw(axes: Any, settings: Sequence[Sequence[tuple[float, float]]], look: Any) -> Any:
    """Draw a loss's points (medians over a setting's seeds), their line and intervals, and pale single seeds."""
    middles, low, high = [], [], []
    for seeds in settings:
        found = estimate([b for _, b in seeds], ratios=False)
        middles.append((median(a for a, _ in seeds), found.value))
        low.append(found.value if found.low is None else min(found.low, found.value))
        high.append(found.value if found.high is None else max(found.high, found.value))
        if len(seeds) > 1:
            pale = {**look.point, "markersize": 4, "alpha": 0.4, "markeredgewidth": 0}
            axes.plot(*zip(*seeds, strict=True), **pale)
    order = sorted(range(len(middles)), key=lambda i: middles[i])
    xs, ys = zip(*(middles[i] for i in order), strict=True)
    low, high = ([bounds[i] for i in order] for bounds in (low, high))
    if any(a < b for a, b in zip(low, high, strict=True)):
        reach = [[y - a for y, a in zip(ys, low, strict=True)], [b - y for y, b in zip(ys, high, strict=True)]]
        axes.errorbar(xs, ys, reach, fmt="none", ecolor=look.colour, elinewidth=1.1, capsize=2.5, alpha=0.8)
    [line] = axes.plot(xs, ys, **look.line, linewidth=1.2, alpha=0.9)
    return line


def _panel(run: Run) -> tuple[str, str]:
    return run.summary["model"], run.summary["activation_checkpointing"]


def _heading(panel: tuple[str, str], runs: Sequence[Run]) -> str:
    """A panel's model, with its size if all runs share one, and its checkpointing."""
    words = heading(runs)
    return words if panel[1] == "none" else f"{words}, {panel[1]} checkpointing"


def _apart(values: Sequence[float]) -> list[float]:
    """Of rising values, those that leave enough room between ticks. The smaller of two that would overlap is kept."""
    ticks: list[float] = []
    apart = (values[-1] / values[0]) ** CROWDED
    for value in values:
        if not ticks or value > apart * ticks[-1]:
            ticks.append(value)
    return ticks
