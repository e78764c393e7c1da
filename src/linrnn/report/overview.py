"""Every run of a group in one line each, and the keys in which runs differ. It reads files alone."""

import time
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
    import pandas

    identities = {path.parent.name: read_object(path) for path in sorted(group.glob(f"*/{IDENTITY}"))}
    if not identities:
        raise _nothing(group, "run")
    rows = pandas.DataFrame([_row(group / name) for name in identities]).sort_values("age", kind="stable")
    rows["age"] = rows["age"].map(duration)
    alike = [f"differ in {key} alone: {', '.join(names)}" for key, names in one_key_apart(identities)]
    return [*rows.to_string(index=False).splitlines(), "", *alike]


def _row(run: Path) -> dict[str, Any]:
    metrics, summary = run / METRICS, run / SUMMARY
    last: dict[str, Any] = ([{}] + (read_jsonl(metrics) if metrics.exists() else []))[-1]
    unfinished = {"status": "unfinished", "steps": last.get("step", 0), "train_loss_nats": last.get("train/loss_nats")}
    done = read_object(summary) if summary.exists() else unfinished
    changed = (metrics if metrics.exists() else run / IDENTITY).stat().st_mtime
    return {
        "run": run.name,
        "status": done["status"],
        "steps": done.get("steps", 0),
        "loss, nats": show(done.get("train_loss_nats"), ".4f"),
        "tokens/s": show(done.get("tokens_per_second"), ",.0f"),
        "peak, GiB": show(done.get("peak_memory_bytes"), ".2f", GIB),
        "age": time.time() - changed,  # noqa: TID251  ages of files
    }


def _nothing(group: Path, what: str) -> DataError:
    """The error for a group that holds nothing."""
    there = sorted({path.parent.parent.name for path in group.parent.glob(f"*/*/{IDENTITY}")})
    return DataError(f"{group} holds no {what}", f"groups with runs: {', '.join(there) or 'none'}")


def compared(group: Path, names: Sequence[str]) -> list[str]:
    """The keys in which two runs of a group differ, a line each.

    Raises:
        DataError: a run is not there.
    """
    if missing := [name for name in names if not (group / name / IDENTITY).exists()]:
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
    import pandas

    found = sorted(group.glob(f"*/{METRICS}"))
    rows = pandas.DataFrame(
        [{"run": file.parent.name, **one} for file in found for one in read_jsonl(file)], dtype=object
    )
    if rows.empty:
        raise _nothing(group, "metrics")
    path.parent.mkdir(parents=True, exist_ok=True)
    rows.to_csv(path, index=False)
    return len(rows)


def one_key_apart(identities: Mapping[str, dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """Keys, with the runs that differ in this key and in no other. Another option of a group counts as one key."""
    import pandas

    folded = pandas.DataFrame({name: _folded(identity) for name, identity in identities.items()}).T.astype(str)
    found = []
    for key in sorted(folded):
        for _, alike in folded.groupby([other for other in folded if other != key], sort=False):
            if alike[key].nunique() > 1:
                names = list(alike.index)
                leaves = {leaf for name in names for leaf in differences(identities[names[0]], identities[name])}
                found.append((leaves.pop() if len(leaves) == 1 else key, names))
    return found


def _folded(identity: Mapping[str, Any]) -> dict[str, str]:
    """An identity with all keys of a group, such as the loss's, as one value."""
    values: dict[str, str] = {}
    for key, value in identity.items():
        group = key.partition(".")[0]
        one = group if group in SCHEMAS and group != "trainer" else key
        values[one] = f"{values.get(one, '')} {key}={value}"
    return values
