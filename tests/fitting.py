"""A run within the test's own process, and what it wrote."""

import json
from pathlib import Path
from typing import Any

from linrnn.config import load_config
from linrnn.runs.metrics import read_jsonl
from linrnn.training.trainer import Trainer


def fitted(overrides: list[str]) -> Trainer:
    """The trainer of a run that has ended."""
    trainer = Trainer(load_config(overrides))
    trainer.fit()
    return trainer


def records(trainer: Trainer, key: str = "train/loss_nats") -> list[dict[str, Any]]:
    """The records of metrics.jsonl that hold this key."""
    return [record for record in read_jsonl(trainer.directory.metrics) if key in record]


def losses(trainer: Trainer) -> list[float]:
    """Of the steps in metrics.jsonl, in nats."""
    return [record["train/loss_nats"] for record in records(trainer)]


def summary_of(trainer: Trainer) -> dict[str, Any]:
    """The content of summary.json."""
    summary = trainer.directory.read_summary()
    assert summary is not None
    return summary


def processes(directory: Path) -> list[dict[str, Any]]:
    """The processes of a run, as environment.json lists them."""
    return json.loads((directory / "environment.json").read_text())["processes"]
