"""How far losses end from a baseline's, with every seed."""

from collections.abc import Mapping, Sequence
from typing import Any

from linrnn.core.plot_style import PALE, Look, legend_below, subplots
from linrnn.report.curves import SMOOTHED_STEPS, difference
from linrnn.report.plots.learning import band
from linrnn.report.runs import Run


def distances(curves: Mapping[str, tuple[Look, Sequence[tuple[Run, Run]]]], texts: tuple[str, str], title: str) -> Any:
    """How far losses lie above a baseline's: in training by step, and in validation. A pair's runs have the same seed.

    Args:
        curves: by the words of the legend how a curve is drawn, and its pairs of a run and its baseline.
        texts: the titles of both panels, which name the text of training and of validation.
    """
    figure, (steps, ends) = subplots(1, 2, figsize=(8.6, 4.8), width_ratios=(2.6, 1))
    lines = {
        words: band(steps, [difference(run.losses, base.losses) for run, base in pairs], look)
        for words, (look, pairs) in curves.items()
    }
    for place, (look, pairs) in enumerate(curves.values()):
        above = [run.summary["valid_loss_nats"] - base.summary["valid_loss_nats"] for run, base in pairs]
        ends.plot([place] * len(above), above, **{**look.point, "markersize": 4.5, "alpha": 0.7})
    for axes, text in zip((steps, ends), texts, strict=True):
        axes.axhspan(-0.01, 0.01, color=PALE, zorder=0)
        axes.set_title(text)
    steps.set_xlabel("optimizer step")
    steps.set_ylabel("training loss minus compiled's, nats")
    ends.set_xlim(-0.6, len(curves) - 0.4)
    ends.set_xticks([])
    ends.set_xlabel("a point is a seed")
    ends.set_ylabel("validation loss minus compiled's, nats")
    figure.suptitle(title)
    [n] = {len(pairs) for _, pairs in curves.values()}
    bands = f"Means over {SMOOTHED_STEPS} steps. Bands: lowest to highest seed, n = {n}. Grey: ±0.01 nats."
    legend_below(figure, lines, bands)
    return figure
