"""A run's loss and speed as a small picture beside its summary."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SMOOTHED = 20  # most records in a mean of the loss; a tenth of them in a short run


def draw_progress(records: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Write a PNG: loss of the steps with its running mean and the validations, and tokens/s, over the step.

    Args:
        records: of metrics.jsonl.
    """
    import pandas
    from matplotlib.figure import Figure  # pyplot would choose a backend for the whole process

    names = ["train/loss_nats", "valid/loss_nats", "speed/tokens_per_second"]
    table = pandas.DataFrame(records).set_index("step").reindex(columns=names).astype(float)
    train, valid, speed = (table[name].dropna() for name in names)
    window = max(1, min(SMOOTHED, len(train) // 10))
    figure = Figure(figsize=(8, 3), layout="constrained")
    losses, speeds = figure.subplots(1, 2)
    losses.plot(train, color="#BBBBBB", linewidth=0.8)
    losses.plot(train.rolling(window, min_periods=1).mean(), color="#0072B2", label=f"train, mean of {window}")
    losses.plot(valid, "o", color="#D55E00", label="valid")
    losses.legend(frameon=False)
    speeds.plot(speed, color="#0072B2")
    speeds.set_ylim(bottom=0)
    for axes, what in ((losses, "loss, nats"), (speeds, "tokens/s")):
        axes.set(xlabel="step", title=what)
        axes.locator_params(axis="x", integer=True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=100)
