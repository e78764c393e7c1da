"""A run's loss and speed as a small picture beside its summary."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

SMOOTHED = 20  # most records in a mean of the loss; a tenth of them in a short run


def draw_progress(records: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Write a PNG: loss of the steps with its running mean and the validations, and tokens/s, over the step.

    Args:
        records: of metrics.jsonl.
    """
    from matplotlib.figure import Figure  # pyplot would choose a backend for the whole process

    def curve(name: str) -> tuple[list[int], list[float]]:
        points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
        return [step for step, _ in points], [value for _, value in points]

    figure = Figure(figsize=(8, 3), layout="constrained")
    losses, speeds = figure.subplots(1, 2)
    steps, values = curve("train/loss_nats")
    window = max(1, min(SMOOTHED, len(values) // 10))
    means = [fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]
    losses.plot(steps, values, color="#BBBBBB", linewidth=0.8)
    losses.plot(steps, means, color="#0072B2", label=f"train, mean of {window}")
    losses.plot(*curve("valid/loss_nats"), "o", color="#D55E00", label="valid")
    losses.legend(frameon=False)
    speeds.plot(*curve("speed/tokens_per_second"), color="#0072B2")
    speeds.set_ylim(bottom=0)
    for axes, what in ((losses, "loss, nats"), (speeds, "tokens/s")):
        axes.set(xlabel="step", title=what)
        axes.locator_params(axis="x", integer=True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=100)
