"""Verdicts from intervals over paired runs, in both directions. Unmeasured criteria are open; origins never mix."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot

from linrnn.config import load_config
from linrnn.core.errors import ConfigError, DataError
from linrnn.runs.intervals import AT_LEAST, AT_MOST, WITHIN, estimate, ratio_of_means
from linrnn.runs.intervals import answer as answer_of
from linrnn.runs.mixtures import read_origin
from linrnn.study import criteria, curves, plots, verdicts
from linrnn.study.criteria import Verdict
from linrnn.study.hypotheses import branches
from linrnn.study.report import make_report, write, write_report
from linrnn.study.report.settings import changes_of_loss
from linrnn.study.results import (
    BREAKDOWNS,
    MAX_BATCHES,
    Run,
    backend_names,
    check_origin,
    frame,
    read_committed,
    read_committed_lists,
    read_runs,
    write_committed,
)

GIB = 2**30
HERE = {"packages": {"torch": "2.11"}, "gpus": [{"name": "H200"}], "git": {"commit": "a" * 40, "dirty": False}}
ELSEWHERE = {**HERE, "gpus": [{"name": "H100"}]}
RESULTS = Path(__file__).resolve().parents[2] / "results"
REPORTS = sorted(path.parent for path in RESULTS.glob("summaries/*/runs.json.xz"))


def run(loss: str, *, seed: int = 0, gib: float = 10, speed: float = 1000, nats: float = 5.0, **more: Any) -> Run:
    summary = {
        "status": "finished",
        "reason": None,
        "model": "gla",
        "size": "mve",
        "loss": loss,
        "data": "text",
        "seed": seed,
        "group": "g",
        "run_name": f"gla-{loss}-{more.get('batch_size', 8)}-s{seed}",
        "batch_size": 8,
        "accumulation_steps": 1,
        "seq_len": 2048,
        "activation_checkpointing": "none",
        "chunk_size": None,
        "loss_options": {},
        "memory_budget_gib": None,
        "training": f"schedule.steps={more.get('steps', 60)}",
        "n_parameters": 10_000_000,
        "hidden_size": 256,
        "vocab_size": 32000,
        "precision": "bf16_autocast",
        "steps": 60,
        "tokens": 1,
        "train_loss_nats": nats,
        "valid_loss_nats": nats,
        "valid_perplexity": 150 + 10 * (nats - 5),
        "valid_bits_per_byte": 2.0,
        "peak_memory_bytes": int(gib * GIB),
        "peak_memory_is": "allocated on the GPU",
        "memory_bytes": {"peak": int(gib * GIB), "loss_forward": 0, "loss_backward": GIB, "parameters": GIB},
        "tokens_per_second": speed,
        "tokens_per_second_is": "wall clock",
        "wall_step_ms": None,
        "step_time_ms_median": 1.0,
        "measured_steps": 50,
        "mfu": 0.1,
        "mfu_6n": 0.1,
        "device": "H200",
        "command": "python train.py experiment=mve",
        **more,
    }
    return Run(summary, HERE, [(step, nats + 1 / step) for step in range(1, 41)])


@pytest.fixture
def text_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports are written without their pictures, which take most of the time."""
    monkeypatch.setattr(write, "_figures", lambda runs: [])


def only(found: Sequence[Verdict], criterion: verdicts.Criterion, backend: str, against: str | None) -> Verdict:
    (verdict,) = [v for v in found if (v.criterion, v.backend, v.against) == (criterion, backend, against)]
    return verdict


FIVE_SEEDS = [
    *(run("compiled", seed=seed, gib=10, speed=1000) for seed in range(5)),
    *(run("standard", seed=seed, gib=20, speed=900) for seed in range(5)),
    *(
        run("cce_kahan", seed=s, gib=g, speed=v, nats=5.004)
        for s, g, v in ((0, 5, 1090), (1, 5.5, 1100), (2, 5.2, 1000), (3, 5.2, 1090), (4, 5.1, 1100))
    ),
]


def five(loss: str, **more: Any) -> list[Run]:
    return [run(loss, seed=seed, **more) for seed in range(5)]


def test_ratios_are_medians_over_paired_seeds_with_intervals() -> None:
    found = verdicts.verdicts(FIVE_SEEDS)
    memory = only(found, criteria.MEMORY, "cce_kahan", "compiled")
    assert (memory.value, memory.verdict, memory.n) == (pytest.approx(0.52), "met", 5)
    assert (memory.low, memory.high) == (pytest.approx(0.5), pytest.approx(0.55)), "memory does not scatter: a range"
    eager = only(found, criteria.MEMORY, "cce_kahan", "standard")
    assert eager.value == pytest.approx(0.26)
    speed = only(found, criteria.SPEED, "cce_kahan", "compiled")
    assert (speed.value, speed.verdict) == (pytest.approx(1.09), "undecided"), "the interval holds 1.08"
    assert speed.low is not None
    assert speed.high is not None
    assert speed.low < 1.08 < speed.high
    loss = only(found, criteria.MVE_LOSS, "cce_kahan", "compiled")
    assert (loss.value, loss.verdict) == (pytest.approx(0.004), "met")
    curve = only(found, criteria.CURVES, "cce_kahan", "compiled")
    assert (curve.value, curve.verdict) == (pytest.approx(0.004), "met")
    perplexity = only(found, criteria.PERPLEXITY, "cce_kahan", "compiled")
    assert (perplexity.value, perplexity.verdict) == (pytest.approx(0.04), "met")
    valid = only(found, criteria.VALID_LOSS, "cce_kahan", "compiled")
    assert (valid.value, valid.verdict) == (pytest.approx(0.004), "met")


@pytest.mark.parametrize("n", range(1, 5))
def test_fewer_than_five_pairs_decide_nothing_but_memory(n: int) -> None:
    runs = [*five("compiled")[:n], *five("cce_kahan", speed=5000, gib=1)[:n]]
    found = verdicts.verdicts(runs)
    for criterion in (
        criteria.SPEED,
        criteria.PERPLEXITY,
        criteria.VALID_LOSS,
        criteria.CURVES,
        criteria.MVE_LOSS,
    ):
        verdict = only(found, criterion, "cce_kahan", "compiled")
        assert (verdict.verdict, verdict.n) == ("undecided", n)
        assert f"n = {n}, needs 5" in verdict.remark
    assert only(found, criteria.MEMORY, "cce_kahan", "compiled").verdict == "met", "one run decides"


def test_equal_within_a_margin_means_to_either_side() -> None:
    """A perplexity two below the baseline's is welcome, but it is not the same model."""
    for nats, expected in ((4.8, "missed"), (5.2, "missed"), (5.004, "met"), (4.996, "met")):
        found = verdicts.verdicts([*five("compiled"), *five("cce_kahan", nats=nats)])
        for criterion in (criteria.PERPLEXITY, criteria.VALID_LOSS, criteria.MVE_LOSS):
            assert only(found, criterion, "cce_kahan", "compiled").verdict == expected


@pytest.mark.usefixtures("text_alone")
def test_a_perplexity_whose_scatter_exceeds_its_margin_is_answered_in_nats(tmp_path: Path) -> None:
    """Differences of 0.001 nats are 0.3 in perplexity: the nats are decided, the perplexity says what it would need."""
    drifts = (0.001, -0.001, 0.001, -0.001, 0.0)
    ours = [run("cce_kahan", seed=s, nats=5 + d, valid_perplexity=200 + 300 * d) for s, d in enumerate(drifts)]
    base = [run("compiled", seed=s, valid_perplexity=200) for s in range(5)]
    found = verdicts.verdicts([*base, *ours])
    perplexity = only(found, criteria.PERPLEXITY, "cce_kahan", "compiled")
    assert perplexity.verdict == "undecided"
    assert perplexity.remark == "±0.1 needs about 25 pairs at this scatter", "(1.645 x 0.3 / 0.1)² = 24.4"
    valid = only(found, criteria.VALID_LOSS, "cce_kahan", "compiled")
    assert (valid.verdict, valid.n, valid.remark) == ("met", 5, "")
    assert criteria.RESTATED in write_report([*base, *ours], tmp_path, "g")[0].read_text()


