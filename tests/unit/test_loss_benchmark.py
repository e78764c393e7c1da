"""The benchmark's arithmetic, its problems' truth, and a whole run at a tiny shape."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from linrnn import loss_benchmark
from linrnn.config import load_config
from linrnn.errors import ConfigError, OutOfMemoryError, UnsupportedError
from linrnn.loss_benchmark import Entry, Row, bootstrap_interval, parse_loss, run_benchmark, table
from linrnn.loss_problems import SHAPES, Shape, make_problem, parse_shape, relative_error, truth_of
from linrnn.losses import build_loss

CPU = torch.device("cpu")
TINY = Shape("tiny", 200, 16, 300)


def configure(*overrides, tmp_path):
    base = [
        "shapes=[60x16x90]",
        "reference=standard",
        "rounds=3",
        "warmup=1",
        "device=cpu",
        f"output={tmp_path}/b.json",
    ]
    return load_config([*base, *overrides], "bench_loss")


# --------------------------------------------------------------------------------------------------- problems
def test_shapes_are_names_or_dimensions_and_a_typo_offers_names():
    assert parse_shape("mve") is SHAPES["mve"]
    assert parse_shape("12x34x56") == Shape("12x34x56", 12, 34, 56)
    for wrong in ("mvee", "12x34", "0x3x4"):
        with pytest.raises(ConfigError, match=wrong) as refusal:
            parse_shape(wrong)
        assert "NxDxV" in refusal.value.remedy


@pytest.mark.parametrize("kind", ["flat", "peaked"])
def test_problems_repeat_with_the_seed_and_only_with_it(kind):
    first, same, other = (make_problem(TINY, kind, torch.bfloat16, CPU, seed) for seed in (1, 1, 2))
    assert torch.equal(first.hidden_ND, same.hidden_ND)
    assert torch.equal(first.labels_N, same.labels_N)
    assert not torch.equal(first.weight_VD, other.weight_VD)
    assert first.hidden_ND.dtype == torch.bfloat16
    assert first.hidden_ND.is_leaf
    assert first.hidden_ND.requires_grad


def test_peaked_logits_concentrate_and_flat_ones_do_not():
    shape = Shape("wide", 64, 128, 8192)
    mass = {}
    for kind in ("flat", "peaked"):
        problem = make_problem(shape, kind, torch.float32, CPU, 0)
        probabilities = (problem.hidden_ND @ problem.weight_VD.T).softmax(dim=-1)
        mass[kind] = probabilities.topk(64).values.sum(dim=-1).mean().item()
    assert mass["flat"] < 0.1
    assert mass["peaked"] > 0.7


def test_frequent_labels_are_not_the_first_entries_of_the_vocabulary():
    labels = make_problem(Shape("long", 20000, 4, 1000), "flat", torch.float32, CPU, 0).labels_N
    counts = labels.bincount(minlength=1000)
    assert counts.max() > 10 * counts.float().mean()
    assert counts.argmax() != 0


def test_the_truth_is_what_fp64_autograd_gives(monkeypatch):
    monkeypatch.setattr("linrnn.loss_problems._TRUTH_ROWS", 64)
    problem = make_problem(TINY, "peaked", torch.bfloat16, CPU, 0)
    truth = truth_of(problem)
    h, w = (
        problem.hidden_ND.detach().double().requires_grad_(),
        problem.weight_VD.detach().double().requires_grad_(),
    )
    loss = F.cross_entropy(h @ w.T, problem.labels_N)
    loss.backward()
    assert truth.loss == pytest.approx(loss.item(), rel=1e-12)
    torch.testing.assert_close(truth.hidden_ND, h.grad)
    torch.testing.assert_close(truth.weight_VD, w.grad)


def test_relative_error_is_the_frobenius_norm_of_the_difference(monkeypatch):
    monkeypatch.setattr("linrnn.loss_problems._TRUTH_ROWS", 1)
    true = torch.randn(50, 3, dtype=torch.float64)
    assert relative_error(1.01 * true, true) == pytest.approx(0.01)


# ------------------------------------------------------------------------------------------------- arithmetic
def entry(forward, backward):
    loss = build_loss(parse_loss("standard"), device=CPU)
    return Entry(Row("s", 1, 1, 1, "flat", "standard"), loss, forward, backward)


def test_ratios_are_taken_round_by_round():
    reference = entry([1.0, 10.0, 100.0], [1.0, 10.0, 100.0])
    slower = entry([2.0, 10.0, 500.0], [2.0, 30.0, 100.0])  # 2, 2 and 3 times as long
    loss_benchmark._record_times(slower, reference, product_ms=np.array([1.0, 5.0, 100.0]), seed=0)
    row = slower.row
    assert row.ratio == 2
    assert 2 == row.ratio_low <= row.ratio_high == 3
    assert (row.forward_ms, row.backward_ms, row.total_ms) == (10, 30, 40)
    assert row.products == 6  # of 4, 8 and 6


def test_the_bootstrap_interval_holds_the_median_and_shrinks_with_the_rounds():
    values = np.random.default_rng(0).normal(2.0, 0.1, size=400)
    narrow, wide = bootstrap_interval(values, seed=0), bootstrap_interval(values[:10], seed=0)
    assert narrow[0] < 2.0 < narrow[1]
    assert narrow[1] - narrow[0] < wide[1] - wide[0]
    assert bootstrap_interval(np.full(5, 1.5), seed=0) == (1.5, 1.5)


# -------------------------------------------------------------------------------------------------- whole run
def test_a_run_writes_rows_of_all_backends_and_the_reference_twice(tmp_path):
    config = configure("backends=[liger,'cce_kahan accumulate=fp32']", tmp_path=tmp_path)
    said = []
    rows = run_benchmark(config, "the command", said.append)
    record = json.loads((tmp_path / "b.json").read_text())
    assert record["command"] == "the command"
    assert record["environment"]["packages"]["torch"]
    assert [row["backend"] for row in record["rows"]] == [row.backend for row in rows]
    assert [(row.backend, row.logits) for row in rows] == [
        (backend, logits)
        for logits in ("flat", "peaked")
        for backend in ("standard", "standard (again)", "liger", "cce_kahan accumulate=fp32")
    ]
    for row in rows:
        if row.backend == "liger":
            assert row.status == "unsupported"
            assert "GPU" in row.reason
            assert row.ratio is None
        else:
            assert row.status == "ok"
            assert row.ratio_low <= row.ratio <= row.ratio_high
            assert row.loss_error < 1e-2
            assert 0 < row.weight_gradient_error < 2e-2
            assert row.extra_mib is None
    assert rows[0].ratio == 1
    assert "liger" in said[-1]


def test_a_backend_that_breaks_becomes_a_row_and_the_others_go_on(tmp_path, monkeypatch):
    def build(config, **options):
        if config.name == "cce_filter":
            raise RuntimeError("kernel exploded\nwith a long trace")
        if config.name == "fla":
            raise torch.OutOfMemoryError("out of memory")
        return build_loss(config, **options)

    monkeypatch.setattr(loss_benchmark, "build_loss", build)
    rows = run_benchmark(configure("backends=[cce_filter,fla,cce_kahan]", "logits=[flat]", tmp_path=tmp_path), "", str)
    assert [row.status for row in rows] == ["ok", "ok", "failed", "out_of_memory", "ok"]
    assert rows[2].reason == "RuntimeError: kernel exploded"
    assert "failed: RuntimeError" in table(rows)


def test_a_reference_that_cannot_run_ends_the_benchmark(tmp_path, monkeypatch):
    with pytest.raises(UnsupportedError, match="liger"):
        run_benchmark(configure("reference=liger", tmp_path=tmp_path), "", str)

    def exhausted(*_, **__):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(loss_benchmark, "build_loss", exhausted)
    with pytest.raises(OutOfMemoryError, match="reference standard"):
        run_benchmark(configure(tmp_path=tmp_path), "", str)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("backends=[cce_kahn]", "cce_kahn"),
        ("backends=['standard filter_eps=0.1']", "filter_eps"),
        ("logits=[spiky]", "spiky"),
        ("shapes=[mvee]", "mvee"),
    ],
)
def test_a_wrong_choice_is_refused_before_anything_is_measured(override, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        run_benchmark(configure(override, tmp_path=tmp_path), "", str)
    assert not (tmp_path / "b.json").exists()


def test_a_group_of_another_command_is_refused():
    with pytest.raises(ConfigError, match="model: there is no such key"):
        load_config(["model=gla"], "bench_loss")


@pytest.mark.gpu
def test_on_a_gpu_memory_and_clocks_are_measured(tmp_path):
    overrides = ["device=cuda", "shapes=[2048x256x8192]", "backends=[cce_kahan]", "logits=[flat]"]
    rows = run_benchmark(configure(*overrides, tmp_path=tmp_path), "", str)
    standard, _, kahan = rows
    logits_mib = 2048 * 8192 * 4 / 2**20
    assert standard.beyond_gradients_mib > logits_mib
    assert kahan.extra_mib < standard.extra_mib
    assert json.loads((tmp_path / "b.json").read_text())["clocks"][0]["sm_mhz"] > 0
