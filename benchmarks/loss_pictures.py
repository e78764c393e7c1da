"""Pictures of the output layer alone: time against memory or errors, and the first picture of the README."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.common import grouped
from benchmarks.loss_rows import AGAIN, BAR, EXACT, Row
from linrnn.core.plot_style import GREY, LOSSES, WIDTH, in_words, legend_below, looks, subplots
from linrnn.models.facts import model_in_words

SHAPES = {"gemma2_2b": "Gemma 2 2B", "llama_1b3": "Llama, 1.3 B", "mve": "MVE, 10 M", "lm_350m": "350 M"}
MEMORY = {"extra_mib": "memory beyond inputs and gradients, MiB"}
ERRORS = {"de_err": "error of dE", "dc_err": "error of dC", "dc_sum_err": "error of dC, summed over batches"}
BETTER = "(better: down and left)"
BEHIND = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.4}  # the box of a name
# Places for a point's name: offset in points, horizontal and vertical alignment. The first free place is taken.
BESIDE = [(0, -9, "center", "top"), (0, 9, "center", "bottom"), (9, 0, "left", "center"), (-9, 0, "right", "center")]
BESIDE += [(7, -7, "left", "top"), (-7, -7, "right", "top"), (7, 7, "left", "bottom"), (-7, 7, "right", "bottom")]
BESIDE += [(0, -22, "center", "top"), (0, 22, "center", "bottom")]


def filter_eps(row: Row) -> float | None:
    """The threshold that a row's text gives."""
    found = re.search(r"\bfilter_eps=(\S+)", row.backend)
    return float(found[1]) if found else None


def shape_in_words(row: Row) -> str:
    """A shape's name, without the hash of a run, and its dimensions."""
    name = SHAPES.get(row.shape, "")
    if row.trained:
        model, _, rest = row.trained.split(" (")[0].partition(" ")
        name = f"{model_in_words(model)} {rest}"
    size = f"{row.n:,} x {row.d:,} x {row.v:,}"
    return f"{name}: {size}" if name else size


def kind_in_words(row: Row) -> str:
    return f"{row.logits} logits, {row.gradients} gradients"


def tradeoff_plot(rows: Sequence[Row]) -> Any:
    """Time relative to torch.compile against extra memory, one panel a problem."""
    return _scatter(rows, MEMORY, f"The output layer alone: time against memory {BETTER}")


def error_plot(rows: Sequence[Row]) -> Any:
    """Time against the error of each gradient, and of dC summed over batches: one column a problem with thresholds."""
    filtered = {row.problem for row in rows if filter_eps(row) is not None}
    fields = {name: told for name, told in ERRORS.items() if any(getattr(row, name) is not None for row in rows)}
    own = [row for row in rows if row.problem in filtered]
    return _scatter(own, fields, f"Time against error of the gradients, relative to fp64 {BETTER}")