@pytest.mark.usefixtures("text_alone")
def test_the_final_loss_of_a_larger_model_is_judged_and_says_how_many_pairs_its_margin_needs(tmp_path: Path) -> None:
    drifts = (0.03, -0.03, 0.03, -0.03, 0.0)
    ours = [run("cce_kahan", seed=s, size="350m", nats=5 + d) for s, d in enumerate(drifts)]
    base = [run("compiled", seed=s, size="350m") for s in range(5)]
    found = verdicts.verdicts([*base, *ours])
    for criterion in (criteria.FINAL_LOSS, criteria.VALID_LOSS):
        verdict = only(found, criterion, "cce_kahan", "compiled")
        assert verdict.verdict == "undecided"
        assert verdict.remark == "±0.01 needs about 25 pairs at this scatter", "(1.645 x 0.03 / 0.01)² = 24.4"
    assert not [v for v in found if v.criterion is criteria.MVE_LOSS]
    assert criteria.FINAL_ADDED in write_report([*base, *ours], tmp_path, "g")[0].read_text()


def test_an_interval_on_both_sides_of_the_target_decides_nothing() -> None:
    nothing = None
    for rule, target, expected in (
        (AT_MOST, 1.0, (True, nothing, False)),
        (AT_LEAST, 1.0, (False, nothing, True)),
        (WITHIN, 0.9, (True, nothing, False)),
    ):
        assert (
            tuple(answer_of(low, high, rule, target) for low, high in ((0.5, 0.9), (0.5, 1.1), (1.1, 1.2))) == expected
        )
    assert answer_of(-1.2, -1.0, WITHIN, 0.9) is False
    assert answer_of(-1.2, 1.2, WITHIN, 0.9) is None


def test_the_interval_of_five_ratios_holds_the_truth_nine_times_in_ten() -> None:
    draw = random.Random(0)
    studies = [[1.05 * 2.718281828 ** draw.gauss(0, 0.02) for _ in range(5)] for _ in range(1000)]
    found = [estimate(values, ratios=True) for values in studies]
    held = sum(one.low <= 1.05 <= one.high for one in found if one.low is not None and one.high is not None)
    assert 0.87 < held / len(found) < 0.93
    inverse = estimate([1 / value for value in studies[0]], ratios=True)
    assert found[0].low is not None
    assert inverse.high == pytest.approx(1 / found[0].low), "neither loss is preferred"


def test_welchs_interval_of_two_unpaired_sets_of_ratios_holds_the_truth_nine_times_in_ten() -> None:
    draw = random.Random(0)

    def ratios(mean: float, spread: float) -> list[float]:
        return [mean * 2.718281828 ** draw.gauss(0, spread) for _ in range(8)]

    found = [ratio_of_means(ratios(1.05, 0.02), ratios(1.08, 0.005)) for _ in range(1000)]
    held = sum(one.low <= 1.05 / 1.08 <= one.high for one in found if one.low is not None and one.high is not None)
    assert 0.87 < held / len(found) < 0.93


def test_values_without_scatter_have_an_interval_without_width() -> None:
    one = estimate([1.1] * 5, ratios=True)
    assert (one.value, one.low, one.high) == (1.1, pytest.approx(1.1), pytest.approx(1.1))


@pytest.mark.usefixtures("text_alone")
def test_runs_that_learn_differently_are_not_compared(tmp_path: Path) -> None:
    """With another learning rate or other initial weights, loss and curve say nothing about the loss layer."""
    fast, slow = ("optimizer.lr=0.002 init_from=None", "optimizer.lr=0.001 init_from=None")
    runs = [run("compiled", training=slow), run("cce_kahan", training=fast, nats=4.0)]
    compared = [v for v in verdicts.verdicts(runs) if v.against == "compiled" and v.value is not None]
    assert not compared
    both = [*runs, run("cce_kahan", training=slow, run_name="gla-cce_kahan-lr0.001")]
    values = [v.value for v in verdicts.verdicts(both) if v.criterion is criteria.SPEED and v.against == "compiled"]
    assert [value for value in values if value is not None] == [1.0]
    table = write_report(both, tmp_path, "g")[0].read_text()
    assert "| run | model |" in table, "two rows would look alike"
    assert "| gla-cce_kahan-lr0.001 | gla |" in table


def test_losses_of_a_few_steps_are_not_compared() -> None:
    found = verdicts.verdicts([run("compiled", steps=49), run("cce_kahan", steps=49, nats=7.0)])
    for criterion in (criteria.PERPLEXITY, criteria.VALID_LOSS, criteria.MVE_LOSS, criteria.CURVES):
        verdict = only(found, criterion, "cce_kahan", "compiled")
        assert verdict.verdict == "open"
        assert "50 steps" in verdict.remark
    assert only(found, criteria.MEMORY, "cce_kahan", "compiled").value is not None


def test_times_of_a_few_steps_are_not_compared() -> None:
    times = {"loss_layer_ms": {"forward": 1.0, "backward": 1.0}}
    found = verdicts.verdicts([run("compiled", **times), run("cce_filter", speed=2000, measured_steps=4, **times)])
    for criterion in (criteria.SPEED, criteria.MVE_SPEED, criteria.BACKWARD):
        verdict = only(found, criterion, "cce_filter", "compiled")
        assert (verdict.verdict, "5 steps after the warm-up" in verdict.remark) == ("open", True)


def test_speed_beyond_what_a_free_loss_would_give_is_noise_on_either_side() -> None:
    times = {"loss_layer_ms": {"forward": 0.05, "backward": 0.07}, "step_time_ms_median": 1.0}  # free: 1.136 x
    for speed, verdict, words in (
        (1767, "undecided", "beyond what a free loss would give (1.136): noise"),
        (1100, "met", ""),
        (500, "undecided", "below 0.880, what a free loss would give the baseline: noise"),
    ):
        runs = [*five("compiled", **times), *five("cce_kahan", speed=speed, **times)]
        found = only(verdicts.verdicts(runs), criteria.SPEED, "cce_kahan", "compiled")
        assert (found.verdict, found.remark) == (verdict, words)


def test_the_bound_of_a_free_loss_is_that_of_the_wall_clock_where_steps_were_timed_by_it() -> None:
    times: dict[str, Any] = {"loss_layer_ms": {"forward": 1.0, "backward": 1.0}, "step_time_ms_median": 4.0}
    times |= {"wall_step_ms": 10.0, "host_step_ms": 6.0}
    runs = [*five("compiled", **times), *five("cce_kahan", speed=1300, **times)]
    found = only(verdicts.verdicts(runs), criteria.SPEED, "cce_kahan", "compiled")
    assert found.remark == "beyond what a free loss would give (1.250): noise; the host decides the speed"


def test_speed_on_a_cpu_is_no_answer() -> None:
    cpu = {"memory_bytes": {"resident_peak": GIB}}
    runs = [*five("compiled", **cpu), *five("cce_kahan", speed=2000, **cpu)]
    for batch in (16, 32):
        runs += [*five("compiled", batch_size=batch, **cpu), *five("cce_kahan", batch_size=batch, speed=2000, **cpu)]
    found = verdicts.verdicts(runs)
    for criterion in (criteria.SPEED, criteria.MVE_SPEED, criteria.MVE_NOT_SLOWER, criteria.MVE_LARGER):
        verdict = only(found, criterion, "cce_kahan", "compiled")
        assert (verdict.verdict, "on a GPU" in verdict.remark) == ("open", True)


def test_device_time_decides_no_speed_and_is_never_held_against_wall_clock() -> None:
    def old(runs: list[Run]) -> list[Run]:
        kept = [{k: v for k, v in one.summary.items() if k != "tokens_per_second_is"} for one in runs]
        return [replace(one, summary=summary) for one, summary in zip(runs, kept, strict=True)]

    base, ours = five("compiled"), five("cce_kahan", speed=2000)
    both = only(verdicts.verdicts([*old(base), *old(ours)]), criteria.SPEED, "cce_kahan", "compiled")
    assert (both.verdict, both.value) == ("undecided", 2.0)
    assert "to be measured again" in both.remark
    mixed = only(verdicts.verdicts([*old(base), *ours]), criteria.SPEED, "cce_kahan", "compiled")
    assert mixed.value is None


