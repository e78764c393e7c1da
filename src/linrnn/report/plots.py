"""Plots of runs. Each has one message and axes with units. A loss has the same colour in all of them."""

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from statistics import median
from textwrap import fill
from typing import Any

from linrnn.core.machine import GIB
from linrnn.models.facts import model_in_words
from linrnn.report.curves import SMOOTHED_STEPS, Curve, difference, smoothed
from linrnn.report.plot_style import (
    LOSSES,
    PALE,
    WIDTH,
    Look,
    in_words,
    legend_below,
    looks,
    loss_of,
    subplots,
)
from linrnn.report.runs import Run, named
from linrnn.report.verdicts import baseline_of
from linrnn.runs.intervals import estimate
from linrnn.runs.measurements import NOT_MEASURED, WALL_CLOCK, by_wall_clock

MOST_LINES = 6  # in a panel of loss curves
STEEP = 0.1  # share of steps at the start in which all losses fall alike; the axis leaves their values out
PARTS = {  # the components of memory while the output layer runs, with their colours
    "parameters": "#AAB7C4",
    "optimizer": "#7C8DA0",
    "activations": "#DCCFA8",
    "output layer": "#C03A2B",
}


# ------------------------------------------------------------------------------------- which runs belong into one plot
def clock_of(runs: Sequence[Run]) -> str:
    """How the runs' tokens/s were measured, in words. Runs that did not finish count: tables show their speeds, too."""
    kinds = {by_wall_clock(run.summary) for run in runs if run.summary["tokens_per_second"]}
    return (WALL_CLOCK if all(kinds) else "device time") if kinds else NOT_MEASURED.partition(":")[0]


def heading(runs: Sequence[Run]) -> str:
    """The model of a panel's runs, with size and number of parameters if all runs share them."""
    sizes = {(run.summary["size"], run.summary["n_parameters"]) for run in runs}
    size, n_parameters = sizes.pop() if len(sizes) == 1 else ("", None)
    return model_in_words(runs[0].summary["model"], size, n_parameters)


def measured(runs: Sequence[Run]) -> list[Run]:
    """Usable runs whose speed was measured."""
    return [run for run in runs if run.usable and run.summary["tokens_per_second"]]


def _panel(run: Run) -> tuple[str, str]:
    return run.summary["model"], run.summary["activation_checkpointing"]


