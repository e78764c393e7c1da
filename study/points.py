"""The study's points: for each criterion our loss beside a baseline, and how a point is drawn."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.steps_rows import AGAIN
from linrnn.core.plot_style import GREY, TARGET, in_words
from linrnn.models.facts import model_in_words
from linrnn.report.runs import Run
from linrnn.report.targets import BASELINES, INCONCLUSIVE, Target, Verdict
from linrnn.report.verdicts import CONTROL, EXACT
from linrnn.runs.intervals import WITHIN
from study.criteria import BATCH, CURVES, MEMORY, MVE_LOSS, SPEED, SPEED_AT_LARGEST
from study.searches import Key
from study.step_speed import HOST, StepSpeed

# A panel's question in words, and which direction is better.
ASKED: dict[Target, tuple[str, str]] = {
    SPEED: ("Tokens/s, same batch", "more is better"),
    BATCH: ("Largest batch of 1.3B, H100 of 80 GB", "more is better"),
    SPEED_AT_LARGEST: ("Tokens/s, each loss at its largest batch", "more is better"),
    MEMORY: ("Peak memory, same batch", "less is better"),
    MVE_LOSS: ("Final training loss minus compiled's, MVE", "left: lower"),
    CURVES: ("Largest difference of training curves, MVE", "less is closer"),
}
# What a model's name has behind it, by kind of activation checkpointing.
SHORT = {"none": "", "selective": ", selective checkpointing", "full": ", checkpointing"}
LIGER = "liger"
# The points of a line of ratios, from above: the control, Liger to compiled, ours to compiled, ours to eager.
SLOTS = (AGAIN, LIGER, *BASELINES)
COMPARED = {
    BASELINES[0]: "ours / compiled",
    BASELINES[1]: "ours / eager",
    LIGER: "Liger / compiled",
    AGAIN: "control: compiled / compiled",
}
OF_LIGER = "Tokens/s, same batch, Liger"
OF_MVE = "Tokens/s, same batch, 10 M parameters"
BATCHES = re.compile(
    r", \d+( / \d+)+ x [\d,]+$"
)  # what a line's name ends with if its losses have batches of their own
ON_HOST = " (host)"  # behind a line's name if its steps wait for the host
WIDE = 5  # a panel that reaches beyond so many times its target has a logarithmic axis outside of the target


@dataclass(frozen=True)
class Row:
    """One point of the overview.

    Attributes:
        verdict: the ratio or the difference, its interval, and the answer to the criterion.
        name: the model and its setting, or the loss, in words.
        panel: what a panel of its own asks, in words; empty: the row stands in its criterion's panel.
    """

    verdict: Verdict
    name: str
    panel: str = ""


def study_rows(runs: Sequence[Run], found: Iterable[Verdict]) -> list[Row]:
    """Rows for the verdicts on `EXACT`'s peak memory that have a value, and the runs that they are about."""
    rows = []
    for verdict in found:
        if verdict.target != MEMORY or verdict.value is None:
            continue
        if verdict.backend not in (EXACT, f"{EXACT} accumulate=kahan"):
            continue
        named = re.search(r"checkpointing (\w+)", verdict.setting)
        kind = named[1] if named else "none"
        own = [run for run in runs if run.finished and run.summary["model"] == verdict.model]
        if "checkpointing" not in verdict.setting:
            kind = own[0].summary["activation_checkpointing"]
        name = model_in_words(verdict.model, own[0].summary["size"])
        rows.append(Row(verdict, name + SHORT[kind]))
    return rows


def batch_rows(found: Iterable[tuple[Key, Verdict]]) -> list[Row]:
    """Rows for largest batches at 1.3B, with the searches that they come from."""
    return [Row(verdict, model_in_words(model, "1b3") + SHORT[kind]) for (model, kind, _), verdict in found]


def speed_rows(speeds: Sequence[StepSpeed]) -> list[Row]:
    """Rows for the speed of `EXACT` in whole steps, and for the control. Those that the host decides stand last.

    Liger's speed at 1.3B has a panel of its own, and so has the MVE, whose ratios are far larger.
    """
    own = [one for one in speeds if one.verdict.backend in (EXACT, AGAIN)]
    waiting = {one.verdict.setting for one in own if HOST in one.verdict.remark}
    rows = []
    for one in sorted(own, key=lambda one: one.verdict.setting in waiting):
        setting = one.verdict.setting
        name = _short(setting) + (ON_HOST if setting in waiting else "")
        panel = OF_MVE if " mve" in setting else ""
        rows.append(Row(one.verdict, name, panel))
    liger = [one.verdict for one in speeds if one.verdict.backend == LIGER and one.verdict.against == BASELINES[0]]
    return rows + [
        Row(verdict, _short(verdict.setting), panel=OF_LIGER) for verdict in liger if "1b3" in verdict.setting
    ]


def difference_rows(found: Iterable[Verdict], criterion: Target, panel: str, names: Mapping[str, str]) -> list[Row]:
    """Rows of a panel of its own, for differences from compiled.

    Args:
        names: for each loss, as reports name it, the words for its line.
    """
    own = {v.backend: v for v in found if v.target == criterion and v.against == BASELINES[0] and v.value is not None}
    return [Row(own[backend], words, panel=panel) for backend, words in names.items() if backend in own]


def peak_rows(found: Iterable[Verdict]) -> list[Row]:
    """Rows for the peak memory of `EXACT` in whole steps at 1.3B."""
    return [Row(v, _short(v.setting)) for v in found if v.backend == EXACT and "1b3" in v.setting]


def _short(setting: str) -> str:
    setting = BATCHES.sub("", setting).replace(", V = 128,256", "").replace("cuda_graph=true", "CUDA graph")
    return setting.replace(", full checkpointing", SHORT["full"])


