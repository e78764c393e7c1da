"""A bar chart: how many sequences fit, by model and loss."""

from collections.abc import Sequence
from typing import Any

from linrnn.core.plot_style import LOSSES, OTHER, in_words, legend_below, loss_of, subplots
from linrnn.models.facts import model_in_words
from linrnn.report.runs import backend_names


def largest_batches(answers: Sequence[dict[str, Any]], title: str) -> Any:
    """The largest batch by model and loss. One panel for each kind of activation checkpointing.

    Only searches of one process with an exact result are drawn. The label of a bar: the sequences, and their ratio to
    `compiled`'s.
    """
    own = [
        (answer["activation_checkpointing"] or "none", answer["model"], name, answer["max_sequences"])
        for answer, name in zip(answers, backend_names(answers), strict=True)
        if answer["exact"] and answer.get("world_size", 1) == 1
    ]
    kinds = [kind for kind in ("none", "selective", "full") if any(kind == one[0] for one in own)]
    order = ("standard", "compiled", "liger")
    names = sorted({name for _, _, name, _ in own}, key=lambda name: [loss_of(name) != one for one in order])
    models = list(dict.fromkeys(model for _, model, _, _ in own))
    wide = len(models) > 2
    rows, columns = (max(len(kinds), 1), 1) if wide else (1, max(len(kinds), 1))
    size = (9, 0.9 + 2.9 * rows) if wide else (1 + 4 * columns, 3.9)
    figure, grid = subplots(rows, columns, figsize=size, squeeze=False)
    bars: dict[str, Any] = {}
    for axes, kind in zip(grid.flat, kinds, strict=False):
        bars |= _batch_bars(axes, {(model, name): most for one, model, name, most in own if one == kind}, models, names)
        axes.set_xticks(range(len(models)), [model_in_words(model) for model in models])
        axes.grid(visible=False, axis="x")
        axes.set_ylim(0, 1.25 * axes.get_ylim()[1])
        axes.locator_params(axis="y", integer=True, nbins=6)
        axes.set_title(f"{'no' if kind == 'none' else kind} activation checkpointing")
    lengths = {answer["seq_len"] for answer in answers}
    words = f"sequences of {lengths.pop():,} tokens" if len(lengths) == 1 else "sequences"
    for axes in grid[:, 0]:
        axes.set_ylabel(words)
    figure.suptitle(title)
    legend = {in_words(name): bars[in_words(name)] for name in names if in_words(name) in bars}
    legend_below(figure, legend, "x: ratio to torch.compile's largest batch. No bar: not searched, or not to the end.")
    return figure


def _batch_bars(axes: Any, sizes: dict[tuple[str, str], int], models: list[str], names: list[str]) -> dict[str, Any]:
    """Draw a bar for each model and loss, with its sequences above it; returns what the legend shows."""
    drawn, step = {}, 0.81 / max(len(names), 3)
    for (model, name), most in sizes.items():
        place = models.index(model) + (names.index(name) - (len(names) - 1) / 2) * step
        colour = LOSSES.get(loss_of(name), OTHER)[0]
        drawn[in_words(name)] = axes.bar(place, most, width=0.93 * step, color=colour)
        base = sizes.get((model, "compiled"))
        ratio = f"\n{most / base:.2f} x" if base and name != "compiled" else ""
        axes.text(place, most, f"{most}{ratio}", ha="center", va="bottom", fontsize=8.5)
    return drawn
