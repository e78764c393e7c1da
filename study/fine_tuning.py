"""How far fine-tuning with other losses ends from torch.compile's, for several models."""

from collections.abc import Mapping, Sequence
from typing import Any

from linrnn.core.plot_style import GREY, PALE, looks, subplots
from linrnn.report.targets import Verdict
from study.criteria import FINAL_LOSS
from study.points import point

MARGIN = FINAL_LOSS.bound  # nats
NOTE = (
    "Bars: 90 % interval of n pairs. Filled: reached or not reached. Hollow: inconclusive. Grey: ±0.01 nats, as asked. "
    "Outside of the grey band the axis is logarithmic."
)


def distances_from_compiled(found: Mapping[str, Sequence[Verdict]], words: Mapping[str, tuple[str, str]]) -> Any:
    """A line for each model and loss: the final training loss minus compiled's, in nats.

    Args:
        found: for each model, in words, its verdicts.
        words: for each loss, as reports name it, a reader's words and the label whose look it gets.
    """
    lines = [
        (model, verdict)
        for model, verdicts in found.items()
        for backend in words
        for verdict in verdicts
        if (verdict.target, verdict.against, verdict.backend) == (FINAL_LOSS, "compiled", backend)
        and verdict.value is not None
    ]
    found_looks = looks([look for _, look in words.values()])
    figure, axes = subplots(figsize=(9.5, 0.3 * len(lines) + 1.7))
    axes.set_xscale("symlog", linthresh=MARGIN, linscale=2)
    axes.axvspan(-MARGIN, MARGIN, color=PALE, zorder=0)
    axes.axvline(0, color=GREY, linewidth=0.8, zorder=1)
    for place, (model, verdict) in enumerate(lines):
        point(axes, verdict, place, found_looks[words[verdict.backend][1]])
        if place and model != lines[place - 1][0]:
            axes.axhline(place - 0.5, color=GREY, linewidth=0.5)
    axes.set_xlim(-0.012, 6)
    axes.set_xticks([-MARGIN, 0, MARGIN, 0.1, 1], [f"{-MARGIN}", "0", f"{MARGIN}", "0.1", "1"])
    axes.set_yticks(range(len(lines)), [f"{model}, {words[v.backend][0]} (n = {v.n})" for model, v in lines])
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("final training loss minus compiled's, nats")
    figure.suptitle("Fine-tuning at 350M: which losses end where torch.compile's does?")
    figure.text(0.5, 0.01, NOTE, ha="center", va="bottom", fontsize=8, color=GREY)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    return figure
