"""A run within the test's own process, and its losses."""

import json
from typing import Any

from linrnn.config import load_config
from linrnn.training.trainer import Trainer


def fitted(overrides: list[str]) -> Trainer:
    """The trainer of a run that has ended."""
    trainer = Trainer(load_config(overrides))
    trainer.fit()
    return trainer


def losses(trainer: Trainer) -> list[float]:
    """Of the steps in metrics.jsonl, in nats."""
    lines = [json.loads(line) for line in trainer.directory.metrics.read_text().splitlines()]
    return [line["train/loss_nats"] for line in lines if "train/loss_nats" in line]


def summary_of(trainer: Trainer) -> dict[str, Any]:
    """The content of summary.json."""
    summary = trainer.directory.read_summary()
    assert summary is not None
    return summary
