"""A bar chart: the components of a step's memory."""

from collections.abc import Sequence
from typing import Any

from linrnn.core.machine import GIB
from linrnn.core.plot_style import LOSSES, close_bars, in_words, loss_of, subplots
from linrnn.report.plots.select import heading, measured, named
from linrnn.report.runs import Run

IN_WORDS = {
    "none": "without checkpointing",
    "selective": "with selective activation checkpointing",
    "full": "with activation checkpointing",
}
# The components of memory while the output layer runs, with their colours.
PARTS = {
    "parameters": "#AAB7C4",
    "optimizer": "#7C8DA0",
    "activations": "#DCCFA8",
    "output layer": "#C03A2B",
}


def memory_parts(runs: Sequence[Run]) -> Any:
    """Memory by component while the output layer runs, one bar per loss, and the measured peak of the whole step.

    Each loss is drawn from its first seed's run. If the peak lies beyond the bar, it occurs elsewhere: in the layers'
    backward pass, after the output layer has released its memory.
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
    close_bars(figure, axes, bars, "Where the memory of a training step goes", "GiB while the output layer runs", note)
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
    """Bytes by component; for the output layer the larger of its two passes. Gradients of parameters come later."""
    memory = run.summary.get("memory_bytes") or {}
    of_loss = max(memory.get("loss_forward", 0), memory.get("loss_backward", 0))
    return {**{kind: memory.get(kind, 0) for kind in list(PARTS)[:-1]}, "output layer": of_loss}


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"
