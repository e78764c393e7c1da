"""Curves by training step: losses, and what a filter leaves out of the gradient. A loss's seeds form one band."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from linrnn.core.plot_style import PALE, Look, in_words, legend_below, looks, subplots
from linrnn.report.curves import SMOOTHED_STEPS, Curve, difference, smoothed
from linrnn.report.plots.select import heading, named, one_course
from linrnn.report.runs import Run
from linrnn.report.verdicts import baseline_of

MOST_LINES = 6  # in one panel
STEEP = 0.1  # share of steps at the start in which all losses fall alike; the axis leaves their values out


def loss_curves(
    runs: Sequence[Run], title: str = "Do the losses train the same model?", margin: float | None = None
) -> Any:
    """Training losses; below them each loss's difference from the baseline of the same seed. One column per model.

    For each model only the setting that most runs share is drawn, because curves of different settings cannot be
    compared. A model with one loss is left out, if another model has several. A line is the mean over seeds; a band
    reaches from the lowest to the highest seed. At most six losses are drawn, the baseline among them.

    Args:
        margin: half the height of a grey band around no difference, in nats; None: no band.
    """
    runs = one_course(runs)
    baseline = baseline_of(runs)
    labels = _first_six([name for _, name in named(runs)], baseline)
    own = [(run, name) for run, name in named(runs) if name in labels]
    models = list(dict.fromkeys(run.summary["model"] for run, _ in own))
    several = [model for model in models if len({name for run, name in own if run.summary["model"] == model}) > 1]
    models = several or models
    size = (min(3 + 3.6 * len(models), 10), 6.6)
    figure, grid = subplots(2, max(len(models), 1), figsize=size, sharex="col", height_ratios=(2, 1.2), squeeze=False)
    bases = {(run.course, run.summary["seed"]): run for run, _ in own if run.summary["loss"] == baseline}
    found, lines = looks(labels), dict[str, Any]()
    for (top, bottom), model in zip(grid.T, models, strict=False):
        of_model = [(run, name) for run, name in own if run.summary["model"] == model]
        lines |= _draw_losses(top, of_model, found)
        _draw_differences(bottom, of_model, bases, found, margin)
        words = heading([run for run, _ in of_model], "\n" if len(models) > 2 else " ")
        top.set_title(words.replace(" shared_projection_rank=", "\nshared_projection_rank=\n"))
        bottom.set_xlabel("optimizer step")
    grid[0][0].set_ylabel("training loss, nats per token")
    grid[1][0].set_ylabel(f"difference from\n{baseline}, nats")
    figure.suptitle(title)
    seeds = "Bands: lowest to highest seed. " if len({run.summary["seed"] for run in runs}) > 1 else ""
    grey = "" if margin is None else f"Grey: ±{margin:g} nats."
    legend_below(figure, lines, f"Means over {SMOOTHED_STEPS} steps. {seeds}{grey}".strip())
    return figure


def _draw_losses(axes: Any, own: Sequence[tuple[Run, str]], found: Mapping[str, Look]) -> dict[str, Any]:
    """Draw a band for each loss; returns what the legend shows."""
    curves: dict[str, list[Curve]] = defaultdict(list)
    for run, name in own:
        curves[name].append(smoothed(run.losses))
    lines = {in_words(name): band(axes, of_loss, found[name]) for name, of_loss in curves.items()}
    _begin_below_the_start(axes, [curve for of_loss in curves.values() for curve in of_loss])
    return lines


def _draw_differences(
    axes: Any,
    own: Sequence[tuple[Run, str]],
    bases: Mapping[tuple[Any, int], Run],
    found: Mapping[str, Look],
    margin: float | None,
) -> None:
    """Draw a band for each loss's differences from the run of `bases` with the same course and seed."""
    above: dict[str, list[Curve]] = defaultdict(list)
    for run, name in own:
        base = bases.get((run.course, run.summary["seed"]))
        if base is not None and base is not run and (values := difference(run.losses, base.losses)):
            above[name].append(values)
    for name, of_loss in above.items():
        band(axes, of_loss, found[name])
    if axes.lines and margin is not None:
        axes.axhspan(-margin, margin, color=PALE, zorder=0)
    elif axes.lines:
        axes.axhline(0, color=PALE, linewidth=1, zorder=0)
    else:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "no two losses to compare", ha="center", va="center", transform=axes.transAxes)


