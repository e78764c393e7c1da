"""Pictures of the loss layer alone: time against memory, errors against time, and the first picture of the README."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.common import grouped
from benchmarks.loss_rows import AGAIN, BAR, EXACT, Row
from linrnn.core.plot_style import GREY, LOSSES, WIDTH, Look, in_words, legend_below, looks, power, subplots
from linrnn.models.facts import model_in_words

SHAPES = {"gemma2_2b": "Gemma 2 2B", "llama_1b3": "Llama, 1.3 B", "mve": "MVE, 10 M", "lm_350m": "350 M"}
RATIO, BARS = "time / torch.compile's", " Bars: 95 % intervals."
BEHIND = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.4}  # the box of a name
# Places for a point's name: offset in points, horizontal and vertical alignment. The first free place is taken.
BESIDE = (
    (0, -9, "center", "top"),
    (0, 9, "center", "bottom"),
    (9, 0, "left", "center"),
    (-9, 0, "right", "center"),
    (7, -7, "left", "top"),
    (-7, -7, "right", "top"),
    (7, 7, "left", "bottom"),
    (-7, 7, "right", "bottom"),
    (0, -22, "center", "top"),
    (0, 22, "center", "bottom"),
)


def filter_eps(row: Row) -> float | None:
    """The threshold that a row's text gives."""
    found = re.search(r"\bfilter_eps=(\S+)", row.backend)
    return float(found[1]) if found else None