@pytest.mark.usefixtures("text_alone")
def test_tables_say_whose_clock_tokens_per_second_are_by_and_where_the_host_decides(tmp_path: Path) -> None:
    fast = run("cce_kahan", wall_step_ms=1.01, host_step_ms=0.01)
    slow = run("compiled", wall_step_ms=1.03, host_step_ms=0.03)
    text = write_report([fast, slow], tmp_path, "g")[0].read_text()
    assert "| tokens/s, wall clock | ratio | step, device ms |" in text
    assert "**the host decides the speed of gla-compiled-8-s0**: 0.03 ms of a step's 1.03 ms by wall clock are" in text
    assert "the host decides the speed of gla-cce_kahan" not in text
    for one in (fast, slow):
        one.summary["device"] = "cpu"
    on_a_cpu = write_report([fast, slow], tmp_path, "g")[0].read_text()
    assert "| tokens/s, wall clock | ratio | step, ms |" in on_a_cpu
    assert "0.03 ms of the 1.03 ms from step to step of gla-compiled-8-s0 pass between its steps" in on_a_cpu
    assert not [words for words in ("device ms", "the host decides", "the device's") if words in on_a_cpu]
    for one in (fast, slow):
        one.summary["device"] = "H200"
    del fast.summary["tokens_per_second_is"], slow.summary["tokens_per_second_is"]
    before = write_report([fast, slow], tmp_path, "g")[0].read_text()
    assert "| tokens/s, device time |" in before
    assert "to be measured again by wall clock" in before


@pytest.mark.usefixtures("text_alone")
def test_a_report_says_whose_mean_step_differs_from_the_median(tmp_path: Path) -> None:
    runs = [
        run("compiled", wall_step_ms=1.31, host_step_ms=0.01),
        run("cce_kahan", wall_step_ms=1.06, host_step_ms=0.01),
        run("standard"),
    ]
    text = write_report(runs, tmp_path, "g")[0].read_text()
    assert "gla-compiled-8-s0: the mean step takes 1.30 times the median step's 1.00 ms" in text
    assert text.count("the mean step takes") == 1


def test_what_was_not_measured_is_open_and_says_what_it_needs() -> None:
    found = verdicts.verdicts([run("cce_kahan")])
    memory = only(found, criteria.MEMORY, "cce_kahan", "compiled")
    assert (memory.verdict, memory.value, memory.n) == ("open", None, 0)
    assert "compiled has no finished run" in memory.remark
    assert "find_max_batch" in only(found, criteria.BATCH, "cce_kahan", "compiled").remark


def test_the_loss_layer_s_share_says_whether_gradients_count() -> None:
    found = verdicts.verdicts([run("cce_kahan", gib=10)])
    gradients = 2 * 256 * (8 * 2048 + 32000)
    assert only(found, criteria.SHARE, "cce_kahan", None).value == pytest.approx(0.1)
    without = only(found, criteria.SHARE_WITHOUT, "cce_kahan", None)
    assert without.value == pytest.approx((GIB - gradients) / (10 * GIB))


def test_the_width_of_a_size_that_was_changed_is_the_run_s_own() -> None:
    found = verdicts.verdicts([run("cce_kahan", gib=10, hidden_size=512)])
    gradients = 2 * 512 * (8 * 2048 + 32000)
    assert only(found, criteria.SHARE_WITHOUT, "cce_kahan", None).value == pytest.approx((GIB - gradients) / (10 * GIB))


def test_a_process_s_memory_on_a_cpu_is_no_answer() -> None:
    runs = [run(loss, memory_bytes={"resident_peak": GIB}) for loss in ("compiled", "cce_kahan")]
    found = verdicts.verdicts(runs)
    for criterion in (criteria.MEMORY, criteria.MVE_MEMORY):
        assert only(found, criterion, "cce_kahan", "compiled").verdict == "open"
        assert "GPU" in only(found, criterion, "cce_kahan", "compiled").remark


def test_a_run_that_was_made_again_is_no_further_seed() -> None:
    again = [run("cce_kahan", gib=gib, run_name=f"again-{gib}") for gib in (4, 5, 6)]
    memory = only(verdicts.verdicts([run("compiled"), *again]), criteria.MEMORY, "cce_kahan", "compiled")
    assert (memory.value, memory.n, memory.low) == (0.5, 1, None)


