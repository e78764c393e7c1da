"""Pictures of the output layer alone: time against memory, and beside other libraries."""

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from benchmarks.common import bars, grouped
from benchmarks.loss_rows import AGAIN, BAR, FLOOR, Row
from linrnn.report.plot_style import LOSSES, PALE, legend_below, loss_of, subplots

SHAPES = {"gemma2_2b": "Gemma 2 2B", "llama_1b3": "Llama, 1.3 B", "mve": "MVE, 10 M", "lm_350m": "350 M"}
LOGITS = {"peaked": "trained-like", "flat": "random-init"}
NAMED = {  # one shape of the set `grid` for each vocabulary: the output layer of
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


def shape_in_words(row: Row) -> str:
    """A shape's name and its dimensions."""
    size = f"{row.n:,} x {row.d:,} x {row.v:,}"
    return f"{SHAPES[row.shape]}: {size}" if row.shape in SHAPES else size


def kind_in_words(row: Row) -> str:
    return f"{LOGITS.get(row.logits, row.logits)} logits, {row.gradients} gradients"


def on_named_shapes(rows: Sequence[Row], device: str) -> Any | None:
    """Time relative to torch.compile's of our exact loss, beside the lower bound."""
    values: dict[str, dict[str, float]] = {}
    for shape, model in NAMED.items():
        own = [row for row in _timed(rows) if row.shape == shape and row.logits == "peaked" and not row.workspace_mib]
        times = {row.backend: row.ratio_to_compiled or math.inf for row in own}
        if "cce_kahan" in times:
            kept = {loss: times[loss] for loss in ("cce_kahan", FLOOR) if loss in times}
            values[f"{model}\n{own[0].n:,} x {own[0].d:,} x {own[0].v:,}"] = kept
    if not values:
        return None
    low, high = (pick(own["cce_kahan"] for own in values.values()) for pick in (min, max))
    note = f"{device}, forward and backward, trained-like logits, tokens x hidden size x vocabulary size."
    note += " Lower bound: three GEMMs." if FLOOR in next(iter(values.values())) else ""
    title = f"Exact gradients in {low:.2f} to {high:.2f} times torch.compile's time"
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


def _timed(rows: Iterable[Row]) -> list[Row]:
    """The rows that are points: they have a time, and are neither the bar nor the second entry of the baseline."""
    return [row for row in rows if row.ratio_to_compiled and row.backend != BAR and not row.backend.endswith(AGAIN)]