def loss_rows(found: Iterable[Verdict]) -> list[Row]:
    """Rows for the training losses of all losses against compiled, the control last."""
    own = [v for v in found if v.target in (MVE_LOSS, CURVES) and v.against == BASELINES[0] and v.value is not None]
    names = {CONTROL: f"control ({CONTROL})"}
    ordered = sorted(own, key=lambda v: (v.backend == CONTROL, v.backend == BASELINES[1]))
    return [Row(verdict, names.get(verdict.backend, in_words(verdict.backend))) for verdict in ordered]


def panels_of(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each panel: those of the criteria first, in their order. Liger's speed follows ours."""
    criteria = list(ASKED)
    keys = list(dict.fromkeys((row.verdict.target, row.panel) for row in rows))
    last = len(criteria)

    def place(key: tuple[Target, str]) -> int:
        criterion, panel = key
        return criteria.index(criterion) if not panel or criterion.metric.ratio else last

    return [
        [row for row in rows if (row.verdict.target, row.panel) == key]
        for key in sorted(keys, key=lambda key: (place(key), bool(key[1])))
    ]


def draw_target(axes: Any, criterion: Target) -> Any:
    """Lines at what was asked and at no difference. Returns a line of the former, for a legend."""
    axes.axvline(1 if criterion.metric.ratio else 0, color=GREY, linewidth=0.8, zorder=1)
    targets = {criterion.bound, -criterion.bound if criterion.rule == WITHIN else criterion.bound}
    line, *_ = [axes.axvline(target, **TARGET, linestyle="-", zorder=2) for target in targets]
    return line


def question_of(rows: Sequence[Row]) -> tuple[str, str, str]:
    """What a panel asks, the target, and which direction is better, each in words."""
    criterion = rows[0].verdict.target
    words, better = ASKED.get(criterion, ("", "left: lower"))
    words = rows[0].panel or words
    target = f"{criterion.rule}{'' if criterion.rule == WITHIN else ' '}{criterion.bound:g}"
    of_whom = "asked of ours" if words == OF_LIGER else "asked"
    return words, f"{f'ratio {target}' if criterion.metric.ratio else f'{target} nats'} {of_whom}", better


def slots_of(rows: Sequence[Row]) -> list[str]:
    """What the points of a line of ratios compare, from above."""
    found = {slot_of(row) for row in rows}
    return [slot for slot in SLOTS if slot in found]


def slot_of(row: Row) -> str:
    return row.verdict.backend if row.verdict.backend in (AGAIN, LIGER) else row.verdict.against or ""


def difference_axis(axes: Any, rows: Sequence[Row]) -> None:
    """An axis of differences around 0; logarithmic outside of the target if points lie far beyond."""
    criterion = rows[0].verdict.target
    most = 1.1 * max(criterion.bound, *(abs(bound) for row in rows for bound in _bounds(row.verdict)))
    if far := most > WIDE * criterion.bound:
        axes.set_xscale("symlog", linthresh=criterion.bound, linscale=1)
    axes.set_xlim(-most if criterion.rule == WITHIN else 0, most)
    axes.xaxis.set_major_formatter("{x:g}")
    if far:
        axes.set_xticks([sign * tick for tick in (0.01, 0.1, 1) if tick < most for sign in (-1, 1)] + [0])
    else:
        axes.locator_params(axis="x", nbins=6)


def _bounds(verdict: Verdict) -> list[float]:
    return [bound for bound in (verdict.value, verdict.low, verdict.high) if bound is not None]


def point(axes: Any, verdict: Verdict, place: float, look: Any) -> None:
    """A verdict's value on the line `place`, with its interval and its figures; hollow if it is undecided."""
    bare_point(axes, verdict, place, look)
    form, low, high = verdict.target.form, verdict.low, verdict.high
    interval = "" if low is None or high is None else f" ({low:{form}} to {high:{form}})"
    words = f"{verdict.value or 0.0:{form}}{interval if verdict.target.metric.by_chance else ''}"
    axes.text(1.01, place, words, transform=axes.get_yaxis_transform(), va="center", fontsize=8, color=GREY)


def bare_point(axes: Any, verdict: Verdict, place: float, look: Any, size: float = 6.5, width: float = 1.6) -> None:
    """:func:`point` without figures.

    Args:
        size: of the marker, in points.
        width: of the interval's line, in points.
    """
    if verdict.low is not None and verdict.high is not None and verdict.low < verdict.high:
        ends = [verdict.low, verdict.high]
        axes.plot(ends, [place] * 2, color=look.colour, linewidth=width, solid_capstyle="butt")
    filling = "white" if verdict.verdict == INCONCLUSIVE else look.colour
    axes.plot(verdict.value or 0.0, place, **{**look.point, "markerfacecolor": filling, "markersize": size})


def marker_of(look: Any) -> Any:
    """What a legend shows of a look."""
    from matplotlib.lines import Line2D

    return Line2D([], [], **look.point)


def plain_ticks(axes: Any, rows: Sequence[Row]) -> None:
    """Set plain numbers as the ticks of a logarithmic axis of ratios."""
    values = [1.0, rows[0].verdict.target.bound]
    for row in rows:
        values += _bounds(row.verdict)
    low, high = min(values), max(values)
    room = (high / low) ** 0.05
    axes.set_xlim(low / room, high * room)
    steps = (0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.5, 2, 3, 4, 5, 6)
    inside = [tick for tick in steps if low / room < tick < high * room]
    if high / low > 4:
        inside = [tick for tick in inside if tick in (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5)]
    axes.set_xticks(inside, [f"{tick:g}" for tick in inside])
    axes.minorticks_off()
