"""The certificate of the loss's errors, on tiny problems of a CPU."""

import json

import pytest
import torch
from cce_kernels import linear_cross_entropy, reference_linear_cross_entropy

from linrnn.bench.loss import certificate
from linrnn.bench.loss.certificate import (
    CALLS,
    DTYPES,
    SHAPES,
    Row,
    calls_of,
    certify,
    make_case,
    page,
    read,
    solve,
    write,
)
from linrnn.bench.loss.problems import Shape, relative_error
from linrnn.core.errors import DataError

CPU = torch.device("cpu")
SMALL = Shape("33x24x517", 33, 24, 517)
RUN = {
    "id": "1", "command": "python certify", "device": "cpu",
    "environment": {"packages": {"torch": "2", "triton": "3"}, "git": {"commit": "abc", "dirty": False}},
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_the_truth_is_that_of_the_kernels_own_reference(name, monkeypatch):
    monkeypatch.setattr(certificate, "BLOCK_ELEMENTS", 8 * SMALL.v)  # several blocks of rows
    call = CALLS[name]
    case = make_case(SMALL, call, torch.float32, CPU)
    e, c, bias = (None if x is None else x.detach().double().requires_grad_() for x in (case.e, case.c, case.bias))
    options = {k: v for k, v in call.keywords.items() if k in ("softcap", "label_smoothing", "z_loss")}
    rows, lse = reference_linear_cross_entropy(e, c, case.target, bias=bias, reduction="none", **options)
    total = (rows * case.weight).sum() + case.lse_weight * lse.sum()
    total.backward()
    found = solve(case, call, torch.float64, None)
    assert found.loss == pytest.approx(total.item(), rel=1e-12)
    assert relative_error(found.e, e.grad[case.rows]) < 1e-12
    assert relative_error(found.c, c.grad[case.entries]) < 1e-12
    assert bias is None or relative_error(found.bias, bias.grad) < 1e-12


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CALLS)
def test_every_option_is_certified(name, dtype):
    row = certify(linear_cross_entropy, SMALL, name, dtype, CPU)
    assert row.status == "ok"
    assert row.same_bits
    assert row.loss_err < 1e-6
    assert row.worst < (1.3 if dtype == "fp32" else 1.05)
    assert (row.dbias_ratio is not None) == (name == "bias")


def test_a_wrong_gradient_shows():
    row = certify(lambda *x, **options: 1.01 * linear_cross_entropy(*x, **options), SMALL, "plain", "bf16", CPU)
    assert row.worst > 3
    assert row.loss_err == pytest.approx(0.01, rel=1e-3)


def test_what_the_kernels_refuse_or_break_on_is_a_row(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no such kernel\nwith a trace")

    monkeypatch.setitem(CALLS, "little", certificate.Call({"workspace_mib": 0.001}))
    assert certify(linear_cross_entropy, SMALL, "little", "bf16", CPU).status == "refused"
    row = certify(broken, SMALL, "plain", "bf16", CPU)
    assert (row.status, row.reason) == ("failed", "RuntimeError: no such kernel")
    assert row.worst == float("inf")


def row_of(option: str, ratio: float | None, run: str = "1", **changes) -> Row:
    return Row("s", 1, 2, 3, "bf16", option, run, de_ratio=ratio, dc_ratio=ratio and 0.5, same_bits=True, **changes)


def test_runs_add_up_and_the_worst_ratio_comes_first(tmp_path):
    write(tmp_path, [row_of("plain", 0.9), row_of("bias", 1.2)], RUN)
    failed = row_of("softcap=30", None, "2", status="failed", reason="RuntimeError: x")
    write(tmp_path, [row_of("plain", 1.0, "2"), failed], RUN | {"id": "2"})
    rows = read(tmp_path / "certificate.jsonl")
    assert [(row.option, row.run) for row in rows] == [("softcap=30", "2"), ("bias", "1"), ("plain", "2")]
    text = (tmp_path / "certificate.md").read_text()
    assert "3 calls. 1 in bf16 lie beyond 1.05, 1 failed, and 0 gave other bits" in text
    assert "| s | bf16 | bias | 1.200 |" in text
    assert "| yes | beyond 1.05 |" in text
    assert "commit abc, cpu, torch 2, triton 3" in text
    assert len((tmp_path / "runs.jsonl").read_text().splitlines()) == 2
    assert not list(tmp_path.glob("*.partial"))
    (tmp_path / "certificate.jsonl").write_text('{"shape": 1}\n')
    with pytest.raises(DataError, match="cannot be read as a certificate"):
        read(tmp_path / "certificate.jsonl")


def test_a_page_without_rows():
    assert "0 calls" in page([], [], "cpu")


def test_the_grid_has_odd_sizes_and_no_fp32_that_takes_minutes():
    assert len(SHAPES) == 12
    for size in ("n", "d", "v"):
        assert any(getattr(shape, size) % 8 for shape in SHAPES)
    calls = calls_of(SHAPES, CALLS, DTYPES)
    assert len(calls) == len(set(calls)) == (2 * 12 + 9) * len(CALLS)


def test_the_command_writes_a_certificate_and_stops_in_time(tmp_path, command, fresh_command):
    script = ["scripts/maintain/certify_loss.py", "device=cpu", f"results_dir={tmp_path}"]
    done = command(*script, "shapes=33x24x517", "options=plain,bias", "dtypes=bf16")
    assert done.returncode == 0, done.stderr
    path = tmp_path / "certificate" / "cpu" / "certificate.jsonl"
    assert {json.loads(line)["option"] for line in path.read_text().splitlines()} == {"plain", "bias"}
    done = command(*script, "shapes=33x24x517", "seconds=0")
    assert "0 seconds are over: 42 of 42 calls are not certified" in done.stdout
    done = fresh_command(*script, "options=telepathy")
    assert done.returncode
    assert "unknown: telepathy; known: plain, flat logits" in done.stderr
    runs = path.with_name("runs.jsonl").read_bytes()
    for wrong in ("seconds=soon", "shapes=telepathy"):
        done = command(*script, wrong)
        assert done.returncode
        assert wrong.split("=")[1] in done.stderr
        assert "Traceback" not in done.stderr
    assert path.with_name("runs.jsonl").read_bytes() == runs