def test_runs_moved_aside_are_no_part_of_their_group(tmp_path: Path) -> None:
    for name in ("gla-compiled-8-s0", "gla-compiled-8-s0.1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(json.dumps(run("compiled").summary))
    assert len(read_runs(tmp_path)) == 1


def test_precision_is_lost_only_where_other_exact_losses_stay_closer() -> None:
    def branch(*runs: Run) -> tuple[str, str]:
        (found,) = [(word, figures) for name, word, figures in branches(verdicts.verdicts(runs)) if "precision" in name]
        return found

    base, ours, eager = five("compiled"), five("cce_kahan", nats=5.02), five("standard", nats=5.03)
    assert branch(*base, *ours) == ("undecided", "at most 0.0200 nats apart, n = 5")
    assert branch(*base, *ours, *eager) == ("undecided", "at most 0.0200 nats apart, other exact losses 0.0300, n = 5")
    assert branch(*base, *ours, *five("standard", nats=5.001))[0] == "holds"
    assert branch(*base, *five("cce_kahan", nats=5.001))[0] == "does not hold"
    assert branch(base[0], ours[0], run("standard", nats=5.001))[0] == "undecided", "one seed decides nothing"
    assert branch(*base, *five("cce_kahan", model="transformer", nats=5.02))[0] == "open", "it is no linear RNN"
    plain = five("cce_kahan", nats=5.5, loss_options={"accumulate": "bf16"})
    kahan = five("cce_kahan", nats=5.001, loss_options={"accumulate": "kahan"})
    assert branch(*base, *plain, *kahan)[0] == "does not hold"


def test_liger_s_savings_are_compared_model_by_model() -> None:
    gib = {"gla": (10, 5, 6), "kda": (10, 9, 5)}  # compiled, ours, Liger
    runs = [
        run(loss, model=model, gib=size)
        for model, sizes in gib.items()
        for loss, size in zip(("compiled", "cce_kahan", "liger"), sizes, strict=True)
    ]
    assert branches(verdicts.verdicts(runs))[2][1:] == (
        "does not hold",
        "at least 80% of the memory that ours saves",
    )


def answer(loss: str, batch: int, speed: float, environment: dict[str, Any] = HERE) -> dict[str, Any]:
    s = run(loss).summary
    probes = [{"batch": batch, "fits": True, "tokens_per_second": speed, "peak_bytes": 1, "foreseen_bytes": 1}]
    return {
        **s,
        "max_sequences": batch,
        "exact": True,
        "memory_budget_gib": 80.0,
        "world_size": 1,
        "probes": probes,
        "environment": environment,
    }


def test_a_search_answers_also_where_the_runs_tell_more_losses_apart() -> None:
    kahan, fp32 = ({"loss_options": {"accumulate": way}} for way in ("kahan", "fp32"))
    answers = [answer("compiled", 8, 1000), {**answer("cce_kahan", 16, 1100), **kahan}]
    runs = [
        run(loss, seed=seed, **more) for loss, more in (("compiled", {}), ("cce_kahan", kahan)) for seed in range(3)
    ]
    met = only(verdicts.verdicts(runs, answers), criteria.BATCH, "cce_kahan", "compiled")
    assert (met.verdict, met.value) == ("met", 2.0)
    runs += [run("cce_kahan", seed=seed, run_name=f"fp32-{seed}", **fp32) for seed in range(3)]
    found = verdicts.verdicts(runs, answers)
    both = [only(found, criteria.BATCH, f"cce_kahan accumulate={way}", "compiled") for way in ("kahan", "fp32")]
    assert [one.verdict for one in both] == ["met", "open"]


def test_largest_batches_answer_batch_and_speed_and_other_origins_do_not() -> None:
    answers = [answer("compiled", 12, 1000), answer("cce_kahan", 13, 1010)]
    of_batches = (criteria.BATCH, "cce_kahan", "compiled")
    found = verdicts.verdicts(FIVE_SEEDS, answers)
    batch = only(found, criteria.BATCH, "cce_kahan", "compiled")
    assert (batch.value, batch.verdict) == (pytest.approx(13 / 12), "missed")
    speed = only(found, criteria.SPEED_AT_LARGEST, "cce_kahan", "compiled")
    assert (speed.value, speed.verdict) == (pytest.approx(1.01), "undecided"), "a probe each"
    holds = {branch: word for branch, word, _ in branches(found)}
    assert holds["a larger batch does not give speed: the GPU is saturated already"] == "undecided"
    assert holds["CCE-Kahan loses precision in linear RNNs"] == "does not hold"
    assert holds["Liger already captures most of the benefit"] == "open"
    no_larger = verdicts.verdicts(FIVE_SEEDS, [answer("compiled", 12, 1000), answer("cce_kahan", 12, 1010)])
    assert branches(no_larger)[0][1] == "open"
    compiled_blocks = {**answer("cce_kahan", 24, 1010), "training": "trainer.compile_blocks=True"}
    unlike = verdicts.verdicts(FIVE_SEEDS, [answer("compiled", 12, 1000), compiled_blocks])
    assert only(unlike, criteria.BATCH, "cce_kahan", "compiled").value is None
    of_two = [{**one, "parallel": "fsdp", "world_size": 2} for one in answers]
    assert only(verdicts.verdicts(FIVE_SEEDS, [answers[0], of_two[1]]), *of_batches).value is None
    both = only(verdicts.verdicts(FIVE_SEEDS, of_two), *of_batches)
    assert both.value == pytest.approx(13 / 12)
    assert "on each of 2 ranks (fsdp)" in both.setting
    strange = verdicts.verdicts(FIVE_SEEDS, [answer("compiled", 12, 1000), answer("cce_kahan", 24, 1010, ELSEWHERE)])
    batch = only(strange, criteria.BATCH, "cce_kahan", "compiled")
    assert batch.verdict == "open"
    assert "another gpus" in batch.remark


def test_a_search_that_met_no_fitting_batch_and_left_some_untried_answers_nothing() -> None:
    compiled, nothing = answer("compiled", 12, 1000), answer("cce_kahan", 0, 0)
    cut_off = only(
        verdicts.verdicts(FIVE_SEEDS, [compiled, {**nothing, "exact": False}]), criteria.BATCH, "cce_kahan", "compiled"
    )
    assert (cut_off.value, cut_off.verdict) == (None, "open")
    assert "needs a search by scripts/find_max_batch.py" in cut_off.remark
    on_the_way = answer("cce_kahan", 18, 1000)
    for (ours, exact), (theirs, theirs_exact), word in (
        ((18, False), (12, True), "met"),  # at least 1.5
        ((13, False), (12, True), "undecided"),
        ((18, True), (12, False), "undecided"),
    ):
        answers = [
            {**compiled, "max_sequences": theirs, "exact": theirs_exact},
            {**on_the_way, "max_sequences": ours, "exact": exact},
        ]
        found = only(verdicts.verdicts(FIVE_SEEDS, answers), criteria.BATCH, "cce_kahan", "compiled")
        assert (found.verdict, found.remark) == (word, "a search did not end exact")
    none = only(verdicts.verdicts(FIVE_SEEDS, [compiled, nothing]), criteria.BATCH, "cce_kahan", "compiled")
    assert (none.value, none.verdict) == (0, "missed")


@pytest.mark.usefixtures("text_alone")
def test_a_report_keeps_the_answers_that_counted_for_those_who_have_the_report_alone(tmp_path: Path) -> None:
    stranger = {**answer("compiled", 3, 10), "size": "1b3"}
    write_report(FIVE_SEEDS, tmp_path / "g", "g", [answer("compiled", 12, 1000), stranger])
    assert [entry["max_sequences"] for entry in read_committed_lists(tmp_path, MAX_BATCHES)] == [12]
    assert read_committed_lists(tmp_path, BREAKDOWNS) == []


def test_the_fastest_batch_is_chosen_alike_for_both_from_the_batches_that_both_ran() -> None:
    def larger(*runs: Run) -> Verdict:
        return only(verdicts.verdicts(runs), criteria.MVE_LARGER, "cce_kahan", "compiled")

    both = [*FIVE_SEEDS, *five("compiled", batch_size=32, speed=1500), *five("cce_kahan", batch_size=32, speed=1800)]
    verdict = larger(*both)
    assert (verdict.value, verdict.verdict, verdict.n) == (pytest.approx(1.2), "met", 5)
    assert verdict.remark == "B = 32 against 32, of 8, 32"
    alone = larger(*both, *five("cce_kahan", batch_size=64, speed=9000))
    assert alone.value == verdict.value, "a batch that the baseline lacks counts for nothing"
    assert alone.remark == "B = 32 against 32, of 8, 32; cce_kahan alone has B = 64"
    one_batch = larger(*FIVE_SEEDS, *five("cce_kahan", batch_size=32, speed=1800))
    assert (one_batch.verdict, "cce_kahan alone has B = 32" in one_batch.remark) == ("open", True)
    unlike = (run("cce_kahan", speed=9e3, batch_size=32, seq_len=512), run("cce_kahan", speed=9e3, tokens=2))
    assert larger(*both, *unlike) == verdict


def test_the_speed_of_a_batch_is_the_median_over_seeds_on_both_sides() -> None:
    """100, 104, 112 against 100: only the largest would meet 1.10."""
    speeds = (100, 104, 112, 100, 104)
    runs = [run("compiled", seed=seed, speed=100, batch_size=batch) for seed in range(5) for batch in (8, 16)]
    runs += [run("cce_kahan", seed=s, speed=v - b / 100, batch_size=b) for s, v in enumerate(speeds) for b in (8, 16)]
    verdict = only(verdicts.verdicts(runs), criteria.MVE_LARGER, "cce_kahan", "compiled")
    assert verdict.value == pytest.approx(1.04, abs=0.001)
    assert verdict.verdict != "met"


def test_the_backward_pass_is_judged_from_the_loss_layer_s_times() -> None:
    times = {"compiled": 3.0, "cce_filter": 1.5}
    runs = [one for loss, ms in times.items() for one in five(loss, loss_layer_ms={"forward": 1.0, "backward": ms})]
    verdict = only(verdicts.verdicts(runs), criteria.BACKWARD, "cce_filter", "compiled")
    assert (verdict.value, verdict.verdict) == (2.0, "met")
    unmeasured = only(
        verdicts.verdicts([run("compiled"), run("cce_filter")]), criteria.BACKWARD, "cce_filter", "compiled"
    )
    assert unmeasured.verdict == "open"
    exact = verdicts.verdicts([*runs, run("liger", loss_layer_ms={"forward": 4.0, "backward": 0.1})])
    judged = {verdict.backend for verdict in exact if verdict.criterion == criteria.BACKWARD}
    assert judged == {
        "cce_filter"
    }  # a loss that computes gradients in its forward pass has no backward pass to compare


def test_runs_with_checkpointing_are_judged_beside_those_without() -> None:
    full = [
        run("compiled", gib=4, activation_checkpointing="full"),
        run("cce_kahan", gib=1, activation_checkpointing="full"),
    ]
    found = verdicts.verdicts([*FIVE_SEEDS, *full], [answer("compiled", 12, 1000), answer("cce_kahan", 13, 1010)])
    memory = [v for v in found if (v.criterion, v.backend, v.against) == (criteria.MEMORY, "cce_kahan", "compiled")]
    assert [(v.value, v.setting) for v in memory] == [
        (pytest.approx(0.52), "checkpointing none"),
        (0.25, "checkpointing full"),
    ]
    batches = [v for v in found if (v.criterion, v.backend, v.against) == (criteria.BATCH, "cce_kahan", "compiled")]
    assert [v.value for v in batches] == [pytest.approx(13 / 12), None]


BLOCKS, FLOAT8 = (f"trainer.compile=blocks trainer.float8={kind} seed=free" for kind in ("none", "blocks"))


def trained(loss: str, seed: int, training: str, nats: float, model: str = "gla") -> Run:
    name = f"{model}-{loss}-{training}-s{seed}".replace(" ", "-")
    return run(loss, seed=seed, nats=nats, training=training, model=model, run_name=name)


def test_blocks_that_are_executed_differently_are_judged_apart() -> None:
    losses = {BLOCKS: {"compiled": 5.0, "cce_kahan": 5.001}, FLOAT8: {"compiled": 5.02, "cce_kahan": 5.022}}
    runs = [
        trained(loss, seed, training, nats + seed)
        for training, both in losses.items()
        for loss, nats in both.items()
        for seed in range(5)
    ]
    found = [v for v in verdicts.verdicts(runs) if (v.criterion, v.against) == (criteria.MVE_LOSS, "compiled")]
    assert [(v.setting, v.n, v.verdict) for v in found if v.backend == "cce_kahan"] == [
        ("compile=blocks", 5, "met"),
        ("compile=blocks, float8=blocks", 5, "met"),
    ]
    assert [v.value for v in found] == [pytest.approx(0.001), pytest.approx(0.002)]


@pytest.mark.parametrize(
    ("change", "against"),
    [
        ({"training": FLOAT8, "model": "gla"}, "gla, bf16"),
        ({"training": BLOCKS, "model": "gla shared_projection_rank=128"}, "gla, full projections"),
    ],
)
def test_a_change_of_the_blocks_is_judged_beside_runs_without_it(change: dict[str, str], against: str) -> None:
    bases = [trained("compiled", seed, BLOCKS, 5.0 + seed) for seed in range(6)]
    changed = [trained("compiled", seed, nats=5.03 + seed, **change) for seed in range(5)]
    other = [trained("cce_kahan", seed, nats=7.0, **change) for seed in range(5)]  # with no run beside them
    found = changes_of_loss([*bases, *changed, *other])
    assert [(v.backend, v.against, v.n, v.verdict) for v in found] == 2 * [("compiled", against, 5, "missed")]
    assert [v.value for v in found] == 2 * [pytest.approx(0.03)]
    assert not changes_of_loss(bases)


def test_compiled_blocks_are_judged_beside_plain_ones_and_beside_no_other_change() -> None:
    compiled, float8 = "trainer.compile=blocks trainer.float8=none", "trainer.compile=blocks trainer.float8=blocks"
    plain = [trained("compiled", seed, "trainer.compile=none trainer.float8=none", 5.0 + seed) for seed in range(5)]
    blocks = [trained("compiled", seed, compiled, 5.001 + seed) for seed in range(5)]
    both = [trained("compiled", seed, float8, 5.031 + seed) for seed in range(5)]
    found = [v for v in changes_of_loss([*plain, *blocks, *both]) if v.criterion == criteria.FINAL_LOSS]
    assert [(v.model, v.against, v.value, v.verdict) for v in found] == [
        ("gla, compile=blocks", "gla, plain blocks", pytest.approx(0.001), "met"),
        ("gla, float8=blocks", "gla, bf16", pytest.approx(0.03), "missed"),
    ]


@pytest.mark.usefixtures("text_alone")
def test_the_next_bottleneck_and_the_bound_of_a_free_loss_come_from_breakdowns_of_this_origin(tmp_path: Path) -> None:
    time = {"loss": {"forward": 1.0, "backward": 1.0}, "mixer": {"forward": 6.0}, "step": {"total": 10.0}}
    own = {"run": run("compiled").summary, "environment": HERE, "time": time, "steps": [], "hardware_utilisation": 0.93}
    own["memory"] = {"peak": {"measured": 13 * GIB}, "peak/without_loss_layer": {"measured": 10 * GIB}}
    text = write_report(FIVE_SEEDS, tmp_path, "g", (), [own, {**own, "environment": ELSEWHERE}])[0].read_text()
    assert (
        "the largest part of a step is mixer (60%). The loss takes 20.0% of a step. A loss without cost would make the "
        "step 1.250 x as fast." in text
    )
    assert "at 93% of the GPU's peak rate, so more sequences would only queue" in text
    assert "Its peak is 1.300 x that of the same step without a loss layer." in text
    assert "its breakdown is left out. It was made with another gpus" in text


@pytest.mark.usefixtures("text_alone")
def test_the_bound_of_a_free_loss_comes_from_the_runs_own_times(tmp_path: Path) -> None:
    times = {"loss_layer_ms": {"forward": 0.05, "backward": 0.15}, "step_time_ms_median": 1.0}
    runs = [run("compiled", **times), run("liger", **times), run("compiled", seed=1, **times)]
    lines = write_report(runs, tmp_path, "g")[0].read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if "speed of a step without it" in line)
    assert lines[at + 2 : at + 4] == ["| gla | compiled | none | 8 | 2048 | 32,000 | 20.0% | 1.250 x |", ""]


