"""benchmarks/before_after.py, on a CPU: this checkout beside itself, and beside one with another loss."""

import json
import shutil
from pathlib import Path

import pytest

from benchmarks import before_after
from linrnn.config import load_config
from linrnn.core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["shapes=[64x64x300]", "options=[exact]", "rounds=2", "device=cpu"]
DOUBLED = "\nexact = linear_cross_entropy\nlinear_cross_entropy = lambda *x, **o: 2 * exact(*x, **o)\n"


def measured(before: Path, folder: Path) -> list[dict]:
    before_after.run_benchmark(load_config([*SMALL, f"before={before}", f"output_dir={folder}"], "bench_before_after"))
    before_after.write_report(folder)
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("changed", [False, True])
def test_a_row_says_whether_the_bits_are_equal(changed, tmp_path):
    before = ROOT
    if changed:
        before = tmp_path / "other"
        shutil.copytree(ROOT / "kernels", before / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
        package = before / "kernels/cce_kernels/__init__.py"
        package.write_text(package.read_text() + DOUBLED)
    rows = measured(before, tmp_path)
    assert [row["label"] for row in rows] == [before_after.BEFORE, before_after.NOW]
    assert [row["equal"] for row in rows] == [True, not changed]
    assert rows[0]["ratio"] == 1
    assert all(len(row["rounds_ms"]) == 2 for row in rows)


def test_a_folder_without_kernels_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="git worktree add"):
        measured(tmp_path, tmp_path)
