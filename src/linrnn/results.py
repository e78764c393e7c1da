"""Finished runs read back: summaries, environments and loss curves of a group."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linrnn.errors import DataError
from linrnn.metrics import read_jsonl
from linrnn.run_directory import ENVIRONMENT, METRICS, SUMMARY


@dataclass(frozen=True)
class Run:
    """One run's directory, read.

    Attributes:
        summary, environment: summary.json and environment.json.
        losses: (step, nats per token) of every logged step.
    """

    summary: dict[str, Any]
    environment: dict[str, Any]
    losses: list[tuple[int, float]]


def read_runs(group: Path) -> list[Run]:
    """Every run below `group` that left a summary, by name.

    Raises:
        DataError: there is none.
    """
    runs = [_read(path.parent) for path in sorted(group.glob(f"*/{SUMMARY}"))]
    if not runs:
        raise DataError(
            f"{group} holds no run with a summary", "name a group that was run: results/<group>/<run_name>/"
        )
    return runs


def _read(directory: Path) -> Run:
    records = read_jsonl(directory / METRICS) if (directory / METRICS).exists() else []
    return Run(
        summary=json.loads((directory / SUMMARY).read_text()),
        environment=json.loads((directory / ENVIRONMENT).read_text()),
        losses=[(r["step"], r["train/loss_nats"]) for r in records if r.get("train/loss_nats") is not None],
    )
