"""The certificate of the loss's errors, on tiny problems of a CPU."""

import json
from dataclasses import asdict

import pytest
import torch
from cce_kernels import linear_cross_entropy, reference_linear_cross_entropy

from benchmarks import certificate, problems
from benchmarks.certificate import CALLS, Row, certify, make_case, read_rows, solved, write_report
from benchmarks.problems import DTYPES, Shape, relative_error
from linrnn.config import load_config
from linrnn.core.errors import ConfigError

CPU = torch.device("cpu")
SMALL = Shape("33x24x517", 33, 24, 517)


@pytest.mark.parametrize("name", CALLS)
def test_the_truth_is_that_of_the_kernels_own_reference(name, monkeypatch):
    monkeypatch.setattr(problems, "BLOCK_ELEMENTS", 8 * SMALL.v)  # several blocks of rows
    call = CALLS[name]
    case = make_case(SMALL, call, torch.float32, CPU)
    e, c, bias = (None if x is None else x.detach().double().requires_grad_() for x in (case.e, case.c, case.bias))
    options = {k: v for k, v in call.keywords.items() if k in ("softcap", "label_smoothing", "z_loss")}
    rows, lse = reference_linear_cross_entropy(e, c, case.target, bias=bias, reduction="none", **options)
    total = (rows * case.weight).sum() + case.lse_weight * lse.sum()
    total.backward()
    found = solved(case, torch.float64)
    assert found.loss == pytest.approx(total.item(), rel=1e-12)
    assert relative_error(found.hidden_ND, e.grad[case.rows]) < 1e-12
    assert relative_error(found.weight_VD, c.grad[case.entries]) < 1e-12
    assert bias is None or relative_error(found.bias_V, bias.grad) < 1e-12


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
    failed = row_of("softcap=30", None, "2", status="failed", reason="RuntimeError: x")
    rows = row_of("plain", 0.9), row_of("bias", 1.2), row_of("plain", 1.0, "2"), failed
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    found = [(row.option, row.run) for row in read_rows(tmp_path)]
    assert found == [("softcap=30", "2"), ("bias", "1"), ("plain", "2")]
    text = write_report(tmp_path)[0].read_text()
    assert "3 calls. 1 in bf16 lie beyond 1.05, 1 failed, and 0 gave other bits" in text
    assert "* `s bf16 softcap=30`: failed. RuntimeError: x" in text
    assert "| s bf16 bias | 1.200 |" in text


def test_every_chosen_call_is_a_row_and_wrong_choices_are_refused(tmp_path):
    small = ["device=cpu", f"output_dir={tmp_path}", "shapes=[33x24x517]"]
    certificate.run_benchmark(load_config([*small, "options=[plain,bias]", "dtypes=[bf16]"], "certificate"))
    assert {row.option for row in read_rows(tmp_path)} == {"plain", "bias"}
    for wrong in ("options=[telepathy]", "dtypes=[telepathy]"):
        with pytest.raises(ConfigError, match="telepathy is not known"):
            certificate.run_benchmark(load_config([*small, wrong], "certificate"))
