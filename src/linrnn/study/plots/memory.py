"""Bar charts: the components of a step's memory, and how many sequences fit."""

from collections.abc import Sequence
from typing import Any

from linrnn.core.machine import GIB
from linrnn.core.plot_style import LOSSES, OTHER, close_bars, in_words, legend_below, loss_of, subplots
from linrnn.models.facts import model_in_words
from linrnn.study.plots.select import heading, measured, named
from linrnn.study.results import Run, backend_names

IN_WORDS = {
    "none": "without checkpointing",
    "selective": "with selective activation checkpointing",
    "full": "with activation checkpointing",
}
# The components of memory while the loss layer runs, with their colours.
PARTS = {
    "parameters": "#AAB7C4",
    "optimizer": "#7C8DA0",
    "activations": "#DCCFA8",
    "loss layer": "#C03A2B",
}


def memory_parts(runs: Sequence[Run]) -> Any:
    """Memory by component while the loss layer runs, one bar per loss, and the measured peak of the whole step.

    Each loss is drawn from its first seed's run. If the peak lies beyond the bar, it occurs elsewhere: in the layers'
    backward pass, after the loss layer has released its memory.
    """
    firsts: dict[tuple[str, str, str, int], Run] = {}
    for run, name in named(measured(runs)):
        s = run.summary
        firsts.setdefault((s["model"], s["activation_checkpointing"], name, s["batch_size"]), run)
    several = len({batch for *_, batch in firsts}) > 1
    entries = sorted(firsts.items(), key=lambda entry: _place(*entry[0]))
    groups = list(dict.fromkeys(key[:2] for key, _ in entries))
    figure, axes = subplots(1, 1, figsize=(9, 1.5 + 0.3 * len(entries) + 0.42 * len(groups)))
    bars: dict[str, Any] = {}
    ticks: list[float] = []
    labels: list[str] = []
    place, group = 0.0, None
    for (model, checkpointing, name, batch), run in entries:
        if (model, checkpointing) != group:
            group = model, checkpointing
            place += 0.9 if ticks else 0.0
            words = IN_WORDS[checkpointing]
            axes.text(0, place - 0.55, f"{heading([run])}, {words}", fontsize=9, fontweight="bold", va="bottom")
        bars |= _bar(axes, place, run)
        ticks.append(place)
        labels.append(in_words(name) + (f", {batch} sequences" if several else ""))
        place += 1.0
    axes.set_yticks(ticks, labels)
    axes.set_ylim(place - 0.4, -1.1)
    drawn = [run for _, run in entries]
    gpus = sorted({gpu["name"] for run in drawn for gpu in run.environment.get("gpus", [])})
    commits = sorted({((run.environment.get("git") or {}).get("commit") or "unknown")[:7] for run in drawn})
    batches = sorted({f"{batch} x {run.summary['seq_len']:,} tokens" for (*_, batch), run in entries})
    note = "; ".join([*gpus, *batches, f"commit {', '.join(commits)}", "n = 1 a bar"])
    close_bars(figure, axes, bars, "Where the memory of a training step goes", "GiB while the loss layer runs", note)
    return figure


def _place(model: str, checkpointing: str, name: str, batch: int) -> tuple[Any, ...]:
    """What bars are sorted by."""
    order, loss = list(LOSSES), loss_of(name)
    return model, checkpointing != "none", batch, order.index(loss) if loss in order else len(order)


def _bar(axes: Any, place: float, run: Run) -> dict[str, Any]:
    """Draw the bar of a run and its peak; returns what the legend shows."""
    drawn, left = {}, 0.0
    for kind, size in _held(run).items():
        drawn[kind] = axes.barh(place, size / GIB, left=left, color=PARTS[kind], height=0.72)
        left += size / GIB
    if peak := run.summary["peak_memory_bytes"]:
        ends = [place - 0.42, place + 0.42]
        [line] = axes.plot([peak / GIB] * 2, ends, color="black", linewidth=2, solid_capstyle="butt")
        drawn["peak of the step"] = line
        axes.text(max(peak / GIB, left), place, f"  {_gib(peak)}", va="center", fontsize=8.5)
    return drawn


def _held(run: Run) -> dict[str, float]:
    """Bytes by component; for the loss layer the larger of its two passes. Gradients of parameters come later."""
    memory = run.summary.get("memory_bytes") or {}
    of_loss = max(memory.get("loss_forward", 0), memory.get("loss_backward", 0))
    return {**{kind: memory.get(kind, 0) for kind in list(PARTS)[:-1]}, "loss layer": of_loss}


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"


def largest_batches(answers: Sequence[dict[str, Any]], title: str) -> Any:
    """The largest batch by model and loss. One panel for each kind of activation checkpointing.

    Only searches of one process with an exact result are drawn. The label of a bar: the sequences, and their ratio to
    `compiled`'s.
    """
    own = [
        (answer["activation_checkpointing"] or "none", answer["model"], name, answer["max_sequences"])
        for answer, name in zip(answers, backend_names(answers), strict=True)
        if answer["exact"] and answer["world_size"] == 1
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