def _scatter(rows: Sequence[Row], fields: Mapping[str, str], title: str) -> Any:
    """Ratio of time to torch.compile's against each field, with 95 % intervals. A line joins the settings of a rule."""
    from matplotlib.ticker import LogLocator

    drawn = [row for row in _timed(rows) if any(getattr(row, field) is not None for field in fields)]
    problems, found = grouped(drawn, key=lambda row: row.problem), looks(_rules(drawn))
    panels = [(field, own) for field in fields for own in problems]
    columns = len(problems) if len(fields) > 1 else min(len(problems), 2 if len(problems) <= 4 else 3)
    lines = -(-len(panels) // columns)
    size = (min(3.4 + 3.4 * columns, WIDTH), 1.4 + 2.7 * lines + 0.19 * -(-len(found) // 2))
    figure, grid = subplots(lines, columns, figsize=size, squeeze=False)
    for panel, (field, own) in zip(grid.flat, panels, strict=False):
        there = [row for row in own if getattr(row, field) is not None]
        for rule, settings in _rules(there).items():
            places = [(max(getattr(row, field), 1) if field in MEMORY else getattr(row, field)) for row in settings]
            for x, row in zip(places, settings, strict=True):
                panel.plot([x, x], _ends(row), color=found[rule].colour, linewidth=1.5, zorder=2)
            look = {**found[rule].line, "linewidth": 1.3} if len(settings) > 1 else found[rule].point
            panel.plot(places, [row.ratio_to_compiled for row in settings], **look)
        panel.set_title(f"{shape_in_words(own[0])}\n{kind_in_words(own[0])}", fontsize=9 if columns < 3 else 8)
        panel.set(xscale="log", xlabel=fields[field])
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
        panel.xaxis.set_major_formatter("{x:g}")
        panel.xaxis.set_minor_formatter("")
        _ratio_axis(panel, there)
    for spare in grid.flat[len(panels) :]:
        spare.set_axis_off()
    for row in grid:
        row[0].set_ylabel("time / torch.compile's")
    figure.suptitle(title)
    shown = {in_words(rule): grid[0, 0].plot([], [], **look.point)[0] for rule, look in found.items()}
    legend_below(figure, shown, "Forward and backward pass. Bars: 95 % intervals.")
    return figure


def hero(rows: list[Row], shapes: Sequence[str], device: str) -> Any:
    """Time against memory of every loss on two shapes, each point named: the first picture of the README.

    Filled points have exact gradients (Row.exact), hollow points do not. Bars are 95 % intervals of the time's ratio.
    """
    own = [row for row in _timed(rows) if row.extra_mib is not None]
    figure, [panels] = subplots(1, len(shapes), figsize=(WIDTH, 5.2), squeeze=False, sharex=True, sharey=True)
    found = looks(row.label.split()[0] for row in own)
    for panel, shape in zip(panels, shapes, strict=True):
        points = [row for row in own if row.shape == shape]
        for row in points:
            look = found[row.label.split()[0]]
            filling = {} if row.exact else {"markerfacecolor": "white", "markeredgewidth": 1.8}
            panel.plot([_gib(row)] * 2, _ends(row), color=look.colour, linewidth=1.5, zorder=2)
            panel.plot(_gib(row), row.ratio_to_compiled, **{**look.point, "markersize": 10, **filling})
        memories, first = [_gib(row) for row in own if row.shape in shapes], points[0]
        panel.set(xscale="log", xlabel="memory beyond inputs and gradients")
        panel.set_xlim(min(memories) / 3, 4 * max(memories))
        ticks = {"1 MiB": 1 / 1024, "10 MiB": 10 / 1024, "100 MiB": 100 / 1024, "1 GiB": 1, "10 GiB": 10}
        panel.set_xticks(list(ticks.values()), list(ticks))
        panel.set_xticks([], minor=True)
        dimensions = f"{first.n:,} tokens, {first.d:,} dimensions, vocabulary {first.v:,}"
        panel.set_title(f"{SHAPES.get(shape, shape)}\n{dimensions}")
        _ratio_axis(panel, [row for row in own if row.shape in shapes])
    panels[0].set_ylim(panels[0].get_ylim())  # of every panel: the ticks' view interval reaches the first one alone
    panels[0].set_ylabel("forward + backward time / torch.compile's")
    figure.suptitle(f"As fast as torch.compile in less memory: the output layer alone {BETTER}")
    kind = f"{device}, {own[0].logits} logits, {own[0].gradients} gradients"
    filled = f"Filled: gradients are exact up to rounding (errors below {EXACT[own[0].dtype]:g}). Hollow: approximate."
    legend_below(figure, {}, f"{kind}. Bars: 95 % intervals.\n{filled}")
    for panel, shape in zip(panels, shapes, strict=True):  # once the panels have their places
        _name_points(panel, [row for row in own if row.shape == shape])
    return figure


def _timed(rows: Iterable[Row]) -> list[Row]:
    """The rows that are points: they have a time, and are neither the bar nor the second entry of the baseline."""
    return [row for row in rows if row.ratio_to_compiled and row.backend != BAR and not row.backend.endswith(AGAIN)]


def _ends(row: Row) -> list[float | None]:
    if row.ratio_to_compiled_low is None:
        return [row.ratio_to_compiled] * 2
    return [row.ratio_to_compiled_low, row.ratio_to_compiled_high]


def _gib(row: Row) -> float:
    return (row.extra_mib or 0) / 1024


def _rules(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows by backend without its threshold. The rows of a rule follow the order of their thresholds."""
    rules: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: -(filter_eps(row) or 0)):
        rules.setdefault(" ".join(word for word in row.label.split() if "filter_eps=" not in word), []).append(row)
    return rules


def _ratio_axis(panel: Any, rows: Sequence[Row]) -> None:
    """Ratios on a logarithmic axis, ticked with plain numbers, and a line at 1."""
    panel.axhline(1, color=GREY, linewidth=0.8, zorder=1)
    known = [1.0, *(row.ratio_to_compiled or 1.0 for row in rows)]
    low, high = min(known) / 1.12, max(known) * 1.12
    near, far = (0.7, 0.8, 0.9, 1, 1.1, 1.2), (0.25, 0.5, 0.7, 0.85, 1, 1.2, 1.5, 2, 3, 5, 10, 20, 50)
    ticks = [tick for tick in (near if high / low < 1.8 else far) if low <= tick <= high]
    panel.set_yscale("log")
    panel.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.set_yticks([], minor=True)
    panel.yaxis.set_view_interval(low, high, ignore=True)


def _name_points(panel: Any, rows: Sequence[Row]) -> None:
    """Each point's name beside the point, inside the panel, where it hides no other name or point and no baseline."""
    from matplotlib.transforms import Bbox

    renderer = panel.figure.canvas.get_renderer()
    points = {id(row): (_gib(row), row.ratio_to_compiled or 1) for row in rows}
    taken = [Bbox(panel.get_yaxis_transform().transform([(0, 1), (1, 1)]))]
    for at in points.values():
        place = panel.transData.transform(at)
        taken.append(Bbox([place - 7, place + 7]))
    for row in sorted(rows, key=lambda row: row.ratio_to_compiled or 0):
        for x, y, across, up in BESIDE:
            how: dict[str, Any] = {"xytext": (x, y), "ha": across, "va": up, "bbox": BEHIND, "fontsize": 8}
            text = panel.annotate(_peer(row), points[id(row)], textcoords="offset points", **how)
            box = text.get_window_extent(renderer)
            across_fits = panel.bbox.x0 <= box.x0 and box.x1 <= panel.bbox.x1 + 15
            inside = across_fits and panel.bbox.y0 <= box.y0 and box.y1 <= panel.bbox.y1
            if (inside and not any(box.overlaps(other) for other in taken)) or (x, y, across, up) == BESIDE[-1]:
                taken.append(box)
                break
            text.remove()


def _peer(row: Row) -> str:
    """A point's name in the README's picture."""
    loss, _, options = row.label.partition(" ")
    words = in_words(loss) if "ours" in LOSSES[loss][2] else LOSSES[loss][2]
    options = re.sub(r"workspace_mib=(\S+)", r"\1 MiB workspace", options).replace("accumulate=", "accumulating in ")
    return f"{words},\n{options}" if options else words
