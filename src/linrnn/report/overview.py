"""Every run of a group in one line each, and the keys in which runs differ. It reads files alone."""

import csv
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from linrnn.config.schema import SCHEMAS
from linrnn.core.errors import DataError
from linrnn.core.files import read_object
from linrnn.core.machine import GIB
from linrnn.core.tables import show
from linrnn.runs.directory import IDENTITY, METRICS, SUMMARY, differences
from linrnn.runs.metrics import read_jsonl
from linrnn.runs.summary import duration


def overview(group: Path) -> list[str]:
    """Lines: a table of the group's runs, newest first, then the runs that differ in one key alone.

    Raises:
        DataError: the group has no run, or a file is damaged.
    """
    identities = {path.parent: read_object(path) for path in sorted(group.glob(f"*/{IDENTITY}"))}
    if not identities:
        raise DataError(f"{group} holds no run", "name a group with runs (results/<group>/<run_name>/)")
    last = {run: (run / METRICS if (run / METRICS).exists() else run / IDENTITY).stat().st_mtime for run in identities}
    runs = sorted(identities, key=lambda run: (-last[run], run.name))
    columns = ("run", "status", "steps", "loss, nats", "tokens/s", "peak, GiB", "age")
    rows = [columns, *(_row(run, time.time() - last[run]) for run in runs)]  # noqa: TID251  ages of files
    widths = [max(len(row[place]) for row in rows) for place in range(len(columns))]
    pads = (str.ljust, str.ljust, *[str.rjust] * (len(columns) - 2))
    lines = ["  ".join(pad(cell, width) for pad, cell, width in zip(pads, row, widths, strict=True)) for row in rows]
    alike = one_key_apart({run.name: identity for run, identity in identities.items()})
    return [*lines, "", *(f"differ in {key} alone: {', '.join(names)}" for key, names in alike)]


def compared(group: Path, names: Sequence[str]) -> list[str]:
    """The keys in which two runs of a group differ, a line each.

    Raises:
        DataError: a run is not there.
    """
    missing = [name for name in names if not (group / name / IDENTITY).exists()]
    if missing:
        there = ", ".join(sorted(path.parent.name for path in group.glob(f"*/{IDENTITY}")))
        raise DataError(f"{group} holds no run {', '.join(missing)}", f"runs there: {there or 'none'}")
    first, second = (read_object(group / name / IDENTITY) for name in names)
    lines = [f"{key}: {one} | {other}" for key, (one, other) in differences(first, second).items()]
    return lines or ["no key of their identity differs"]


def write_csv(group: Path, path: Path) -> int:
    """Write the metrics of all runs of a group, a row for each record with its run. Returns the number of rows.

    Raises:
        DataError: the group has no metrics, or a file is damaged.
    """
    found = sorted(group.glob(f"*/{METRICS}"))
    rows = [{"run": file.parent.name, **record} for file in found for record in read_jsonl(file)]
    if not rows:
        raise DataError(f"{group} holds no metrics", "name a group with runs (results/<group>/<run_name>/)")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as opened:
        writer = csv.DictWriter(opened, list(dict.fromkeys(column for row in rows for column in row)))
        writer.writeheader()
        writer.writerows(rows)
    return len(rows)


def one_key_apart(identities: Mapping[str, dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """Keys, with the runs that differ in this key and in no other. Another option of a group counts as one key."""
    found = []
    folded = {name: _folded(identity) for name, identity in identities.items()}
    for key in sorted({key for values in folded.values() for key in values}):
        alike = defaultdict(list)
        for name, values in folded.items():
            rest = sorted((other, str(value)) for other, value in values.items() if other != key)
            alike[tuple(rest)].append((name, str(values.get(key))))
        for runs in alike.values():
            if len({value for _, value in runs}) > 1:
                names = [name for name, _ in runs]
                leaves = {leaf for name in names for leaf in differences(identities[names[0]], identities[name])}
                found.append((leaves.pop() if len(leaves) == 1 else key, names))
    return found


def _folded(identity: Mapping[str, Any]) -> dict[str, Any]:
    """An identity with all keys of a group, such as the loss's, as one value."""
    values: dict[str, Any] = {}
    for key, value in identity.items():
        group = key.partition(".")[0]
        if group in SCHEMAS and group != "trainer":
            values[group] = (*values.get(group, ()), f"{key}={value}")
        else:
            values[key] = value
    return values


def _row(run: Path, age: float) -> tuple[str, ...]:
    summary: dict[str, Any] = {"status": "unfinished"}
    if (run / SUMMARY).exists():
        summary = read_object(run / SUMMARY)
    elif (run / METRICS).exists():
        last = (read_jsonl(run / METRICS) or [{"step": 0}])[-1]
        summary |= {"steps": last["step"], "train_loss_nats": last.get("train/loss_nats")}
    figures = [summary.get(key) for key in ("train_loss_nats", "tokens_per_second", "peak_memory_bytes")]
    shown = [show(figures[0], ".4f"), show(figures[1], ",.0f"), show(figures[2], ".2f", GIB)]
    return run.name, summary["status"], str(summary.get("steps", 0)), *shown, duration(age)
