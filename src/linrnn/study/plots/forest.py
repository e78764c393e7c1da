"""The study in one picture: for each criterion our loss's ratio to a baseline, the target, and the attainable ratio."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from linrnn.core.plot_style import GREY, PALE, legend_below, looks, subplots
from linrnn.models.facts import model_in_words
from linrnn.study.criteria import BATCH, MEMORY, SPEED, SPEED_AT_LARGEST, UNDECIDED, Criterion, Verdict
from linrnn.study.older_rows import checkpointing_of
from linrnn.study.plots.select import loss_layer_share
from linrnn.study.results import Run
from linrnn.study.verdicts import free_loss_speed_up

# A panel's question in words, and which direction is better.
ASKED: dict[Criterion, tuple[str, str]] = {
    MEMORY: ("Peak memory, same batch", "less is better"),
    SPEED: ("Tokens/s, same batch", "more is better"),
    BATCH: ("Largest batch in 80 GiB", "more is better"),
    SPEED_AT_LARGEST: ("Tokens/s, each at its largest batch", "more is better"),
}
# What a model's name has behind it, by kind of activation checkpointing.
SHORT = {"none": "", "selective": ", selective checkpointing", "full": ", checkpointing"}
OFFSET = 0.2  # distance of a row's two points from its middle


@dataclass(frozen=True)
class Row:
    """One point of the forest plot.

    Attributes:
        verdict: the ratio, its interval, and the answer to the criterion.
        name: the model and its setting, in words.
        attainable: the ratio of a loss layer that takes no time or memory; None if unknown.
    """

    verdict: Verdict
    name: str
    attainable: float | None


def study_rows(runs: Sequence[Run], found: Iterable[Verdict], backend: str = "cce_kahan") -> list[Row]:
    """Rows for the verdicts on `backend` that have a value.

    Args:
        runs: the runs that the verdicts are about.
        found: the verdicts.
        backend: the loss as verdicts name it, with or without options.
    """
    rows = []
    for verdict in found:
        if verdict.criterion not in ASKED or verdict.value is None or verdict.against is None:
            continue
        if verdict.backend not in (backend, f"{backend} accumulate=kahan"):
            continue
        named = re.search(r"checkpointing (\w+)", verdict.setting)
        kind = named[1] if named else "none"
        own = [run for run in runs if run.finished and run.summary["model"] == verdict.model]
        if "checkpointing" not in verdict.setting:
            kind = checkpointing_of(own[0].summary)
        own = [run for run in own if checkpointing_of(run.summary) == kind]
        bases = [run for run in own if run.summary["loss"] == verdict.against]
        name = model_in_words(verdict.model, own[0].summary["size"])
        rows.append(Row(verdict, name + SHORT[kind], _attainable(verdict, bases)))
    return rows


def _attainable(verdict: Verdict, bases: Sequence[Run]) -> float | None:
    """The ratio of a step without any loss layer to the baseline's step."""
    if verdict.criterion is SPEED:
        values = [value for base in bases if (value := free_loss_speed_up(base)) is not None]
    elif verdict.criterion is MEMORY:
        values = [1 - share for base in bases if (share := loss_layer_share(base)) is not None]
    else:
        return None
    return median(values) if values else None


