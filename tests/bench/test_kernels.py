"""Where the loss layer's time goes: rows, table and command on a CPU, where operators take the kernels' place."""

import json

import pytest

from benchmarks.kernels import HOST, STEP, Row


def test_the_command_writes_rows_and_a_page_step_first_then_the_longest_operators(tmp_path, command, command_here):
    script = ["benchmarks/kernels.py", "device=cpu", f"output_dir={tmp_path}"]
    done = command(*script, "shapes=[64x32x500]", "losses=[standard,cce_kahan]")
    assert done.returncode == 0, done.stderr
    rows = [Row(**json.loads(line)) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    for loss in ("standard", "cce_kahan"):
        step, *rest = [row for row in rows if row.loss == loss]
        assert step.kernel == STEP
        assert tuple(row.kernel for row in rest[:2]) == HOST
        assert all(row.ms > 0 for row in rest)
        assert [row.ms for row in rest[2:]] == sorted((row.ms for row in rest[2:]), reverse=True)
        unit = step.ms / step.products
        assert all(row.ms / row.products == pytest.approx(unit) for row in rest), "all in the same product"
    assert {row.loss: row.launches for row in rows if row.kernel == "aten::mm"}["standard"] == 3
    written = (tmp_path / "kernels.md").read_text()
    assert command_here(*script, "measure=false").returncode == 0
    assert (tmp_path / "kernels.md").read_text() == written
    assert "is not one of flat, peaked" in command_here(*script, "logits=telepathy").stderr
