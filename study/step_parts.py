"""Bar chart: what a training step's time divides into, a bar a model."""

from collections.abc import Mapping
from typing import Any

from linrnn.report.plot_style import close_bars, subplots

# The drawn parts of a step: their words, the parts of a breakdown that they hold, and their colours.
PARTS = {
    "linear layers of the mixer": (("mixer/projections",), "#7C8DA0"),
    "token mixing": (("mixer/scan",), "#E0A526"),
    "MLP": (("mlp",), "#AAB7C4"),
    "output layer and loss": (("loss",), "#C03A2B"),
    "optimizer": (("optimizer",), "#DCCFA8"),
    "norms, embedding, rest": (("norms", "embedding", "the rest"), "#E4E4E4"),
}
NARROW = 0.055  # a share of a step whose label would not fit into its segment


def step_parts(steps: Mapping[str, Mapping[str, float]], title: str) -> Any:
    """The time of a step by part. The label of a segment is its share of the step.

    Args:
        steps: a model in words → seconds by part (:func:`linrnn.runs.step_parts.parts_of_step`).
    """
    figure, axes = subplots(1, 1, figsize=(9, 1.6 + 0.48 * len(steps)))
    bars = draw_parts(axes, steps)
    close_bars(figure, axes, bars, title, "ms of a step, forward and backward pass together")
    return figure


def draw_parts(axes: Any, steps: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """The bars of :func:`step_parts`; returns what a legend shows."""
    bars: dict[str, Any] = {}
    for place, parts in enumerate(steps.values()):
        left, step = 0.0, sum(parts.values())
        for words, (held, colour) in PARTS.items():
            seconds = sum(parts[part] for part in held)
            bars[words] = axes.barh(place, 1e3 * seconds, left=1e3 * left, color=colour, height=0.7)
            if seconds > NARROW * step:
                label = {
                    "ha": "center",
                    "va": "center",
                    "fontsize": 8.5,
                    "color": "white" if "loss" in held else "black",
                }
                axes.text(1e3 * (left + seconds / 2), place, f"{100 * seconds / step:.0f} %", **label)
            left += seconds
        axes.text(1e3 * left, place, f"  {1e3 * step:.0f} ms", va="center", fontsize=8.5)
    axes.set_yticks(range(len(steps)), list(steps))
    axes.invert_yaxis()
    return bars
