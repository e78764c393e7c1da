"""Every logged step of a report's runs: its loss and its times, in `steps.json.xz` beside runs.json.

    {"RUN_NAME": {"loss_nats": {"digits": "float32", "steps": [1, 2, …], "values": […]}, "wall_step_ms": {…}, …}, …}

A loss is stored exactly: metrics.jsonl holds numbers of 32 bits, whose shortest decimals stand here. Times are rounded
to TIME_DIGITS decimals of a millisecond. One step of one run takes about four bytes for its loss and ten for its times.
"""

import json
import lzma
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from linrnn.core.errors import DataError
from linrnn.core.files import write_bytes
from linrnn.runs.figures import speed_of_run
from linrnn.runs.summary import MEAN_OF_LAST

STEPS = "steps.json.xz"
LOSS, FINAL_LOSS = "loss_nats", "train_loss_nats"  # of a step; of a summary
# Of the records of metrics.jsonl, without their prefix `speed/`: means over `measured_steps` steps, milliseconds.
TIMES = ("wall_step_ms", "step_ms", "loss_forward_ms", "loss_backward_ms", "measured_steps")
TIME_DIGITS = 4
Series = Sequence[tuple[int, float]]  # (step, value) of every logged step that has the value, oldest first
AGAIN = "write the report again from its runs, or take both files from one commit"


def times_of(records: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """The series of TIMES from the records of metrics.jsonl; empty for a run whose times were not measured."""
    found: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for name in TIMES:
            if (value := record.get(f"speed/{name}")) is not None:
                found.setdefault(name, []).append((record["step"], value))
    return found


def write_steps(runs: Mapping[str, tuple[Series, Mapping[str, Series]]], path: Path) -> None:
    """Write the losses and times of runs, by name. Equal runs make equal bytes."""
    content = {
        name: {
            LOSS: _exact(losses),
            **{time: _columns(_rounded(series)) for time, series in times.items()},
        }
        for name, (losses, times) in runs.items()
    }
    text = json.dumps(content, separators=(",", ":"), sort_keys=True)
    write_bytes(path, lzma.compress(text.encode(), format=lzma.FORMAT_XZ, preset=9 | lzma.PRESET_EXTREME))


def read_steps(path: Path) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """By the run's name and the series' name (LOSS and TIMES) all logged steps.

    Raises:
        DataError: the file is damaged.
    """
    try:
        content = json.loads(lzma.decompress(path.read_bytes()))
        return {
            name: {LOSS: _points(series[LOSS]), **{key: _points(series[key]) for key in TIMES if key in series}}
            for name, series in content.items()
        }
    except (OSError, EOFError, lzma.LZMAError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} cannot be read ({type(error).__name__})", AGAIN) from error


def check_steps(summary: Mapping[str, Any], series: Mapping[str, Series], path: Path) -> None:
    """Check that a run's steps give the figures of its summary: the final loss, and the times that verdicts rest on.

    The final loss is checked if every one of its steps was logged.

    Raises:
        DataError: they give another figure.
    """
    found, end = _figures(series), summary["steps"]
    averaged = range(max(end - MEAN_OF_LAST, 0) + 1, end + 1)
    losses = dict(series.get(LOSS, ()))
    if averaged and all(step in losses for step in averaged):
        found[FINAL_LOSS] = fmean(losses[step] for step in averaged)
    for key, value in found.items():
        stated = _stated(summary, key)
        tolerance = 1e-9 if key == FINAL_LOSS else 10.0**-TIME_DIGITS
        if stated is not None and not abs(stated - value) <= tolerance:
            raise DataError(f"{path} gives {key} = {value} for {summary['run_name']}, whose row says {stated}", AGAIN)


def _figures(series: Mapping[str, Series]) -> dict[str, float]:
    """The times of a summary, from the logged ones."""
    records: dict[int, dict[str, float]] = {}
    for name in TIMES:
        for step, value in series.get(name, ()):
            records.setdefault(step, {})[f"speed/{name}"] = value
    for record in records.values():
        record["speed/measured_steps"] = int(record["speed/measured_steps"])
    speed = speed_of_run(list(records.values()), tokens_per_step=1)
    figures = {key: speed[key] for key in ("wall_step_ms", "step_time_ms_median") if speed[key] is not None}
    return figures | {f"loss_layer_ms.{name}": value for name, value in (speed["loss_layer_ms"] or {}).items()}


def _stated(summary: Mapping[str, Any], key: str) -> float | None:
    """The figure of a summary; None if it was not measured."""
    key, _, part = key.partition(".")
    found = summary.get(key)
    return (found or {}).get(part) if part else found


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
