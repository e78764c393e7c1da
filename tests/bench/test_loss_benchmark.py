"""benchmarks/loss.py: the truth of its problems, the arithmetic of ratios, its files, and whole runs at tiny shapes."""

import json
import shutil
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from forked import ROOT

from benchmarks import loss, problems
from benchmarks.common import parse_loss, ratio_to, read_runs
from benchmarks.loss import SETS, record_times, report_set, run_benchmark
from benchmarks.loss_pictures import on_named_shapes
from benchmarks.loss_rows import BAR, FLOOR, Row, read_rows
from benchmarks.problems import SHAPES, Shape, fp32_logits_of, make_problem, parse_shape, relative_error, truth_of
from linrnn.config import load_config
from linrnn.core.errors import ConfigError
from linrnn.losses import build_loss

pytestmark = pytest.mark.usefixtures("traced")
CPU = torch.device("cpu")
TINY = Shape("tiny", 200, 16, 300)


@pytest.fixture
def eager_baseline(monkeypatch):
    """Eager torch instead of torch.compile, which takes ten seconds."""
    monkeypatch.setattr(loss, "BASELINE", "standard")


def configure(*overrides, tmp_path):
    base = ["shapes=[60x16x90]", "rounds=3", "warmup=1", "device=cpu", f"results_dir={tmp_path}"]
    return load_config([*base, *overrides], "bench_loss")


def make_row(backend="cce_kahan", workspace_mib=None, **values):
    fixed = {"shape": "s", "n": 8, "d": 4, "v": 16, "dtype": "bf16", "gradients": "bf16", "logits": "flat"}
    return Row(**(fixed | {"backend": backend, "workspace_mib": workspace_mib, "status": "ok"} | values))


def test_shapes_are_names_or_dimensions_and_a_typo_offers_names():
    assert parse_shape("mve") is SHAPES["mve"]
    assert parse_shape("12x34x56") == Shape("12x34x56", 12, 34, 56)
    for wrong in ("mvee", "12x34", "0x3x4"):
        with pytest.raises(ConfigError, match=wrong) as refusal:
            parse_shape(wrong)
        assert "NxDxV" in refusal.value.remedy


def test_peaked_logits_concentrate_and_flat_ones_do_not():
    shape = Shape("wide", 64, 128, 8192)
    mass = {}
    for kind in ("flat", "peaked"):
        problem = make_problem(shape, kind, torch.float32, CPU, 0)
        probabilities = (problem.hidden_ND @ problem.weight_VD.T).softmax(dim=-1)
        mass[kind] = probabilities.topk(64).values.sum(dim=-1).mean().item()
    assert mass["flat"] < 0.1
    assert mass["peaked"] > 0.7


@pytest.mark.parametrize("kind", ["peaked", "half_ignored"])
def test_the_truth_is_what_fp64_autograd_gives(kind, monkeypatch):
    monkeypatch.setattr("benchmarks.problems.BLOCK_ELEMENTS", 64 * TINY.v)
    problem = make_problem(TINY, kind, torch.bfloat16, CPU, 0)
    truth = truth_of(problem)
    h, w = (problem.hidden_ND.detach().double().requires_grad_(), problem.weight_VD.detach().double().requires_grad_())
    loss = F.cross_entropy(h @ w.T, problem.labels_N)
    loss.backward()
    assert truth.loss == pytest.approx(loss.item(), rel=1e-12)
    torch.testing.assert_close(truth.hidden_ND, h.grad)
    torch.testing.assert_close(truth.weight_VD, w.grad)


def test_the_bar_is_exact_but_for_the_rounding_of_softmax_minus_onehot_and_of_the_gradients():
    exact = make_problem(TINY, "peaked", torch.float32, CPU, 0)
    truth, bar = truth_of(exact), fp32_logits_of(exact)
    assert relative_error(bar.weight_VD, truth.weight_VD) < 1e-6
    errors = {}
    for dtype in (torch.bfloat16, torch.float32):
        problem = make_problem(TINY, "peaked", torch.bfloat16, CPU, 0, dtype)
        truth, bar = truth_of(problem), fp32_logits_of(problem)
        assert bar.hidden_ND.dtype == dtype
        assert bar.loss == pytest.approx(truth.loss, rel=1e-6)
        errors[dtype] = relative_error(bar.hidden_ND, truth.hidden_ND)
    assert 3e-4 < errors[torch.float32] < errors[torch.bfloat16] < 4e-3  # bf16 rounds by 2^-9 at most


@pytest.mark.gpu
def test_on_a_gpu_a_large_problem_drawn_again_is_the_same():
    """A GPU's prefix sums differ from call to call, and so would labels drawn with them."""
    gpu, shape = torch.device("cuda"), SHAPES["gemma2_2b"]
    once, *more = (make_problem(shape, "peaked", torch.bfloat16, gpu, 0) for _ in range(4))
    for again in more:
        assert torch.equal(once.labels_N, again.labels_N)
        assert torch.equal(once.hidden_ND, again.hidden_ND)


