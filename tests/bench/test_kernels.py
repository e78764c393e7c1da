"""Where the loss layer's time goes: rows, table and command on a CPU, where operators take the kernels' place."""

import pytest
import torch

from benchmarks.kernels import HOST, STEP, profiled, read


def test_a_step_comes_first_and_its_operators_follow_the_longest_first():
    rows = list(profiled(["64x32x500"], ["standard", "cce_kahan"], "peaked", torch.device("cpu")))
    for loss in ("standard", "cce_kahan"):
        own = [row for row in rows if row.loss == loss]
        step, host, kernels = own[0], own[1:3], own[3:]
        assert step.kernel == STEP
        assert tuple(row.kernel for row in host) == HOST
        assert all(row.ms > 0 for row in host)
        assert [row.ms for row in kernels] == sorted((row.ms for row in kernels), reverse=True)
        unit = step.ms / step.products
        assert all(row.ms / row.products == pytest.approx(unit) for row in kernels), "all in the same product"
    products = {row.loss: row.launches for row in rows if row.kernel == "aten::mm"}
    assert products["standard"] == 3


def test_the_command_writes_rows_and_a_page(tmp_path, command, command_here):
    script = ["benchmarks/kernels.py", "device=cpu", f"output_dir={tmp_path}"]
    done = command(*script, "shapes=[64x32x500]", "losses=[standard]")
    assert done.returncode == 0, done.stderr
    run, rows = read(tmp_path / "profile.jsonl")
    assert run["command"].startswith("python benchmarks/kernels.py")
    assert {row.loss for row in rows} == {"standard"}
    written = (tmp_path / "profile.md").read_text()
    assert command_here(*script, "measure=false").returncode == 0
    assert (tmp_path / "profile.md").read_text() == written
    assert "is not one of flat, peaked" in command_here(*script, "logits=telepathy").stderr
