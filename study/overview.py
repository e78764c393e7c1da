"""The study at a glance: a strip for each question, with a point for each setting or loss, and what was asked."""

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.steps_rows import AGAIN
from linrnn.core.plot_style import LOSSES, WIDTH, legend_below, looks, loss_of, subplots
from linrnn.report.targets import BASELINES, INCONCLUSIVE, REACHED, Verdict
from linrnn.report.verdicts import CONTROL
from study.points import (
    COMPARED,
    LIGER,
    Row,
    bare_point,
    difference_axis,
    draw_target,
    marker_of,
    panels_of,
    plain_ticks,
    question_of,
    slot_of,
    slots_of,
)

TITLE = "The study at a glance: what was asked, and how often it was reached"
NOTE = (
    "A point is a setting or a loss. The line through it: 90 % interval. Filled: reached or not reached. "
    "Hollow: inconclusive.\n"
    "Counts leave out the control: torch.compile's loss against itself, or with its last bits moved.\n"
    "Of the filters, the two points above +0.2 nats drop small entries; the others of cce_filter sample them."
)
COUNTED = {BASELINES[0]: "against compiled", BASELINES[1]: "against eager", LIGER: "against compiled"}
SMALL = {"size": 5.0, "width": 1.0}  # of a point and its interval, in points
STRIP, GAP = 0.2, 0.42  # inches: a row of points, and the room between two strips


def overview(rows: Sequence[Row], title: str = TITLE, note: str = NOTE) -> Any:
    """A strip per question, and beside it how many points meet what was asked.

    Points of one row lie a little apart, in the order of their rows, so that none covers another.
    """
    panels = panels_of(rows)
    heights = [max(_rows_of_points(own), 2) * STRIP for own in panels]
    size = (WIDTH, sum(heights) + GAP * len(panels) + 1.1)
    figure, grid = subplots(len(panels), 1, figsize=size, height_ratios=heights, squeeze=False)
    handles: dict[str, Any] = {}
    for axes, own in zip(grid[:, 0], panels, strict=True):
        words, asked, better = question_of(own)
        axes.text(
            -0.02, 0.5, f"{words}\n{asked}; {better}", transform=axes.transAxes, ha="right", va="center", fontsize=8.5
        )
        criterion = own[0].verdict.target
        (_ratios if criterion.metric.ratio else _differences)(axes, own, handles)
        handles["asked"] = draw_target(axes, criterion)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
    figure.suptitle(title, y=1 - 0.1 / size[1])
    legend_below(figure, handles, note)
    return figure


def _rows_of_points(rows: Sequence[Row]) -> int:
    return len(slots_of(rows)) if rows[0].verdict.target.metric.ratio else len(rows)


def _ratios(axes: Any, rows: Sequence[Row], handles: dict[str, Any]) -> None:
    """A row of points for each comparison: ours to compiled, ours to eager, the control."""
    slots = [slot for slot in slots_of(rows) if slot != AGAIN] + [AGAIN] * (AGAIN in slots_of(rows))
    found = looks([*BASELINES, CONTROL, LIGER])
    for place, slot in enumerate(slots):
        own = [row.verdict for row in rows if slot_of(row) == slot]
        look = found[CONTROL if slot == AGAIN else slot]
        for number, verdict in enumerate(own):
            bare_point(axes, verdict, place + 0.6 * ((number + 0.5) / len(own) - 0.5), look, **SMALL)
        handles.setdefault(COMPARED[slot], marker_of(look))
        if slot != AGAIN:
            _count(axes, place, f"{COUNTED[slot]}: {_answers(own)}")
    axes.set_ylim(len(slots) - 0.5, -0.5)
    axes.set_xscale("log")
    plain_ticks(axes, rows)


def _differences(axes: Any, rows: Sequence[Row], handles: dict[str, Any]) -> None:
    """A row for each loss, in its colour."""
    found = looks(loss_of(row.verdict.backend) for row in rows)
    for place, row in enumerate(rows):
        loss = loss_of(row.verdict.backend)
        bare_point(axes, row.verdict, place, found[loss], **SMALL)
        handles.setdefault(f"{loss} ({LOSSES[loss][2]})" if LOSSES[loss][2] else loss, marker_of(found[loss]))
    own = [row.verdict for row in rows if row.verdict.backend != CONTROL]
    _count(axes, (len(rows) - 1) / 2, _answers(own))
    axes.set_ylim(len(rows) - 0.4, -0.6)
    difference_axis(axes, rows)


def _count(axes: Any, place: float, words: str) -> None:
    axes.text(1.02, place, words, transform=axes.get_yaxis_transform(), va="center", fontsize=8.5)


def _answers(found: Iterable[Verdict]) -> str:
    """How many of the verdicts are reached, and how many inconclusive: 5 of 12 reached, 3 inconclusive."""
    answers = [verdict.verdict for verdict in found]
    open_ones = answers.count(INCONCLUSIVE)
    return f"{answers.count(REACHED)} of {len(answers)} reached" + (f", {open_ones} inconclusive" if open_ones else "")