def forest(rows: Sequence[Row], title: str = "What the study asked, and what was measured") -> Any:
    """One panel per criterion, one line per model: the ratio to compiled and to eager with its 90 % interval.

    A vertical line is the target. A pale bar reaches from 1 to the ratio of a loss layer without cost. Hollow points
    are undecided.
    """
    criteria = [criterion for criterion in ASKED if any(row.verdict.criterion == criterion for row in rows)]
    names = {
        criterion: _names([row.name for row in rows if row.verdict.criterion == criterion]) for criterion in criteria
    }
    heights = [len(names[criterion]) + 0.9 for criterion in criteria]
    size = (9, 0.36 * sum(heights) + 0.62 * len(criteria) + 1.1)
    figure, grid = subplots(len(criteria), 1, figsize=size, height_ratios=heights, squeeze=False)
    baselines = [name for name in ("compiled", "standard") if any(row.verdict.against == name for row in rows)]
    found, lines = looks(baselines), {}
    for axes, criterion in zip(grid[:, 0], criteria, strict=True):
        own = [row for row in rows if row.verdict.criterion == criterion]
        for row in own:
            against = row.verdict.against or ""
            shift = (baselines.index(against) - (len(baselines) - 1) / 2) * 2 * OFFSET
            place = names[criterion].index(row.name) + shift
            if row.attainable is not None:
                bar = {"height": 0.3, "color": PALE, "zorder": 1}
                lines["attainable: a loss layer without cost"] = axes.barh(place, row.attainable - 1, left=1, **bar)
            _point(axes, row.verdict, place, found[against])
            words = f"ours / {against if against == 'compiled' else 'eager'}"
            lines.setdefault(words, _handle(found[against]))
        target = {"color": "#B2182B", "linewidth": 1.6, "linestyle": "-", "zorder": 2}
        lines["target"] = axes.axvline(criterion.target, **target)
        axes.axvline(1, color=GREY, linewidth=0.8, zorder=1)
        axes.set_yticks(range(len(names[criterion])), names[criterion])
        axes.set_ylim(len(names[criterion]) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
        axes.set_xscale("log")
        _plain_ticks(axes, own)
        words, better = ASKED[criterion]
        axes.set_title(f"{words}: ratio {criterion.rule} {criterion.target:g} asked ({better})", loc="left")
    figure.suptitle(title)
    order = [*(f"ours / {name}" for name in ("compiled", "eager")), "target", "attainable: a loss layer without cost"]
    note = "Bars on points: 90 % interval. Hollow: undecided (fewer than 5 pairs, or an interval across the target)."
    legend_below(figure, {name: lines[name] for name in order if name in lines}, note)
    return figure


def _names(names: Sequence[str]) -> list[str]:
    """Model names in order of appearance. A model with checkpointing follows the same model without it."""
    models = list(dict.fromkeys(name.split(",")[0] for name in names))
    return sorted(dict.fromkeys(names), key=lambda name: (models.index(name.split(",")[0]), "," in name))


def _point(axes: Any, verdict: Verdict, place: float, look: Any) -> None:
    value = verdict.value or 0.0
    if verdict.low is not None and verdict.high is not None and verdict.low < verdict.high:
        axes.plot([verdict.low, verdict.high], [place] * 2, color=look.colour, linewidth=1.6, solid_capstyle="butt")
    filling = "white" if verdict.verdict == UNDECIDED else look.colour
    axes.plot(value, place, **{**look.point, "markerfacecolor": filling, "markersize": 6.5})
    interval = "" if verdict.low is None or verdict.high is None else f" ({verdict.low:.2f} to {verdict.high:.2f})"
    words = f"{value:.2f}{interval if verdict.criterion.by_chance else ''}"
    axes.text(1.01, place, words, transform=axes.get_yaxis_transform(), va="center", fontsize=8, color=GREY)


def _handle(look: Any) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], **look.point)


def _plain_ticks(axes: Any, rows: Sequence[Row]) -> None:
    """Set plain numbers as the ticks of a logarithmic axis of ratios."""
    values = [1.0, rows[0].verdict.criterion.target]
    for row in rows:
        bounds = (row.verdict.value, row.verdict.low, row.verdict.high, row.attainable)
        values += [value for value in bounds if value]
    low, high = min(values), max(values)
    room = (high / low) ** 0.05
    axes.set_xlim(low / room, high * room)
    steps = (0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.5, 2, 3, 4, 5, 6)
    inside = [tick for tick in steps if low / room < tick < high * room]
    if high / low > 4:
        inside = [tick for tick in inside if tick in (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5)]
    axes.set_xticks(inside, [f"{tick:g}" for tick in inside])
    axes.minorticks_off()