def tradeoff_plot(rows: Sequence[Row]) -> Any:
    """Time relative to torch.compile against extra memory, one panel a problem. Down and to the left is better.

    Bars are 95 % intervals. A line joins the settings of one rule.
    """
    own = [row for row in rows if _timed(row) and row.extra_mib is not None]
    shapes = list(dict.fromkeys(row.shape for row in own))
    problems = grouped(sorted(own, key=lambda row: shapes.index(row.shape)), key=lambda row: row.problem)
    columns = min(len(problems), 2 if len(problems) <= 4 else 3)
    found = looks(_rules(own))
    figure, grid = _grid(-(-len(problems) // columns), columns, len(found))
    for panel, points in zip(grid.flat, problems, strict=False):
        memory = [max(row.extra_mib or 0, 1) for row in points]
        for rule, settings in _rules(points).items():
            for row in settings:
                _bar(panel, max(row.extra_mib or 0, 1), row, found[rule])
            places = [(max(row.extra_mib or 0, 1), row.ratio_to_compiled) for row in settings]
            joined = {**found[rule].line, "linewidth": 1.3} if len(settings) > 1 else found[rule].point
            panel.plot(*zip(*places, strict=True), **joined)
        panel.axhline(1, color=GREY, linewidth=0.8, zorder=1)
        panel.set(xscale="log", yscale="log")
        _ratio_ticks(panel.yaxis, [row.ratio_to_compiled for row in points])
        _round_ticks(panel.xaxis, memory)
        panel.set_title(f"{shape_in_words(points[0])}\n{_kind_in_words(points[0])}", fontsize=9 if columns < 3 else 8)
    for spare in grid.flat[len(problems) :]:
        spare.set_axis_off()
    for row in grid:
        row[0].set_ylabel(RATIO)
    for panel in grid.flat[max(len(problems) - columns, 0) : len(problems)]:
        panel.set_xlabel("memory beyond inputs and gradients, MiB")
    _finish(figure, found, "The loss layer alone: time against memory (better: down and left)", BARS)
    return figure


def shapes_plot(rows: Sequence[Row]) -> Any:
    """Time relative to torch.compile, a line a shape and a panel a kind of problem. Bars are 95 % intervals."""
    own = [row for row in rows if _timed(row) and row.backend not in (BAR, "compiled")]
    kinds, found = grouped(own, key=lambda row: (row.gradients, row.logits)), looks(row.label for row in own)
    shapes = {row.shape: row for row in sorted(own, key=lambda row: row.n * row.d * row.v)}
    height = {shape: place for place, shape in enumerate(shapes)}
    size = (WIDTH, 2.4 + 0.24 * len(shapes))
    figure, [panels] = subplots(1, len(kinds), figsize=size, squeeze=False, sharey=True)
    for panel, points in zip(panels, kinds, strict=True):
        for row in points:
            look, y = found[row.label], height[row.shape]
            if row.ratio_to_compiled_low is not None and row.ratio_to_compiled_high is not None:
                interval = [row.ratio_to_compiled_low, row.ratio_to_compiled_high]
                panel.plot(interval, [y, y], color=look.colour, linewidth=1.5, zorder=2)
            panel.plot([row.ratio_to_compiled], [y], **look.point)
        panel.axvline(1, color=GREY, linewidth=0.8, zorder=1)
        panel.set(xscale="log", xlabel=RATIO)
        _ratio_ticks(panel.xaxis, [row.ratio_to_compiled for row in points])
        panel.set_title(_kind_in_words(points[0]), fontsize=9)
    panels[0].set_yticks(range(len(shapes)), [shape_in_words(row) for row in shapes.values()], fontsize=8)
    _finish(figure, found, "The loss layer alone: time by shape, N x D x V (better: left)", BARS)
    return figure


def error_plot(rows: Sequence[Row]) -> Any:
    """Error of each gradient, and of dC summed over batches, against time: one column a problem.

    A line joins the settings of a rule, from the largest threshold to the smallest. Problems without a threshold are
    not drawn.
    """
    fields = {"de_err": "error of dE", "dc_err": "error of dC", "dc_sum_err": "error of dC,\nsummed over batches"}
    fields = {field: label for field, label in fields.items() if any(getattr(row, field) is not None for row in rows)}
    problems = list(dict.fromkeys(row.problem for row in rows if filter_eps(row) is not None))
    timed = [row for row in rows if _timed(row) and any(getattr(row, field) is not None for field in fields)]
    found = looks(_rules(timed))
    figure, grid = _grid(len(fields), len(problems), len(found))
    for line, (field, label) in zip(grid, fields.items(), strict=True):
        for panel, problem in zip(line, problems, strict=True):
            points = [row for row in timed if row.problem == problem and getattr(row, field) is not None]
            for rule, own in _rules(points).items():
                _errors_of_rule(panel, own, field, found[rule])
            panel.axvline(1, color=GREY, linewidth=0.8, zorder=1)
            panel.set_yscale("log")
            panel.margins(x=0.12, y=0.12)
            _powers_of_ten(panel.yaxis)
        line[0].set_ylabel(f"{label},\nrelative to fp64")
    for panel, problem in zip(grid[0], problems, strict=True):
        first = next(row for row in rows if row.problem == problem)
        words = shape_in_words(first).replace(": ", "\n")
        panel.set_title(f"{words}\n{_kind_in_words(first)}", fontsize=9)
    for panel in grid[-1]:
        panel.set_xlabel(RATIO)
    _finish(figure, found, "Error of the gradients against time (better: down and left)")
    return figure


def _errors_of_rule(panel: Any, own: list[Row], field: str, look: Look) -> None:
    """Draw a rule's settings, and a line that joins its thresholds; the largest and the smallest are named."""
    places = [(row.ratio_to_compiled, getattr(row, field)) for row in own]
    panel.plot(*zip(*places, strict=True), **look.point)
    joined = {eps: place for row, place in zip(own, places, strict=True) if (eps := filter_eps(row))}
    if joined:
        panel.plot(*zip(*joined.values(), strict=True), linewidth=1, color=look.colour)
        for eps in dict.fromkeys((max(joined), min(joined))):
            panel.annotate(power(eps), joined[eps], xytext=(6, 4), textcoords="offset points", fontsize=7)


def hero(rows: list[Row], shapes: Sequence[str], device: str) -> Any:
    """Time against memory of every loss on two shapes, each point named: the first picture of the README.

    Filled points have exact gradients (Row.exact), hollow points do not. Bars are 95 % intervals of the time's ratio.
    """
    own = [row for row in rows if _timed(row) and row.extra_mib is not None and row.backend != BAR]
    figure, [panels] = subplots(1, len(shapes), figsize=(WIDTH, 5.2), squeeze=False, sharex=True, sharey=True)
    found = looks(row.label.split()[0] for row in own)
    for panel, shape in zip(panels, shapes, strict=True):
        points = [row for row in own if row.shape == shape]
        for row in points:
            look = found[row.label.split()[0]]
            filling = {} if row.exact else {"markerfacecolor": "white", "markeredgewidth": 1.8}
            _bar(panel, _gib(row), row, look)
            panel.plot(_gib(row), row.ratio_to_compiled, **{**look.point, "markersize": 10, **filling})
        panel.axhline(1, color=GREY, linewidth=0.8, zorder=1)
        panel.set(xscale="log", yscale="log")
        memories = [_gib(row) for row in points]
        panel.set_xlim(min(memories) / 3, 4 * max(memories))
        ticks = {"1 MiB": 1 / 1024, "10 MiB": 10 / 1024, "100 MiB": 100 / 1024, "1 GiB": 1, "10 GiB": 10}
        panel.set_xticks(list(ticks.values()), list(ticks))
        panel.set_xticks([], minor=True)
        first = points[0]
        dimensions = f"{first.n:,} tokens, {first.d:,} dimensions, {first.v:,} entries"
        panel.set_title(f"{SHAPES.get(shape, shape)}\n{dimensions}")
        panel.set_xlabel("memory beyond inputs and gradients")
    _ratio_ticks(panels[0].yaxis, [row.ratio_to_compiled for row in own if row.shape in shapes])
    panels[0].set_ylim(panels[0].get_ylim())  # of every panel: the ticks' view interval reaches the first one alone
    panels[0].set_ylabel(f"forward + backward {RATIO}")
    figure.suptitle("The loss layer alone: time against memory (better: down and left)")
    kind = f"{device}, {own[0].logits} logits, {own[0].gradients} gradients"
    filled = f"Filled: gradients are exact up to rounding (errors below {EXACT[own[0].dtype]:g}). Hollow: approximate."
    note = f"{kind}. Bars: 95 % intervals.\n{filled}"
    legend_below(figure, {}, note)
    for panel, shape in zip(panels, shapes, strict=True):  # once the panels have their places
        _name_points(panel, [row for row in own if row.shape == shape])
    return figure


# -------------------------------------------------------------------------------------------------------- drawing
def _timed(row: Row) -> bool:
    """Whether the row is a point: it has a time and is not the second entry of the baseline."""
    return row.ratio_to_compiled is not None and not row.backend.endswith(AGAIN)


def _grid(rows: int, columns: int, labels: int, height: float = 2.5) -> tuple[Any, Any]:
    """Panels, with room below them for a legend of `labels` labels."""
    size = (min(3.4 + 3.4 * columns, WIDTH), 1.4 + height * rows + 0.19 * -(-labels // 2))
    return subplots(rows, columns, figsize=size, squeeze=False)


def _bar(panel: Any, x: float, row: Row, look: Look) -> None:
    if row.ratio_to_compiled_low is not None and row.ratio_to_compiled_high is not None:
        interval = [row.ratio_to_compiled_low, row.ratio_to_compiled_high]
        panel.plot([x, x], interval, color=look.colour, linewidth=1.5, zorder=2)


def _name_points(panel: Any, rows: Sequence[Row]) -> None:
    """Each point's name beside the point, inside the panel, where it hides no other name or point and no baseline."""
    from matplotlib.transforms import Bbox

    renderer = panel.figure.canvas.get_renderer()
    points = {id(row): (_gib(row), row.ratio_to_compiled or 1) for row in rows}
    baseline = panel.get_yaxis_transform().transform([(0, 1), (1, 1)])
    taken = [Bbox(baseline), *(_around(panel.transData.transform(at)) for at in points.values())]
    for row in sorted(rows, key=lambda row: row.ratio_to_compiled or 0):
        for x, y, across, up in BESIDE:
            place = {"xytext": (x, y), "ha": across, "va": up}
            text = panel.annotate(
                _peer(row), points[id(row)], textcoords="offset points", fontsize=8, **place, bbox=BEHIND
            )
            box = text.get_window_extent(renderer)
            across_fits = panel.bbox.x0 <= box.x0 and box.x1 <= panel.bbox.x1 + 15
            inside = across_fits and panel.bbox.y0 <= box.y0 and box.y1 <= panel.bbox.y1
            if (inside and not any(box.overlaps(other) for other in taken)) or (x, y, across, up) == BESIDE[-1]:
                taken.append(box)
                break
            text.remove()


def _around(point: Any) -> Any:
    from matplotlib.transforms import Bbox

    return Bbox([point - 7, point + 7])


def _peer(row: Row) -> str:
    """A point's name in the README's picture."""
    loss, _, options = row.label.partition(" ")
    words = in_words(loss) if "ours" in LOSSES[loss][2] else LOSSES[loss][2]
    options = re.sub(r"workspace_mib=(\S+)", r"\1 MiB workspace", options).replace("accumulate=", "accumulating in ")
    return f"{words},\n{options}" if options else words


def _gib(row: Row) -> float:
    return (row.extra_mib or 0) / 1024


def shape_in_words(row: Row) -> str:
    """A shape's name, without the hash of a run, and its dimensions."""
    name = SHAPES.get(row.shape, "")
    if row.trained:
        model, _, rest = row.trained.split(" (")[0].partition(" ")
        name = f"{model_in_words(model)} {rest}"
    size = f"{row.n:,} x {row.d:,} x {row.v:,}"
    return f"{name}: {size}" if name else size


def _kind_in_words(row: Row) -> str:
    return f"{row.logits} logits, {row.gradients} gradients"


def _rules(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows by backend without its threshold. The rows of a rule follow the order of their thresholds."""
    rules: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: -(filter_eps(row) or 0)):
        rules.setdefault(" ".join(word for word in row.label.split() if "filter_eps=" not in word), []).append(row)
    return rules


def _round_ticks(axis: Any, values: list[float]) -> None:
    """A few ticks of a logarithmic axis: 1, 2 and 5 times powers of ten, or fewer."""
    low, high = min(values), max(values)
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    for steps, each in (((1, 2, 5), 1), ((1, 3), 1), ((1,), 1), ((1,), 2)):
        ticks = [
            step * 10.0**k
            for k in powers
            if k % each == 0
            for step in steps
            if low / 1.7 <= step * 10.0**k <= high * 1.7
        ]
        if len(ticks) <= 4:
            break
    axis.set_ticks(ticks, [f"{tick:,.0f}" for tick in ticks])
    axis.set_ticks([], minor=True)
    axis.set_view_interval(min([low / 1.25, *ticks]), max([high * 1.25, *ticks]), ignore=True)


def _ratio_ticks(axis: Any, ratios: list[float | None]) -> None:
    """Ratios on a logarithmic axis, ticked with plain numbers."""
    known = [1.0, *(ratio for ratio in ratios if ratio is not None)]
    low, high = min(known) / 1.12, max(known) * 1.12
    near = (0.7, 0.8, 0.9, 1, 1.1, 1.2)
    steps = near if high / low < 1.8 else (0.25, 0.5, 0.7, 0.85, 1, 1.2, 1.5, 2, 3, 5, 10, 20, 50)
    ticks = [tick for tick in steps if low <= tick <= high]
    axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_ticks([], minor=True)
    axis.set_view_interval(low, high, ignore=True)


def _powers_of_ten(axis: Any) -> None:
    """Errors on a logarithmic axis, ticked at 1, 2 and 5 times powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}".replace("e-0", "e-")))
    axis.set_minor_formatter(NullFormatter())


def _finish(figure: Any, found: dict[str, Look], title: str, note: str = "") -> None:
    """Write the title, and below the panels the legend and a note."""
    from matplotlib.lines import Line2D

    figure.suptitle(title)
    lines = {in_words(label): Line2D([], [], **look.point) for label, look in found.items()}
    legend_below(figure, lines, f"Forward and backward pass.{note}")