def dropped_mass(runs: Sequence[Run]) -> Any:
    """Softmax mass that filters drop per token by step: mean and 99th percentile. One panel per model."""
    filtered = [(run, name) for run, name in named(runs) if "dropped_mass_mean" in run.statistics]
    labels = list(dict.fromkeys(name for _, name in filtered))
    models = list(dict.fromkeys(run.summary["model"] for run, _ in filtered))
    columns = min(max(len(models), 1), 2)
    rows = max(-(-len(models) // columns), 1)
    size = (2.5 + 3.6 * columns, 1.2 + 2.9 * rows)
    figure, grid = subplots(rows, columns, figsize=size, sharey=True, squeeze=False)
    for spare in grid.flat[len(models) :]:
        spare.set_axis_off()
    found, lines = looks(labels), dict[str, Any]()
    for axes, model in zip(grid.flat, models, strict=False):
        for label in labels:
            own = [run for run, name in filtered if name == label and run.summary["model"] == model]
            for key, words in (("dropped_mass_mean", "mean"), ("dropped_mass_p99", "99th percentile")):
                if curves := [run.statistics[key] for run in own if run.statistics.get(key)]:
                    look = Look(
                        found[label].colour, found[label].marker, found[label].filling, _dash(key, label, labels)
                    )
                    lines[f"{in_words(label)}, {words}"] = band(axes, curves, look)
        axes.set_title(heading([run for run, _ in filtered if run.summary["model"] == model]))
        axes.set_xlabel("optimizer step")
    for row in grid:
        row[0].set_ylabel("softmax mass not kept, of 1")
    grid[0][0].set_ylim(0, 1.02)
    figure.suptitle("How much of the gradient's mass does a filter leave out?")
    legend_below(figure, lines)
    return figure


def _dash(key: str, label: str, labels: Sequence[str]) -> Any:
    """The dash of a line: solid for the mean, dotted for the percentile; other dashes for a second filter."""
    mean, percentile = (("-", ":"), ("--", (0, (1, 4))), ("-.", (0, (4, 1, 1, 1, 1, 1))))[min(labels.index(label), 2)]
    return mean if key == "dropped_mass_mean" else percentile


def band(axes: Any, curves: Sequence[Curve], look: Look) -> Any:
    """The mean of several curves over their common steps, and a band from the lowest to the highest."""
    common = set.intersection(*({step for step, _ in curve} for curve in curves))
    values: dict[int, list[float]] = defaultdict(list)
    for curve in curves:
        for step, value in curve:
            if step in common:
                values[step].append(value)
    steps = sorted(values)
    means = [fmean(values[step]) for step in steps]
    if len(curves) > 1:
        low, high = ([bound(values[step]) for step in steps] for bound in (min, max))
        # Outlines stay apart where bands lie on each other.
        faint = {"facecolor": (look.colour, 0.08), "edgecolor": (look.colour, 0.8), "linewidth": 0.6}
        axes.fill_between(steps, low, high, **faint)
    [line] = axes.plot(steps, means, color=look.colour, linestyle=look.dash, linewidth=1.3, alpha=0.9)
    return line


def _begin_below_the_start(axes: Any, curves: Sequence[Curve]) -> None:
    """Limit the axis to values after the steep start, so that the losses' differences are visible."""
    last = max(step for curve in curves for step, _ in curve)
    rest = [value for curve in curves for step, value in curve if step >= STEEP * last]
    low, high = min(rest), max(rest)
    if high > low:
        axes.set_ylim(low - 0.03 * (high - low), high + 0.03 * (high - low))


def _first_six(names: Sequence[str], baseline: str) -> list[str]:
    """The baseline, and as many other losses as fit in a panel."""
    labels = list(dict.fromkeys(names))
    return [label for label in labels if label in sorted(labels, key=lambda label: label != baseline)[:MOST_LINES]]