def timed_row(backend, *rounds_ms, forward=()):
    return make_row(backend, rounds_ms=list(rounds_ms), forward_rounds_ms=list(forward))


def test_ratios_are_taken_round_by_round():
    floor, baseline = timed_row(FLOOR, 4.0, 4.0, 300.0), timed_row("compiled", 2.0, 20.0, 200.0)
    row, failed = timed_row("slower", 4.0, 40.0, 600.0, forward=(1, 10, 150)), make_row("failed", status="failed")
    record_times(floor, baseline, [floor, baseline, row, failed])
    ratios = row.ratio_to_compiled, row.ratio_to_compiled_low, row.ratio_to_compiled_high
    assert ratios == (2, 2, 3)
    assert (row.forward_ms, row.forward_backward_ms, row.rounds) == (10, 40, 3)
    ratios = row.ratio_to_three_products, row.ratio_to_three_products_low, row.ratio_to_three_products_high
    assert ratios == (2, 1, 10)
    assert (failed.rounds, failed.ratio_to_compiled, floor.forward_ms) == (0, None, None)


@pytest.mark.parametrize("gradients", [torch.bfloat16, torch.float32])
def test_the_floor_is_three_whole_products_of_the_compute_dtype(gradients, monkeypatch):
    """Sizes, dtypes and fixed outputs of every product, and the values of the last one."""
    multiplied, mm = [], torch.mm

    def recorded(left, right, *, out):
        assert left.dtype == right.dtype == out.dtype == torch.bfloat16
        multiplied.append((tuple(left.shape), tuple(right.shape), out.data_ptr()))
        return mm(left, right, out=out)

    problem = make_problem(TINY, "peaked", torch.bfloat16, CPU, 0, gradients)
    floor = problems.three_products(problem)
    monkeypatch.setattr(torch, "mm", recorded)
    floor()
    once = multiplied.copy()
    floor()
    # 300 entries are rounded up to 320.
    assert [sizes[:2] for sizes in once] == [((200, 16), (16, 320)), ((200, 320), (320, 16)), ((320, 200), (200, 16))]
    assert multiplied == once * 2


def test_a_picture_of_rows_without_the_floor_is_drawn():
    row = make_row(shape="llama_1b3", logits="peaked", ratio_to_compiled=0.9)
    assert on_named_shapes([row], "a GPU").get_suptitle().startswith("Exact gradients in 0.90 to 0.90")


def test_a_set_without_a_picture_leaves_one_that_is_there(tmp_path):
    for path in (ROOT / "results/bench_loss/nvidia_h100_80gb_hbm3").glob("*.jsonl"):
        shutil.copy(path, tmp_path)
    config = configure("set=rivals_grid", f"output_dir={tmp_path}", tmp_path=tmp_path)
    assert report_set(config) == [tmp_path / "rivals_grid.md"]


def test_a_run_writes_rows_of_all_backends_and_the_baseline_twice(tmp_path, eager_baseline, capsys):
    backends = ["liger", "cce_kahan accumulate=fp32 workspace_mib=7", "paper/cce_exact"]
    config = configure("backends=[" + ",".join(f"'{text}'" for text in backends) + "]", tmp_path=tmp_path)
    rows = run_benchmark(config)
    directory = tmp_path / "bench_loss" / "cpu"
    assert read_rows(directory) == rows
    (run,) = read_runs(directory).values()
    assert run["environment"]["packages"]["torch"]
    assert run["config"]["rounds"] == 3
    entries = [(name, None) for name in (BAR, FLOOR, "standard", "standard (again)", "liger")]
    entries += [("cce_kahan accumulate=fp32", 7), ("paper/cce_exact", None)]
    assert [(row.backend, row.workspace_mib, row.logits) for row in rows] == [
        (backend, workspace, logits) for logits in ("flat", "peaked") for backend, workspace in entries
    ]
    assert {row.run for row in rows} == {run["id"]}
    for bar, floor, *timed_rows in (rows[:7], rows[7:]):
        liger = timed_rows.pop(2)
        assert (liger.status, liger.ratio_to_compiled) == ("unsupported", None)
        assert "GPU" in liger.reason
        assert (bar.de_err_ratio, bar.rounds, bar.forward_ms) == (1, 0, None)
        assert (floor.ratio_to_three_products, floor.rounds) == (1, 3)
        assert (floor.loss_err, floor.de_err, floor.dc_err, floor.forward_ms, floor.deterministic) == (None,) * 5
        for row in (bar, *timed_rows):
            assert (row.status, row.extra_mib) == ("ok", None)
            assert row.loss_err < 1e-2
            assert 0 < row.dc_err < 2e-2
        for row in timed_rows:
            assert 0 < row.ratio_to_three_products_low <= row.ratio_to_three_products_high
            assert (row.rounds, row.deterministic) == (3, True)
    timed = {(row.logits, row.label): row for row in rows if row.rounds}
    for (logits, _), row in timed.items():  # the rounds that a row keeps give its ratio and its interval
        kept = row.ratio_to_compiled, row.ratio_to_compiled_low, row.ratio_to_compiled_high
        assert kept == ratio_to(row.rounds_ms, timed[logits, "standard"].rounds_ms, loss.SEED)
        assert row.backend == FLOOR or np.median(row.forward_rounds_ms) == row.forward_ms
    assert rows[2].ratio_to_compiled == 1
    assert "liger: unsupported" in capsys.readouterr().out
    markdown = report_set(config)[0]
    assert markdown.name == "shapes.md"
    assert "cce_kahan accumulate=fp32 workspace_mib=7" in markdown.read_text()
    assert run["command"] in markdown.read_text()