def test_backends_are_told_apart_by_the_options_in_which_they_differ() -> None:
    options = [{"accumulate": "kahan", "workspace_mib": None}, {"accumulate": "fp32", "workspace_mib": None}]
    summaries = [run("cce_kahan", loss_options=o).summary for o in options] + [run("standard").summary]
    assert backend_names(summaries) == ["cce_kahan accumulate=kahan", "cce_kahan accumulate=fp32", "standard"]
    assert backend_names(summaries[1:]) == ["cce_kahan", "standard"]


def test_a_report_holds_table_verdicts_branches_and_the_plots_that_apply(tmp_path: Path) -> None:
    failed = run("liger", status="unsupported", reason="no such GPU", train_loss_nats=None, tokens_per_second=None)
    other = [
        run(loss, batch_size=b, vocab_size=v)
        for loss in ("compiled", "cce_kahan")
        for b, v in ((16, 32000), (8, 64000))
    ]
    paths = write_report([*FIVE_SEEDS, *other, failed], tmp_path, "a group")
    names = {path.name for path in paths}
    assert {"report.md", "verdicts.md", "runs.json.xz", "loss_curves.png"} <= names
    assert "pareto.png" not in names, "points of two vocabularies belong in no one cloud"
    assert {"batch_scaling.png", "vocabulary_crossover.png", "loss_share_by_vocab_size.png"} <= names
    text = paths[0].read_text()
    assert "unsupported: no such GPU" in text
    setting = "batch_size=8, vocab_size=32000"
    figures = "0.520 | 0.500 to 0.550 | 5 | ≤ 0.600"
    assert f"| **met** | peak memory, ratio | {figures} | gla | cce_kahan | compiled | {setting} |" in text
    assert "Follow-up 2 (FP8 or INT4 scan): open." in text
    assert all(path.stat().st_size > 0 for path in paths)


