"""What float8 blocks and shared projections change in the training loss, beside what rounding alone changes."""

from collections.abc import Mapping, Sequence
from typing import Any

from linrnn.core.plot_style import GREY, PALE, looks, subplots
from linrnn.models.facts import model_in_words
from linrnn.report.targets import Verdict
from linrnn.report.verdicts import EXACT
from study.criteria import FINAL_LOSS
from study.points import point

# A panel's title, and words of the changes in it with those that a reader sees.
PANELS = {
    "Float8 blocks, and the control: compiled blocks in bf16": {"compile=blocks": "control", "float8=blocks": "float8"},
    "A shared projection of half the width": {"shared_projection_rank=": "shared projection"},
}
NOTE = (
    "Bars: 90 % interval. Filled: reached or not reached. Hollow: inconclusive. Grey: ±0.01 nats. "
    "n pairs of runs of one seed."
)


def changed_losses(found: Mapping[str, Sequence[Verdict]]) -> Any:
    """A line for each model, size and change: the final training loss with the change minus that without it.

    Args:
        found: for each size, in words, the verdicts of :func:`study.changes.changes_of_loss`.
    """
    panels: list[list[tuple[str, Verdict]]] = []
    for words in PANELS.values():
        lines = [
            (f"{model_in_words(verdict.model.split(', ')[0], '')} {size}, {told} (n = {verdict.n})", verdict)
            for change, told in words.items()
            for size, verdicts in found.items()
            for verdict in verdicts
            if (verdict.target, verdict.backend) == (FINAL_LOSS, EXACT) and f", {change}" in verdict.model
        ]
        panels.append(sorted(lines, key=lambda line: line[1].model.split(", ")[0]))
    heights = [len(lines) + 0.8 for lines in panels]
    figure, grid = subplots(len(panels), 1, figsize=(9, 0.3 * sum(heights) + 1.6), height_ratios=heights)
    look = looks([EXACT])[EXACT]
    for axes, title, lines in zip(grid, PANELS, panels, strict=True):
        axes.axvspan(-0.01, 0.01, color=PALE, zorder=0)
        axes.axvline(0, color=GREY, linewidth=0.8, zorder=1)
        for place, (_, verdict) in enumerate(lines):
            point(axes, verdict, place, look)
        axes.set_yticks(range(len(lines)), [name for name, _ in lines])
        axes.set_ylim(len(lines) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
        axes.set_title(title, loc="left", fontsize=9.5)
    grid[-1].set_xlabel(f"final training loss with the change minus that without it, nats; loss={EXACT}")
    figure.suptitle("What does the change do to the training loss?")
    figure.text(0.5, 0.02, NOTE, ha="center", va="bottom", fontsize=8, color=GREY)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    return figure
