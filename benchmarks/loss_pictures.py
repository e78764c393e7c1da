"""Pictures of the output layer alone: time against memory, and beside other libraries."""

import math
import re
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from benchmarks.common import bars, grouped
from benchmarks.loss_rows import AGAIN, BAR, EXACT, FLOOR, Row
from linrnn.models.facts import model_in_words
from linrnn.report.plot_style import GREY, LOSSES, PALE, WIDTH, in_words, legend_below, looks, loss_of, subplots

SHAPES = {"gemma2_2b": "Gemma 2 2B", "llama_1b3": "Llama, 1.3 B", "mve": "MVE, 10 M", "lm_350m": "350 M"}
LOGITS = {"peaked": "trained-like", "flat": "random-init"}
NAMED = {  # one shape of the sets `grid` and `rivals_grid` for each vocabulary: the output layer of
    "8192x5120x32000": "Llama 2 13B",
    "65536x768x50257": "GPT-2",
    "16384x2048x65536": "RWKV-7 1.5B",
    "llama_1b3": "Llama 3.2 1B",
    "4096x4096x128256": "Llama 3 8B",
    "4096x7168x129280": "DeepSeek V3",
    "8192x4096x151936": "Qwen 3 8B",
    "3001x2880x201088": "gpt-oss",
    "gemma2_2b": "Gemma 2 2B",
    "8192x2560x262144": "Gemma 3 4B",
}
LIBRARIES = {  # every_rival: a library's losses, of which the picture shows the fastest on each shape; colour, marker
    "ours": (("cce_kahan",), LOSSES["cce_kahan"]),
    "torch.compile": (("compiled",), LOSSES["compiled"]),
    "QuACK": (("quack",), LOSSES["quack"]),
    "Liger": (("liger", "liger_sm90", "liger_flsce"), LOSSES["liger"]),
    "Unsloth": (("unsloth",), ("#CC79A7", "D")),
    "TRL": (("trl",), ("#56B4E9", "^")),
    "verl": (("verl",), ("#882255", "p")),
    "FLA": (("fla",), LOSSES["fla"]),
}
BETTER = "(better: down and left)"
BEHIND = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.4}  # the box of a name
# Places for a point's name: offset in points, horizontal and vertical alignment. The first free place is taken.
BESIDE = [(0, -9, "center", "top"), (0, 9, "center", "bottom"), (9, 0, "left", "center"), (-9, 0, "right", "center")]
BESIDE += [(7, -7, "left", "top"), (-7, -7, "right", "top"), (7, 7, "left", "bottom"), (-7, 7, "right", "bottom")]
BESIDE += [(0, -22, "center", "top"), (0, 22, "center", "bottom")]


def shape_in_words(row: Row) -> str:
    """A shape's name, without the hash of a run, and its dimensions."""
    name = SHAPES.get(row.shape, "")
    if row.trained:
        model, _, rest = row.trained.split(" (")[0].partition(" ")
        name = f"{model_in_words(model)} {rest}"
    size = f"{row.n:,} x {row.d:,} x {row.v:,}"
    return f"{name}: {size}" if name else size


def kind_in_words(row: Row) -> str:
    return f"{LOGITS.get(row.logits, row.logits)} logits, {row.gradients} gradients"


def on_named_shapes(rows: Sequence[Row], device: str) -> Any | None:
    """Time relative to torch.compile's of our exact loss, beside the lower bound or the fastest setting of QuACK."""
    values: dict[str, dict[str, float]] = {}
    for shape, model in NAMED.items():
        own = [row for row in _timed(rows) if row.shape == shape and row.logits == "peaked" and not row.workspace_mib]
        times: dict[str, float] = {}
        for row in own:
            loss = loss_of(row.backend)
            times[loss] = min(row.ratio_to_compiled or math.inf, times.get(loss, math.inf))
        if own and "cce_kahan" in times:
            kept = ("cce_kahan", "quack") if "quack" in times else ("cce_kahan", FLOOR)
            values[f"{model}\n{own[0].n:,} x {own[0].d:,} x {own[0].v:,}"] = {loss: times[loss] for loss in kept}
    if not values:
        return None
    if any("quack" in own for own in values.values()):
        faster = sum(own["cce_kahan"] < own["quack"] for own in values.values())
        title = f"cce_kahan is faster than QuACK on {faster} of {len(values)} models' output layers"
    else:
        low, high = (pick(own["cce_kahan"] for own in values.values()) for pick in (min, max))
        title = f"Exact gradients in {low:.2f} to {high:.2f} times torch.compile's time"
    note = f"{device}, forward and backward, trained-like logits, tokens x hidden size x vocabulary size."
    note += " Lower bound: three GEMMs." if FLOOR in next(iter(values.values())) else " QuACK: its fastest chunk size."
    return bars({"time / torch.compile's": (".2f", values)}, title, note, at=1)


def fastest_of_libraries(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """Ours with its default and the fastest loss of each library, by shape."""
    found: dict[str, dict[str, Row]] = {}
    for own in grouped(_timed(rows), key=lambda row: row.problem):
        fastest = {
            name: min(
                (row for row in own if loss_of(row.backend) in losses and row.workspace_mib is None),
                key=lambda row: row.forward_backward_ms or math.inf, default=None,
            )
            for name, (losses, _) in LIBRARIES.items()
        }  # fmt: skip
        if fastest["ours"] is not None:
            found[own[0].shape] = {name: row for name, row in fastest.items() if row is not None}
    return found


def beside_ours(row: Row, ours: Row) -> float:
    """A row's time in units of ours: the median over the rounds that both took part in."""
    return median(one / own for one, own in zip(row.rounds_ms, ours.rounds_ms, strict=True))


def of_libraries(rows: Sequence[Row], device: str) -> Any | None:
    """The time of each library's fastest loss in units of ours, a line for each shape."""
    found = fastest_of_libraries(rows)
    if not found:
        return None
    figure, axes = subplots(figsize=(8, 1.6 + 0.36 * len(found)))
    marks, first = {}, 0
    for y, own in enumerate(found.values()):
        times = {name: beside_ours(row, own["ours"]) for name, row in own.items()}
        first += min(times.values()) == 1
        axes.plot([min(times.values()), max(times.values())], [y, y], color=PALE, linewidth=2, zorder=1)
        for name, time in times.items():
            colour, marker = LIBRARIES[name][1][:2]
            [marks[name]] = axes.plot(time, y, color=colour, marker=marker, linestyle="none", markersize=8)
    axes.set_yticks(range(len(found)), [shape_in_words(own["ours"]) for own in found.values()])
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="time in units of ours, forward and backward")
    axes.set_xticks([0.9, 1, 1.25, 1.5, 2, 3, 5], ["0.9", "1", "1.25", "1.5", "2", "3", "5"])
    axes.set_xticks([], minor=True)
    figure.suptitle(f"No library's loss is faster than ours on {first} of {len(found)} output layers")
    note = f"{device}, trained-like logits, tokens x hidden size x vocabulary. The fastest setting of each library."
    legend_below(figure, marks, note)
    return figure


def hero(rows: list[Row], shapes: Sequence[str], device: str) -> Any:
    """Time against memory of every loss on two shapes, each point named.

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
    kind = f"{device}, {kind_in_words(own[0])}"
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