def test_lengths_chunk_sizes_and_shares_of_time_have_plots_and_short_runs_no_curves(tmp_path: Path) -> None:
    times = {"loss_layer_ms": {"forward": 0.1, "backward": 0.2}, "steps": 20}
    lengths = [run("cce_kahan", seq_len=t, batch_size=16384 // t, **times) for t in (512, 2048)]
    chunks = [run("cce_kahan", seed=1, chunk_size=c, **times) for c in (64, 128)]
    for runs, expected in (
        (lengths, {"length_scaling.png", "loss_share_by_seq_len.png", "loss_time_by_seq_len.png"}),
        (chunks, {"chunk_sizes.png"}),
        ([*chunks, run("compiled", **times)], {"chunk_sizes.png", "pareto.png"}),
    ):
        assert {path.name for path in write_report(runs, tmp_path, "g") if path.suffix == ".png"} == expected


def test_lengths_are_drawn_from_zero_on_in_one_scale_that_holds_every_panels_points() -> None:
    speeds = {"gla": 1e5, "transformer": 9e5}
    runs = [run("cce_kahan", model=m, seq_len=t, speed=v) for m, v in speeds.items() for t in (512, 2048)]
    figure = plots.length_scaling(runs)
    low, high = figure.axes[0].get_ylim()
    assert (low, high) == figure.axes[1].get_ylim()
    assert low == 0
    assert high > 900
    pyplot.close(figure)


@pytest.mark.usefixtures("text_alone")
def test_a_run_that_ended_early_is_compared_over_the_steps_that_it_has(tmp_path: Path) -> None:
    def course(loss: str, steps: int, nats: float, seed: int = 0) -> Run:
        killed = (
            {}
            if steps == 80
            else {"status": "failed", "reason": "killed", "data_fingerprint": None, "training": "schedule.steps=80"}
        )
        curve = [(step, nats + 1 / step) for step in range(1, steps + 1)]
        valid = [(step, 100 * nats + step) for step in (40, 80) if step <= steps]
        last = {"train_loss_nats": curves.mean_of_last(curve)}
        return replace(run(loss, seed=seed, steps=steps, **killed, **last), losses=curve, validations=valid)

    runs = [course("cce_kahan", 70, 4.998), course("compiled", 80, 5.0), course("cce_kahan", 80, 4.9, seed=1)]
    text = write_report(runs, tmp_path, "g")[0].read_text()
    assert "| gla | cce_kahan, seed 0 | compiled, seed 0 | 70 | 0.0020 | -0.0020 | 40 | 539.80 | 540.00 |" in text
    assert "| gla | cce_kahan, seed 1 | cce_kahan, seed 0 | 70 | 0.0980 | -0.0980 | 40 | 530.00 | 539.80 |" in text
    assert "cce_kahan, seed 1 | compiled, seed 0" not in text
    assert [one.validations for one in read_committed(tmp_path)] == [one.validations for one in runs]
    figure = plots.loss_curves(runs)
    assert max(figure.axes[1].lines[0].get_xdata()) == 70, "the killed run's curve is drawn against compiled's"
    pyplot.close(figure)
    assert "steps that two runs have" not in write_report(runs[1:], tmp_path, "g")[0].read_text()
    short = [course("cce_kahan", 40, 4.998), runs[1]]
    assert "steps that two runs have" not in write_report(short, tmp_path, "g")[0].read_text()


@pytest.mark.usefixtures("text_alone")
def test_checkpointing_has_a_column_where_runs_differ_in_it(tmp_path: Path) -> None:
    runs = [run("compiled"), run("compiled", activation_checkpointing="full", run_name="other")]
    text = write_report(runs, tmp_path, "g")[0].read_text()
    assert "| gla | mve | compiled | full | 8 | 2048 |" in text
    assert "checkpointing |" not in write_report(runs[:1], tmp_path, "g")[0].read_text()


def test_without_compiled_and_eager_ratios_are_to_our_exact_loss() -> None:
    assert plots.baseline_of([run("cce_filter"), run("cce_kahan")]) == "cce_kahan"
    assert plots.baseline_of([run("cce_filter"), run("standard"), run("cce_kahan")]) == "standard"
    assert plots.baseline_of([run("cce_filter")]) == "compiled"


def test_what_filters_dropped_stands_in_the_report_and_reads_back(tmp_path: Path) -> None:
    curves = {"entries_kept": [(1, 0.5), (2, 0.25)], "dropped_mass_mean": [(1, 0.5), (2, 0.3)]}
    filtered = replace(run("cce_filter"), statistics=curves)
    paths = write_report([run("compiled"), filtered], tmp_path, "g")
    assert "| gla | cce_filter | 0 | 37.5000% | 0.400 | - | - | - |" in paths[0].read_text()
    assert (tmp_path / "dropped_mass.png").exists()
    assert [one.statistics for one in read_committed(tmp_path)] == [{}, curves]


def test_what_filters_dropped_has_a_panel_a_model() -> None:
    curves = {"dropped_mass_mean": [(1, 0.5), (2, 0.3)], "dropped_mass_p99": [(1, 0.9), (2, 0.8)]}
    models = [("gla", 0), ("gla", 1), ("kda", 0)]
    runs = [replace(run("cce_filter", model=model, seed=seed), statistics=curves) for model, seed in models]
    figure = plots.dropped_mass(runs)
    assert [(axes.get_title().split()[0], len(axes.lines)) for axes in figure.axes] == [("GLA", 2), ("KDA", 2)]
    assert [len(axes.collections) for axes in figure.axes] == [2, 0], "two seeds are a band"
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words == ["cce_filter (ours, filtered), mean", "cce_filter (ours, filtered), 99th percentile"]
    pyplot.close(figure)


def test_figures_close_to_each_other_are_ticked_as_they_are() -> None:
    runs = [run(loss, gib=57 + i / 1000, speed=4.2e7 + i) for i, loss in enumerate(("compiled", "cce_kahan"))]
    figure = plots.pareto(runs)
    figure.draw_without_rendering()
    for axis in (figure.axes[0].xaxis, figure.axes[0].yaxis):
        assert axis.get_offset_text().get_text() == ""
    pyplot.close(figure)


def test_the_crossover_lies_where_the_ratio_passes_one() -> None:
    speeds = {"compiled": (1000, 500), "cce_kahan": (800, 625), "standard": (500, 250)}  # ratios 1.25 and 0.8
    runs = [
        run(loss, vocab_size=vocab, speed=speed)
        for loss, pair in speeds.items()
        for vocab, speed in zip((32000, 128000), pair, strict=True)
    ]
    assert plots.crossover_lines(runs) == [
        "* gla x cce_kahan: step faster than compiled's above about 64,000 (n = 1: undecided)",
        "* gla x standard: step slower than compiled's from 32,000 to 128,000 (n = 1: undecided)",
    ]
    layers = {"compiled": (5.0, 20.0), "cce_kahan": (4.0, 19.0)}
    timed = [
        replace(one, summary={**one.summary, "loss_layer_ms": {"forward": ms, "backward": 0.0}})
        for one, ms in zip(runs[:4], [*layers["compiled"], *layers["cce_kahan"]], strict=True)
    ]
    assert plots.crossover_lines(timed) == [
        "* gla x cce_kahan: step faster than compiled's above about 64,000 (n = 1: undecided); "
        "loss layer faster than compiled's from 32,000 to 128,000 (n = 1: undecided)",
    ]
    assert plots.crossover_lines(runs[:1]) == []


def test_the_crossover_is_drawn_from_pairs_of_a_seed() -> None:
    """A host that is slow for the last seed slows both losses, so it changes no ratio."""
    hosts = enumerate((1.0, 1.0, 0.5))
    runs = [
        run(loss, seed=seed, vocab_size=vocab, speed=host * speed)
        for seed, host in hosts
        for loss, speed in (("compiled", 1000), ("cce_kahan", 1100))
        for vocab in (32000, 64000)
    ]
    figure = plots.vocabulary_crossover(runs)
    drawn = {tuple(line.get_ydata()) for line in figure.axes[0].lines if len(line.get_ydata()) == 2}
    assert (1.1, 1.1) in {tuple(round(float(y), 6) for y in ys) for ys in drawn}
    pyplot.close(figure)


@pytest.mark.usefixtures("text_alone")
def test_the_control_stands_beside_every_loss_and_is_judged_on_losses_alone(tmp_path: Path) -> None:
    """cce_kahan meets the MVE's bound, liger misses it, and the control is undecided."""
    drifts = {"compiled_nudged": (0.02, -0.01, 0.0, 0.02, -0.02), "cce_kahan": (0.001,) * 5, "liger": (0.05,) * 5}
    runs = [*five("compiled"), *five("standard")]
    runs += [run(loss, seed=s, nats=5 + d) for loss, nats in drifts.items() for s, d in enumerate(nats)]
    found = [v for v in verdicts.verdicts(runs) if v.backend == "compiled_nudged"]
    of_losses = {criteria.PERPLEXITY, criteria.VALID_LOSS, criteria.CURVES, criteria.MVE_LOSS}
    assert {v.criterion for v in found} == of_losses
    assert {v.against for v in found} == {"compiled"}
    write_report(runs, tmp_path, "g")
    for name in ("report.md", "verdicts.md"):
        text = (tmp_path / name).read_text()
        assert "### Undecided" not in text, "no loss is undecided"
        asked = [line.split(" | ") for line in text.splitlines() if "| MVE: final training loss" in line]
        losses = ["cce_kahan"] if name == "report.md" else ["standard", "cce_kahan", "liger"]
        judged = [cells[7] for cells in asked if cells[8].startswith("compiled")]
        assert set(judged) >= {"compiled_nudged", *losses}, "in one table, although the control is undecided"
        assert [cells[0] for cells in asked if cells[7] == "compiled_nudged"] == ["| **undecided**"]
        assert "`compiled_nudged` is the control of loss curves" in text
    alone = [*five("compiled"), *five("compiled_nudged")]
    write_report(alone, tmp_path, "g")
    assert "| compiled_nudged | compiled |" in (tmp_path / "verdicts.md").read_text()
    assert "is the control" not in write_report(FIVE_SEEDS, tmp_path, "g")[0].read_text()


def test_ways_of_summing_are_compared_with_compensated_sums_and_with_compiled() -> None:
    def way(accumulate: str, nats: float) -> list[Run]:
        options = {"accumulate": accumulate, "workspace_mib": 128}
        return [
            run("cce_kahan", seed=seed, nats=nats, loss_options=options, run_name=f"{accumulate}-{seed}")
            for seed in range(5)
        ]

    runs = [*five("compiled"), *way("kahan", 5.001), *way("fp32", 5.002), *way("bf16", 5.03)]
    found = [v for v in verdicts.verdicts(runs) if v.criterion is criteria.MVE_LOSS and v.value is not None]
    kahan = "cce_kahan accumulate=kahan"
    assert {(v.backend, v.against): (v.verdict, v.n) for v in found} == {
        (kahan, "compiled"): ("met", 5),
        ("cce_kahan accumulate=fp32", "compiled"): ("met", 5),
        ("cce_kahan accumulate=bf16", "compiled"): ("missed", 5),
        ("cce_kahan accumulate=fp32", kahan): ("met", 5),
        ("cce_kahan accumulate=bf16", kahan): ("missed", 5),
    }
    few = verdicts.verdicts([one for one in runs if one.summary["seed"] < 4])
    assert {v.against for v in few} == {"compiled", "standard", None}, "pairs too few to decide are not listed"


@pytest.mark.parametrize(
    ("backend", "others", "expected"),
    [
        ("cce_filter filter_c=False", ["compiled", "cce_kahan"], ["cce_kahan"]),
        ("cce_apple", ["cce_kahan accumulate=kahan", "cce_kahan accumulate=bf16"], ["cce_kahan accumulate=kahan"]),
        ("cce_kahan", ["compiled", "cce_kahan"], []),
        ("cce_kahan accumulate=kahan", ["cce_kahan accumulate=kahan", "cce_kahan accumulate=bf16"], []),
        (
            "cce_kahan accumulate=bf16 workspace_mib=8",
            ["cce_kahan accumulate=kahan workspace_mib=8", "cce_kahan accumulate=kahan workspace_mib=64"],
            ["cce_kahan accumulate=kahan workspace_mib=8"],
        ),
        ("liger accumulate=fp32", ["liger accumulate=kahan", "cce_kahan"], []),
    ],
)
def test_filters_are_compared_with_the_exact_loss_and_sums_with_compensated_ones(backend, others, expected) -> None:
    assert verdicts.own_baselines(backend, others) == expected


NO_TIMES = {
    **dict.fromkeys(("tokens_per_second", "step_time_ms_median", "wall_step_ms", "mfu", "mfu_6n")),
    "tokens_per_second_is": "not measured: other runs shared the GPU",
    "measured_steps": 0,
    "gpu_shared": True,
}
OF_TIMES = (criteria.SPEED, criteria.MVE_SPEED, criteria.MVE_NOT_SLOWER, criteria.MVE_LARGER, criteria.BACKWARD)


@pytest.mark.usefixtures("text_alone")
def test_runs_on_shared_gpus_decide_losses_and_memory_and_no_times(tmp_path: Path) -> None:
    state = {"sm_mhz": 1980.0, "memory_mhz": 3201.0, "watts": 600.0, "celsius": 50.0, "other_processes": 7}
    shared = NO_TIMES | {"gpu_state": state}
    losses = ("compiled", "cce_kahan", "cce_filter")
    found = verdicts.verdicts([one for loss in losses for one in five(loss, **shared)])
    of_times = [v for v in found if v.criterion in OF_TIMES and v.against == "compiled"]
    assert len(of_times) == 2 * 4 + 1, "the backward pass is asked of the filter alone"
    assert {(v.verdict, v.value) for v in of_times} == {("open", None)}
    assert all("not measured: the GPU was shared" in v.remark for v in of_times)
    others = (
        criteria.MVE_MEMORY,
        criteria.MVE_LOSS,
        criteria.CURVES,
        criteria.PERPLEXITY,
        criteria.VALID_LOSS,
    )
    assert {only(found, one, "cce_kahan", "compiled").n for one in others} == {5}
    text = write_report([one for loss in losses for one in five(loss, **shared)], tmp_path, "g")[0].read_text()
    assert "every run shared its GPU with other runs" in text
    assert "tokens/s, not measured" in text
    assert "other processes computed on the GPU" not in text


@pytest.mark.usefixtures("text_alone")
def test_a_report_says_when_several_gpus_of_a_kind_made_its_runs(tmp_path: Path) -> None:
    state = {"sm_mhz": 1980.0, "memory_mhz": 3201.0, "watts": 600.0, "celsius": 50.0, "other_processes": 0}
    for other, told in (("aaaa0000", False), ("bbbb1111", True)):
        runs = [
            *five("compiled", gpu_state=state | {"card": "aaaa0000"}),
            *five("cce_kahan", gpu_state=state | {"card": other}),
        ]
        text = write_report(runs, tmp_path, "g")[0].read_text()
        assert ("**2 GPUs of this kind made these runs**" in text) == told


def test_of_shared_and_unshared_runs_the_unshared_ones_decide_times() -> None:
    """Times that stand in a shared run's row all the same are left out too."""
    runs = [one for loss in ("compiled", "cce_kahan") for one in (*five(loss), run(loss, seed=5, gpu_shared=True))]
    speed = only(verdicts.verdicts(runs), criteria.SPEED, "cce_kahan", "compiled")
    assert speed.n == 5
    assert "2 of 12 runs left out: their GPU was shared" in speed.remark
    assert only(verdicts.verdicts(runs), criteria.MVE_LOSS, "cce_kahan", "compiled").n == 6


@pytest.mark.usefixtures("text_alone")
def test_other_processes_on_the_gpu_stand_in_the_report(tmp_path: Path) -> None:
    state = {
        "sm_mhz": 1980.0,
        "memory_mhz": 3201.0,
        "watts": 600.0,
        "celsius": 50.0,
        "other_processes": 2,
        "card": None,
    }
    text = write_report([run("compiled", gpu_state=state)], tmp_path, "g")[0].read_text()
    assert "SM clock at the end of training: 1,980 to 1,980 MHz" in text
    assert "2 other processes computed on the GPU" in text


def test_runs_of_two_origins_are_refused(tmp_path: Path) -> None:
    stranger = Run(run("standard").summary, ELSEWHERE)
    with pytest.raises(ConfigError, match="differ in gpus"):
        write_report([run("compiled"), stranger], tmp_path, "a group")
    assert not list(tmp_path.iterdir())


def test_committed_runs_read_back(tmp_path: Path) -> None:
    long = Run(run("compiled").summary, HERE, [(step, 1 / step) for step in range(1, 2404)], validations=[(9, 2.5)])
    killed = Run(run("standard").summary, HERE, [(960, 0.5)], {"dropped_mass_mean": [(960, 1 / 3)]}, mixture=("gpus",))
    idle = Run(run("liger").summary, HERE)
    write_committed([long, killed, idle], tmp_path)
    assert read_committed(tmp_path) == [long, killed, idle], "to the last bit"
    with pytest.raises(DataError, match=r"scripts/report\.py"):
        read_committed(tmp_path / "nowhere")


def test_a_mean_of_twenty_steps_is_of_steps_whatever_was_logged() -> None:
    """A swing of 40 steps: means over 20 steps keep two thirds of it, means over 20 records of every 5th step none."""
    flat = [(step, 5.0) for step in range(1, 401)]
    swing = [(step, 5.0 + 0.03 * (1 if step % 40 < 20 else -1)) for step, _ in flat]
    every = curves.compare(swing, flat).largest
    assert every == pytest.approx(0.03)
    for log_every in (2, 5, 10):
        logged = [point for point in swing if point[0] % log_every == 0]
        found = curves.compare(logged, flat)
        assert (found.largest, found.every) == (pytest.approx(0.03), log_every)
    assert curves.compare([point for point in swing if point[0] % 20 == 0], flat).largest is None, "no mean of one step"
    assert curves.compare(swing[:19], flat[:19]).largest is None


@pytest.mark.usefixtures("text_alone")
def test_a_committed_verdict_on_curves_is_that_of_the_raw_ones(tmp_path: Path) -> None:
    """Two curves of 20,000 steps are 0.02 nats apart over 40 steps."""
    steps = range(1, 20_001)
    base = [replace(one, losses=[(s, 5.0) for s in steps]) for one in five("compiled")]
    bump = [(s, 5.02 if 10_000 < s <= 10_040 else 5.0) for s in steps]
    ours = [replace(one, losses=bump) for one in five("cce_kahan")]
    write_report([*base, *ours], tmp_path, "g")
    raw = only(verdicts.verdicts([*base, *ours]), criteria.CURVES, "cce_kahan", "compiled")
    again = only(verdicts.verdicts(read_committed(tmp_path)), criteria.CURVES, "cce_kahan", "compiled")
    assert (raw.verdict, raw.value) == ("missed", pytest.approx(0.02))
    assert again == raw


@pytest.mark.usefixtures("text_alone")
def test_a_run_of_two_origins_is_named_and_decides_nothing(tmp_path: Path) -> None:
    group = tmp_path / "results" / "g"
    for one in [run("compiled"), run("cce_kahan", gib=1, speed=9000)]:
        directory = group / one.name
        directory.mkdir(parents=True)
        (directory / "summary.json").write_text(json.dumps(one.summary))
        second = ELSEWHERE if one.summary["loss"] == "cce_kahan" else HERE
        processes = [
            {**HERE, "from_step": 0, "to_step": 30, "command": "python train.py"},
            {**second, "from_step": 30, "to_step": 60, "command": "python train.py"},
        ]
        (directory / "environment.json").write_text(json.dumps({"processes": processes}))
    runs = read_runs(group)
    assert {one.summary["loss"]: one.mixture for one in runs} == {"cce_kahan": ("gpus",), "compiled": ()}
    for of_runs in (runs, read_committed(write_report(runs, tmp_path / "report", "g")[0].parent)):
        assert not [v for v in verdicts.verdicts(of_runs) if v.value is not None and v.backend == "cce_kahan"]
        assert [one.mixture for one in of_runs] == [("gpus",), ()]
    text = (tmp_path / "report" / "report.md").read_text()
    assert "**gla-cce_kahan-8-s0 is a mixture: its processes differ in gpus; it takes part in no verdict**" in text
    assert "| finished, a mixture |" in text


@pytest.mark.usefixtures("text_alone")
def test_a_report_names_the_choices_of_kernels_and_takes_no_two(tmp_path: Path) -> None:
    def chose(config: str, loss: str) -> Run:
        counts = {"fingerprint": config, "stored": 3, "near": 2, "tuned": 1}
        return replace(run(loss), environment={**HERE, "kernel_choices": {**counts, "choices": {"norm": config}}})

    write_report([chose("BT=16", "compiled"), chose("BT=16", "cce_kahan")], tmp_path, "g")
    line = "kernel choices of the first run: BT=16 (3 stored, 2 stored for another batch, 1 tuned at the run)"
    assert line in (tmp_path / "report.md").read_text()
    untuned = chose("BT=16", "compiled")
    untuned.environment["kernel_choices"]["first"] = 4
    write_report([untuned], tmp_path, "g")
    words = "BT=16 (3 stored, 2 stored for another batch, 4 in their first configuration, 1 tuned at the run)"
    assert words in (tmp_path / "report.md").read_text()
    with pytest.raises(ConfigError, match="the runs of g differ in kernel_choices"):
        check_origin([chose("BT=16", "compiled"), chose("BT=32", "cce_kahan")], "g")


def test_a_process_that_trained_no_step_is_no_origin_of_the_run() -> None:
    first, idle = {**HERE, "from_step": 0, "to_step": 60}, {**ELSEWHERE, "from_step": 60, "to_step": 60}
    assert read_origin({"processes": [first, idle]}).mixture == ()
    assert read_origin({"processes": [first, {**idle, "to_step": None}]}).mixture == ("gpus",)
    assert read_origin(HERE) == read_origin({"processes": [first]}), "a committed report has one flat entry"


@pytest.mark.usefixtures("text_alone")
def test_runs_of_two_horizons_are_never_compared(tmp_path: Path) -> None:
    def of(loss: str, horizon: int, **more: Any) -> Run:
        words = f"optimizer.lr=0.001 schedule.steps={horizon} init_from=None"
        return run(loss, training=words, run_name=f"{loss}-{horizon}", **more)

    runs = [of("compiled", 60), of("cce_kahan", 120, nats=4.0, speed=3000, gib=1)]
    assert not [v for v in verdicts.verdicts(runs) if v.against == "compiled" and v.value is not None]
    text = write_report(runs, tmp_path, "g")[0].read_text()
    assert "| seed | steps | status |" in text
    assert "| 0 | 60 of 120 | finished |" in text
    assert "| 3,000 | - |" in text, "no ratio to a run of another horizon"
    early = [replace(one, summary={**one.summary, "status": "interrupted"}) for one in runs]
    assert "Over the steps that two runs have" not in write_report(early, tmp_path, "g")[0].read_text()
    batches = [of("compiled", 60), of("compiled", 30, batch_size=16, steps=30)]
    assert plots.varies(batches, "batch_size"), "fewer steps, because the batch is larger: one family"


def test_a_report_is_made_from_the_rows_of_a_committed_one(tmp_path: Path) -> None:
    summary = tmp_path / "summaries" / "pair"
    write_report([run("compiled"), run("cce_kahan", gib=5)], summary, "pair", [answer("compiled", 12, 1000)])
    pages = {name: (summary / name).read_bytes() for name in ("report.md", "verdicts.md", "runs.json.xz")}
    (summary / "report.md").unlink()
    paths = make_report(load_config([f"summary={summary}"], "report"))
    assert {name: (summary / name).read_bytes() for name in pages} == pages
    assert paths[0] == summary / "report.md"
    for wrong, cause in (([], "neither"), (["group=g", f"summary={summary}"], "are both named")):
        with pytest.raises(ConfigError, match=cause):
            make_report(load_config(wrong, "report"))


@pytest.mark.parametrize("directory", REPORTS, ids=lambda path: path.name)
def test_every_committed_summary_reads_judges_and_plots(directory: Path) -> None:
    runs = read_committed(directory)
    table = frame(runs)
    assert len(table) == len(runs)
    assert table["peak_memory_gib"].notna().any()
    verdicts.verdicts(runs)
    for plot in (plots.pareto, plots.memory_parts, plots.batch_scaling):
        figure = plot(runs)
        assert figure.axes
        pyplot.close(figure)


def test_a_frame_has_the_loss_layer_s_shares() -> None:
    times = {"forward": 0.1, "backward": 0.3}
    table = frame([run("cce_kahan", gib=10, step_time_ms_median=2.0, loss_layer_ms=times)])
    assert table.loc[0, "loss_layer_share"] == pytest.approx(0.1)
    assert table.loc[0, "loss_layer_time_share"] == pytest.approx(0.2)
    assert table.loc[0, "loss_backward_ms"] == 0.3
    assert table.loc[0, "gpu"] == "H200"


OF_THE_STUDY = (
    "(H1: ",
    "(H2)",
    "Follow-up",
    "If the hypothesis is wrong",
    "November",
    "restates the perplexity's criterion",
)
ABBREVIATIONS = ("B: ", "T: ", "V: ", "n: ", "nats: ", "MFU: ", "*By 6N*", "MVE: ")


@pytest.mark.usefixtures("text_alone")
@pytest.mark.parametrize("command", ["python train.py", "python train.py experiment=null"])
def test_a_report_of_own_runs_has_no_hypothesis_and_explains_its_abbreviations(command: str, tmp_path: Path) -> None:
    own = [one for size in ("mve", "350m") for loss in ("compiled", "cce_kahan") for one in five(loss, size=size)]
    study = [path.read_text() for path in write_report(own, tmp_path / "study", "g")[:3]]
    for words in OF_THE_STUDY:
        assert any(words in text for text in study), "or this test checks nothing"
    for one in own:
        one.summary["command"] = command
    for text in (path.read_text() for path in write_report(own, tmp_path / "own", "g")[:3]):
        assert not [words for words in OF_THE_STUDY if words in text]
        assert "For other runs they are a yardstick" in text
    report = (tmp_path / "own" / "report.md").read_text()
    assert not [word for word in ABBREVIATIONS if word not in report.partition("## Abbreviations")[2]]
    assert "## Abbreviations" not in study[0], "committed reports stay as they are"


def test_schedules_of_different_ends_are_told_apart_by_the_key_of_the_configuration() -> None:
    runs = [
        one
        for steps in (60, 200)
        for loss in ("compiled", "cce_kahan")
        for one in five(loss, training=f"schedule.steps={steps} optimizer.lr=1")
    ]
    settings = {v.setting for v in verdicts.verdicts(runs) if v.criterion == criteria.MEMORY}
    assert settings == {"schedule.steps=60"}, "the setting of most runs, here the first"
