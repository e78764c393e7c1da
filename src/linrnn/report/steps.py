"""Every logged step of a report's runs, as runs.json.xz holds them: losses, times, statistics of a loss, validations.

    {"RUN_NAME": {"loss_nats": {"digits": "float32", "steps": [1, 2, …], "values": […]}, "wall_step_ms": {…}, …}, …}

Values are stored exactly: metrics.jsonl holds numbers of 32 bits, whose shortest decimals stand here. Times alone are
rounded, to TIME_DIGITS decimals of a millisecond. One step of one run takes about four bytes for its loss and ten for
its times.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

LOSS = "loss_nats"
STATISTIC, VALIDATION = "loss/", "valid/perplexity"  # a prefix and a name of metrics.jsonl
# Of the records of metrics.jsonl, without their prefix `speed/`: means over `measured_steps` steps, milliseconds.
TIMES = ("wall_step_ms", "step_ms", "loss_forward_ms", "loss_backward_ms", "measured_steps")
TIME_DIGITS = 4
Series = Sequence[tuple[int, float]]  # (step, value) of every logged step that has the value, oldest first


def times_of(records: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """The series of TIMES from the records of metrics.jsonl; empty for a run whose times were not measured."""
    found: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for name in TIMES:
            if (value := record.get(f"speed/{name}")) is not None:
                found.setdefault(name, []).append((record["step"], value))
    return found


def packed(series: Mapping[str, Series]) -> dict[str, Any]:
    """A run's series as columns, by name."""
    return {name: _columns(_rounded(one)) if name in TIMES else _exact(one) for name, one in series.items()}


def unpacked(columns: Mapping[str, Any]) -> dict[str, list[tuple[int, float]]]:
    """A run's series from its columns."""
    return {name: _points(one) for name, one in columns.items()}


def _exact(series: Series) -> dict[str, Any]:
    """Columns of the values as they are, in the fewest digits that give them back."""
    values = [value for _, value in series]
    short = np.asarray(values, dtype=np.float32)
    if not np.array_equal(short.astype(np.float64), np.asarray(values, dtype=np.float64)):
        return {"digits": "float64", **_columns(series)}
    digits = [float(str(value)) for value in short]
    return {"digits": "float32", **_columns(list(zip((step for step, _ in series), digits, strict=True)))}


def _rounded(series: Series) -> list[tuple[int, float]]:
    return [(step, round(value, TIME_DIGITS)) for step, value in series]


def _columns(series: Series) -> dict[str, list[Any]]:
    return {"steps": [step for step, _ in series], "values": [value for _, value in series]}


def _points(columns: Mapping[str, Any]) -> list[tuple[int, float]]:
    values = columns["values"]
    if columns.get("digits") == "float32":
        values = np.asarray(values, dtype=np.float32).astype(np.float64).tolist()
    return list(zip(columns["steps"], values, strict=True))