# --------------------------------------------------------------------------------------------------------- loss curves
def loss_curves(runs: Sequence[Run], margin: float | None = None) -> Any:
    """Training losses; below them each loss's difference from the baseline of the same seed. One column per model.

    For each model only the setting that most runs share is drawn, because curves of different settings cannot be
    compared. A model with one loss is left out, if another model has several. A line is the mean over seeds; a band
    reaches from the lowest to the highest seed. At most six losses are drawn, the baseline among them.

    Args:
        margin: half the height of a grey band around no difference, in nats; None: no band.
    """
    courses: dict[str, dict[tuple[Any, ...], list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        if run.losses:
            courses[run.summary["model"]][run.course].append(run)
    runs = [run for of_model in courses.values() for run in max(of_model.values(), key=len)]
    baseline, labels = baseline_of(runs), list(dict.fromkeys(name for _, name in named(runs)))
    labels = sorted(labels, key=lambda label: label != baseline)[:MOST_LINES]
    losses, above = _curves(runs, labels, baseline)
    models = [model for model, own in losses.items() if len(own) > 1] or list(losses)
    size = (min(3 + 3.6 * len(models), WIDTH), 6.6)
    figure, grid = subplots(2, max(len(models), 1), figsize=size, sharex="col", height_ratios=(2, 1.2), squeeze=False)
    found, lines = looks(labels), dict[str, Any]()
    for (top, bottom), model in zip(grid.T, models, strict=False):
        lines |= {in_words(name): band(top, own, found[name]) for name, own in losses[model].items()}
        _begin_below_the_start(top, [curve for own in losses[model].values() for curve in own])
        for name, own in above[model].items():
            band(bottom, own, found[name])
        if above[model]:
            bottom.axhspan(-(margin or 0), margin or 0, color=PALE, zorder=0)
        else:
            bottom.set_yticks([])
            bottom.text(0.5, 0.5, "no two losses to compare", ha="center", va="center", transform=bottom.transAxes)
        words = heading([run for run in runs if run.summary["model"] == model])
        top.set_title(fill(words, 90 // len(models)))
        bottom.set_xlabel("optimizer step")
    grid[0][0].set_ylabel("training loss, nats per token")
    grid[1][0].set_ylabel(f"difference from\n{baseline}, nats")
    figure.suptitle("Do the losses train the same model?")
    seeds = "Bands: lowest to highest seed. " if len({run.summary["seed"] for run in runs}) > 1 else ""
    grey = "" if margin is None else f"Grey: ±{margin:g} nats."
    legend_below(figure, lines, f"Means over {SMOOTHED_STEPS} steps. {seeds}{grey}".strip())
    return figure


Curves = dict[str, dict[str, list[Curve]]]  # by model and loss, one for each run


def _curves(runs: Sequence[Run], labels: Collection[str], baseline: str) -> tuple[Curves, Curves]:
    """The smoothed losses, and their differences from the baseline's run of the same course and seed."""
    bases = {(run.course, run.summary["seed"]): run for run in runs if run.summary["loss"] == baseline}
    losses: Curves = defaultdict(lambda: defaultdict(list))
    above: Curves = defaultdict(lambda: defaultdict(list))
    for run, name in named(runs):
        if name in labels:
            losses[run.summary["model"]][name].append(smoothed(run.losses))
            base = bases.get((run.course, run.summary["seed"]))
            if base is not None and base is not run and (values := difference(run.losses, base.losses)):
                above[run.summary["model"]][name].append(values)
    return losses, above


def band(axes: Any, curves: Sequence[Curve], look: Look) -> Any:
    """The mean of several curves over their common steps, and a band from the lowest to the highest."""
    import pandas

    values = pandas.DataFrame([dict(curve) for curve in curves]).dropna(axis="columns").sort_index(axis="columns")
    if len(curves) > 1:  # outlines stay apart where bands lie on each other
        faint = {"facecolor": (look.colour, 0.08), "edgecolor": (look.colour, 0.8), "linewidth": 0.6}
        axes.fill_between(values.columns, values.min(), values.max(), **faint)
    style = {"color": look.colour, "linestyle": look.dash, "linewidth": 1.3, "alpha": 0.9}
    [line] = axes.plot(values.columns, values.mean(), **style)
    return line


def _begin_below_the_start(axes: Any, curves: Sequence[Curve]) -> None:
    """Limit the axis to values after the steep start, so that the losses' differences are visible."""
    last = max(step for curve in curves for step, _ in curve)
    rest = [value for curve in curves for step, value in curve if step >= STEEP * last]
    low, high = min(rest), max(rest)
    if high > low:
        axes.set_ylim(low - 0.03 * (high - low), high + 0.03 * (high - low))


# ------------------------------------------------------------------------------------------------ memory by component
def memory_parts(runs: Sequence[Run]) -> Any:
    """Memory by component while the output layer runs, one bar per loss, and the measured peak of the whole step.

    Each loss is drawn from its first seed's run. If the peak lies beyond the bar, it occurs elsewhere: in the layers'
    backward pass, after the output layer has released its memory.
    """
    firsts: dict[tuple[Any, ...], Run] = {}
    for run, name in named(measured(runs)):
        firsts.setdefault((*_panel(run), run.summary["batch_size"], name), run)
    order = list(LOSSES)
    entries = sorted(
        firsts, key=lambda key: (*key[:3], order.index(loss_of(key[3])) if loss_of(key[3]) in order else 99)
    )
    figure, axes = subplots(1, 1, figsize=(9, 1.5 + 0.3 * len(entries)))
    bars: dict[str, Any] = {}
    for place, key in enumerate(entries):
        memory, left = firsts[key].summary.get("memory_bytes") or {}, 0.0
        of_loss = max(memory.get("loss_forward", 0), memory.get("loss_backward", 0))  # parameters' gradients come later
        for kind, colour in PARTS.items():
            size = (of_loss if kind == "output layer" else memory.get(kind, 0)) / GIB
            bars[kind] = axes.barh(place, size, left=left, color=colour, height=0.72)
            left += size
        if peak := (firsts[key].summary["peak_memory_bytes"] or 0) / GIB:
            ends = [place - 0.42, place + 0.42]
            [bars["peak of the step"]] = axes.plot([peak] * 2, ends, color="black", linewidth=2, solid_capstyle="butt")
            axes.text(max(peak, left), place, f"  {peak:.3g} GiB", va="center", fontsize=8.5)
    told = [[model_in_words(model), in_words(name), f"{kind} checkpointing" if kind != "none" else "",
             f"{batch} sequences"] for model, kind, batch, name in entries]  # fmt: skip
    axes.set_yticks(range(len(told)), [", ".join(filter(None, words)) for words in told])
    axes.set_ylim(len(told) - 0.4, -0.6)
    gpus = sorted({gpu["name"] for run in firsts.values() for gpu in run.environment.get("gpus", [])})
    note = "; ".join([*gpus, "n = 1 a bar"])
    axes.set_xlim(0, 1.08 * axes.get_xlim()[1])  # room for the words at the bars' ends
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("GiB while the output layer runs")
    figure.suptitle("Where the memory of a training step goes")
    legend_below(figure, bars, note)
    return figure


# ------------------------------------------------------------------------------------------------ speed against others
def pareto(runs: Sequence[Run]) -> Any:
    """Tokens/s against peak memory. Up and to the left is better."""
    title = "Speed against memory (better: up and left)"
    figure, panels = _speeds(runs, lambda run: run.summary["peak_memory_bytes"] / GIB, "peak memory, GiB", title)
    for axes in panels:
        axes.set_xlim(0, 1.1 * axes.get_xlim()[1])
        axes.locator_params(axis="x", nbins=6)  # more long numbers would overlap
        axes.ticklabel_format(axis="x", useOffset=False)
    return figure


def speed_by_batch(runs: Sequence[Run]) -> Any:
    """Tokens/s against sequences per batch."""
    title = "Does a larger batch give speed?"
    figure, panels = _speeds(runs, lambda run: run.summary["batch_size"], "sequences per batch", title)
    ticks = sorted({run.summary["batch_size"] for run in measured(runs)})
    for axes in panels:
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.minorticks_off()
    return figure


def _speeds(runs: Sequence[Run], place: Callable[[Run], float], x_label: str, title: str) -> tuple[Any, list[Any]]:
    """Tokens/s against the `place` of each run: one panel per model and kind of checkpointing. The figure, its axes.

    A point is the median over seeds, with the 90 % interval if there are several; single seeds are pale. A line joins a
    loss's points. Tokens/s start at zero, so that chance differences look as small as they are.
    """
    shown = measured(runs)
    points: dict[Any, dict[str, dict[Any, list[tuple[float, float]]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for run, name in named(shown):
        points[_panel(run)][name][run.setting].append((place(run), run.summary["tokens_per_second"] / 1e3))
    columns = min(max(len(points), 1), 2)
    rows = max(-(-len(points) // columns), 1)
    size = (min(1.6 + 4.2 * columns, WIDTH), 1.3 + 3.1 * rows)
    figure, grid = subplots(rows, columns, figsize=size, squeeze=False)
    for spare in grid.flat[len(points) :]:
        spare.set_axis_off()
    found, lines = looks(name for _, name in named(shown)), dict[str, Any]()
    for axes, (panel, by_loss) in zip(grid.flat, points.items(), strict=False):
        for name, by_setting in by_loss.items():
            lines[in_words(name)] = _draw(axes, list(by_setting.values()), found[name])
        checkpointing = "" if panel[1] == "none" else f", {panel[1]} checkpointing"
        axes.set_title(f"{heading([run for run in shown if _panel(run) == panel])}{checkpointing}")
        axes.set_xlabel(x_label)
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])  # after all points are drawn
        axes.yaxis.set_major_formatter("{x:,.10g}")  # a tick at 2.5 is not 2
    for row in grid:
        row[0].set_ylabel(f"thousand tokens/s\n({clock_of(shown)})")
    figure.suptitle(title)
    legend_below(figure, lines, "Bars: 90 % interval over seeds. Pale: single seeds.")
    return figure, list(grid.flat[: len(points)])


def _draw(axes: Any, settings: Sequence[Sequence[tuple[float, float]]], look: Look) -> Any:
    """Draw a loss's points (medians over a setting's seeds), their line and intervals, and pale single seeds."""
    points = []
    for seeds in settings:
        x, found = median(x for x, _ in seeds), estimate([y for _, y in seeds], ratios=False)
        points.append((x, found.value))
        if found.low is not None and found.high is not None:
            reach = [[max(found.value - found.low, 0)], [max(found.high - found.value, 0)]]
            axes.errorbar(x, found.value, reach, fmt="none", ecolor=look.colour, elinewidth=1.1, capsize=2.5, alpha=0.8)
            axes.plot(*zip(*seeds, strict=True), **{**look.point, "markersize": 4, "alpha": 0.4, "markeredgewidth": 0})
    style = {**look.point, "linestyle": look.dash, "linewidth": 1.2, "alpha": 0.9}
    [line] = axes.plot(*zip(*sorted(points), strict=True), **style)
    return line
