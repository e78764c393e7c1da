"""The list of a group's runs says what each did, which differ in one key alone, and what is missing."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from linrnn.config import load_config
from linrnn.config.bounds import check_outputs
from linrnn.core.errors import DataError
from linrnn.report.overview import compared, overview, write_csv

IDENTITY = {"model.name": "gla", "loss.name": "standard", "optimizer.lr": 1e-3, "seed": 0}
LINEAR = {"loss.name": "cce_kahan", "loss.accumulate": "kahan"}
RUNS: dict[str, dict[str, Any]] = {
    "a": {}, "b": LINEAR, "c": {"seed": 1}, "d": {"optimizer.lr": 2e-3}, "e": {"seed": 2, "model.name": "kda"},
}  # fmt: skip


@pytest.fixture
def group(tmp_path: Path) -> Path:
    for name, own in RUNS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "identity.json").write_text(json.dumps(IDENTITY | own))
    summary = {"status": "finished", "steps": 20, "train_loss_nats": 1.5, "tokens_per_second": 12345.6}
    (tmp_path / "a" / "summary.json").write_text(json.dumps(summary | {"peak_memory_bytes": 3 * 2**30}))
    (tmp_path / "b" / "metrics.jsonl").write_text('{"step": 7, "train/loss_nats": 2.25}\n')
    return tmp_path


def test_a_line_for_each_run_and_runs_that_differ_in_one_key(group):
    lines = overview(group)
    cells = {name: rest[:-1] for name, *rest in map(str.split, lines[1:6])}
    assert cells["a"] == ["finished", "20", "1.5000", "12,346", "3.00"]
    assert cells["b"] == ["unfinished", "7", "2.2500", "-", "-"]
    assert cells["e"] == ["unfinished", "0", "-", "-", "-"]
    assert lines[7:] == [
        "differ in loss alone: a, b", "differ in optimizer.lr alone: a, d", "differ in seed alone: a, c",
    ]  # fmt: skip


def test_two_runs_are_compared_key_by_key(group):
    assert compared(group, ["a", "e"]) == ["model.name: gla | kda", "seed: 0 | 2"]
    assert compared(group, ["a", "a"]) == ["no key of their identity differs"]
    with pytest.raises(DataError, match=r"(?s)holds no run nope.*a, b, c, d, e"):
        compared(group, ["a", "nope"])
    with pytest.raises(DataError, match=f"(?s)nope holds no run.*groups with runs: .*{group.name}"):
        overview(group.parent / "nope")


def test_the_metrics_of_a_group_are_written_as_csv(group):
    (group / "c" / "metrics.jsonl").write_text(
        '{"step": 1, "valid/loss_nats": 3.5}\n{"step": 2, "train/loss_nats": 3}\n'
    )
    assert write_csv(group, group / "new" / "all.csv") == 3
    with (group / "new" / "all.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["run"], row["step"], row["train/loss_nats"], row["valid/loss_nats"]) for row in rows] == [
        ("b", "7", "2.25", ""), ("c", "1", "", "3.5"), ("c", "2", "3", ""),
    ]  # fmt: skip
    check_outputs(load_config([f"csv={group / 'new' / 'all.csv'}"], "runs"))  # may be written again
    with pytest.raises(DataError, match="holds no metrics"):
        write_csv(group / "none", group / "all.csv")
