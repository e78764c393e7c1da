"""How much faster the filter's gradients are than compiled's, by shape, GPU and kind of logits."""

from collections.abc import Mapping, Sequence
from typing import Any

from linrnn.core.plot_style import COLOURS, GREY, TARGET, legend_below, subplots
from linrnn.report.targets import INCONCLUSIVE
from study.criteria import BACKWARD
from study.filter_speed import FilterSpeed

MARKERS = {"peaked": "o", "flat": "s"}
NOTE = "The loss layer alone. Bars: 90 % interval of the rounds. Filled: reached or not reached. Hollow: inconclusive."


def filter_speed_up(found: Mapping[str, Sequence[FilterSpeed]]) -> Any:
    """A line per shape, with a point per GPU and kind of logits.

    Args:
        found: the verdicts by the GPU's name in the legend.
    """
    shapes = list(dict.fromkeys(one.shape for own in found.values() for one in own))
    series = [(gpu, logits) for gpu in found for logits in MARKERS]
    figure, axes = subplots(figsize=(8.2, 0.42 * len(shapes) + 1.9))
    lines: dict[str, Any] = {}
    for number, (gpu, logits) in enumerate(series):
        colour = COLOURS[list(found).index(gpu)]
        look = {"color": colour, "marker": MARKERS[logits], "linestyle": "none", "markersize": 5.5}
        for one in found[gpu]:
            if one.row.logits != logits:
                continue
            place = shapes.index(one.shape) + (number - (len(series) - 1) / 2) * 0.19
            verdict = one.verdict
            axes.plot([verdict.low, verdict.high], [place] * 2, color=colour, linewidth=1.4, solid_capstyle="butt")
            filling = "white" if verdict.verdict == INCONCLUSIVE else colour
            axes.plot(verdict.value, place, **look, markerfacecolor=filling)
        [lines[f"{gpu}, {logits} logits"]] = axes.plot([], [], **look)
    lines["asked"] = axes.axvline(BACKWARD.bound, **TARGET)
    axes.axvline(1, color=GREY, linewidth=0.8)
    axes.set_yticks(range(len(shapes)), shapes)
    axes.set_ylim(len(shapes) - 0.5, -0.5)
    axes.set_xlabel("time that gradients add to a forward pass: torch.compile's over cce_filter's")
    axes.grid(visible=False, axis="y")
    figure.suptitle("The filter's gradients: how many times as fast as torch.compile's")
    counts = sorted({one.verdict.n for own in found.values() for one in own})
    legend_below(figure, lines, f"{NOTE} n = {' to '.join(map(str, counts))} rounds.")
    return figure
