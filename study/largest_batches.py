"""How many sequences fit, as a multiple of torch.compile's: a dot for each model and loss."""

from collections.abc import Sequence
from typing import Any

from linrnn.models.facts import model_in_words
from linrnn.report.plot_style import GREY, LOSSES, OTHER, legend_below, loss_of, subplots
from linrnn.report.runs import backend_names
from study.measures import told

KINDS = {"none": "no activation checkpointing", "full": "full activation checkpointing"}
ORDER = ("standard", "liger", "cce_kahan")


def largest_batches(answers: Sequence[dict[str, Any]], title: str) -> Any:
    """The largest batch by model and loss, beside `compiled`'s. A panel for each kind of activation checkpointing.

    Only searches of one process with an exact result are drawn. The words beside a model: sequences of `compiled`.
    """
    own = {
        (answer["activation_checkpointing"] or "none", answer["model"], name): answer["max_sequences"]
        for answer, name in zip(answers, backend_names(answers), strict=True)
        if answer["exact"] and answer.get("world_size", 1) == 1
    }
    kinds = [kind for kind in KINDS if any(kind == one for one, _, _ in own)]
    models = list(dict.fromkeys(model for _, model, _ in own))
    size = (8, 1.7 + 0.46 * len(models))
    figure, grid = subplots(1, max(len(kinds), 1), figsize=size, sharey=True, squeeze=False)
    dots: dict[str, Any] = {}
    for axes, kind in zip(grid[0], kinds, strict=False):
        for (one, model, name), most in own.items():
            base = own.get((kind, model, "compiled"))
            if one == kind and base and name != "compiled":
                alone = name != "liger" or most != own.get((kind, model, "cce_kahan"))
                dots |= _dot(axes, models.index(model), name, (most / base, f"{most}" if alone else ""))
        axes.axvline(1, color=GREY, linewidth=1.2, zorder=1)
        axes.set_title(KINDS[kind])
        axes.set_xlabel("sequences / torch.compile's")
        axes.set_xlim(0, 1.12 * axes.get_xlim()[1])
        axes.grid(visible=False, axis="y")
    grid[0][0].set_yticks(range(len(models)), [model_in_words(model) for model in models])
    grid[0][0].set_ylim(len(models) - 0.5, -0.7)
    figure.suptitle(title)
    shown = sorted(dots, key=lambda name: ORDER.index(loss_of(name)) if loss_of(name) in ORDER else len(ORDER))
    lengths = {answer["seq_len"] for answer in answers}
    words = f"Sequences of {lengths.pop():,} tokens, one search each." if len(lengths) == 1 else "One search each."
    legend_below(figure, {told(name): dots[name] for name in shown}, words)
    return figure


def _dot(axes: Any, place: int, name: str, value: tuple[float, str]) -> dict[str, Any]:
    """A dot at a ratio, with words above it. Liger's is a ring, because ours often fits as many."""
    ratio, words = value
    colour, marker, _ = LOSSES.get(loss_of(name), OTHER)
    style: dict[str, Any] = {"markersize": 7, "color": colour, "marker": marker, "linestyle": "none"}
    if loss_of(name) == "liger":
        style |= {"marker": "o", "markersize": 13, "markerfacecolor": "none", "markeredgewidth": 1.8}
    [dot] = axes.plot(ratio, place, **style)
    axes.annotate(words, (ratio, place), (0, 9), textcoords="offset points", ha="center", fontsize=9, color=colour)
    return {name: dot}