@pytest.mark.parametrize("breaks", ["cce_kahan", "standard"])
def test_a_loss_that_breaks_in_a_late_round_becomes_a_row_and_the_others_go_on(
    tmp_path, eager_baseline, monkeypatch, breaks
):
    rounds, calls, first, step = 13, Counter(), {}, problems.step

    def build(config, **how):
        loss = build_loss(config, **how)
        first.setdefault(config.name, loss)
        return loss

    def flaky(loss, problem):
        calls[id(loss)] += 1
        if loss is first.get(breaks) and calls[id(loss)] == 13:  # some of these calls are its warm-up
            raise torch.OutOfMemoryError("out of memory")
        return step(loss, problem)

    monkeypatch.setattr(loss, "build_loss", build)
    monkeypatch.setattr(problems, "step", flaky)
    overrides = ("backends=[cce_kahan,cce_filter]", "logits=[flat]", f"rounds={rounds}")
    rows = run_benchmark(configure(*overrides, tmp_path=tmp_path))
    failed = [row.backend for row in rows if row.status != "ok"]
    assert failed == [breaks]
    assert {row.rounds for row in rows if row.status == "ok" and row.forward_backward_ms} == {rounds}


def test_a_floor_that_fits_for_some_inputs_alone_becomes_a_row_and_losses_go_on(tmp_path, eager_baseline, monkeypatch):
    made, three_products = [], problems.three_products

    def full(problem):
        made.append(problem)
        if len(made) > 1:
            raise torch.OutOfMemoryError("out of memory")
        return three_products(problem)

    monkeypatch.setattr(problems, "three_products", full)
    monkeypatch.setattr(problems, "fits_cache", lambda problem: True)  # so inputs rotate
    rows = run_benchmark(configure("backends=[cce_kahan]", "logits=[flat]", tmp_path=tmp_path))
    assert [(row.backend, row.status) for row in rows if row.status != "ok"] == [(FLOOR, "out_of_memory")]
    assert {row.rounds for row in rows if row.backend not in (BAR, FLOOR)} == {3}


def test_a_backend_whose_loss_is_not_finite_has_failed(tmp_path, eager_baseline, monkeypatch):
    def build(config, **options):
        loss = build_loss(config, **options)
        if config.name == "cce_filter":
            compute = loss.compute
            loss.compute = lambda *tensors: (compute(*tensors)[0] * torch.nan, {})
        return loss

    monkeypatch.setattr(loss, "build_loss", build)
    rows = run_benchmark(configure("backends=[cce_filter]", "logits=[flat]", tmp_path=tmp_path))
    assert (rows[-1].status, rows[-1].de_err) == ("failed", None)
    assert "not finite" in rows[-1].reason
    for line in (tmp_path / "bench_loss" / "cpu" / "rows.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


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
        run_benchmark(configure(override, tmp_path=tmp_path))
    assert not (tmp_path / "bench_loss").exists()


@pytest.mark.gpu
def test_on_a_gpu_memory_and_clocks_are_measured(tmp_path):
    overrides = ["device=cuda", "shapes=[2048x256x8192]", "backends=[standard,cce_kahan]", "logits=[flat]"]
    rows = {row.backend: row for row in run_benchmark(configure(*overrides, tmp_path=tmp_path))}
    logits_mib = 2048 * 8192 * 4 / 2**20
    standard, kahan = rows["standard"], rows["cce_kahan"]
    assert standard.extra_mib > logits_mib
    assert kahan.extra_mib < standard.extra_mib
    assert 0 < kahan.forward_extra_mib < kahan.extra_mib
    assert kahan.reason == ""


def test_every_set_names_known_shapes_and_backends():
    for name, chosen in SETS.items():
        assert [parse_shape(text).name for text in chosen["shapes"]] == chosen["shapes"], name
        for text in chosen["backends"]:
            assert parse_loss(text).name == text.split()[0]
