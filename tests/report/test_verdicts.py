"""Runs are compared by seed, and judged by intervals in both directions. What was not measured is never an answer."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from made_up_runs import BLOCKS, ELSEWHERE, FIVE_SEEDS, FLOAT8, GIB, HERE, answer, five, only, run, trained

from linrnn.report.curves import largest_difference
from linrnn.report.runs import Run, backend_names, origin_warning, read_committed, read_runs
from linrnn.report.targets import Target, Verdict
from linrnn.report.write import write_report
from linrnn.runs.intervals import AT_LEAST, AT_MOST, WITHIN, estimate
from linrnn.runs.intervals import answer as answer_of
from study.criteria import CRITERIA
from study.criteria import verdicts as judged

pytestmark = pytest.mark.usefixtures("text_alone")
MEMORY, SPEED, BATCH, SPEED_AT_LARGEST = (CRITERIA[k] for k in ("MEMORY", "SPEED", "BATCH", "SPEED_AT_LARGEST"))
PERPLEXITY, VALID_LOSS, CURVES, FINAL_LOSS = (CRITERIA[k] for k in ("PERPLEXITY", "VALID_LOSS", "CURVES", "FINAL_LOSS"))
BACKWARD, SHARE, SHARE_WITHOUT = (CRITERIA[k] for k in ("BACKWARD", "SHARE", "SHARE_WITHOUT"))
MVE_MEMORY, MVE_SPEED, MVE_NOT_SLOWER = (CRITERIA[k] for k in ("MVE_MEMORY", "MVE_SPEED", "MVE_NOT_SLOWER"))
MVE_LARGER, MVE_LOSS = (CRITERIA[k] for k in ("MVE_LARGER", "MVE_LOSS"))


NO_TIMES = {
    **dict.fromkeys(("tokens_per_second", "step_time_ms_median", "wall_step_ms", "mfu")),
    "tokens_per_second_is": "not measured: other runs shared the GPU",
    "measured_steps": 0,
    "gpu_shared": True,
}


def verdict_on(found: Sequence[Verdict], target: Target) -> Verdict:
    """The verdict on our exact loss beside torch.compile."""
    return only(found, target, "cce_kahan", "compiled")


OF_TIMES = (SPEED, MVE_SPEED, MVE_NOT_SLOWER, MVE_LARGER, BACKWARD)


def test_ratios_are_medians_over_paired_seeds_with_intervals():
    found = judged(FIVE_SEEDS)
    memory = verdict_on(found, MEMORY)
    assert (memory.value, memory.verdict, memory.n) == (pytest.approx(0.52), "reached", 5)
    assert (memory.low, memory.high) == (pytest.approx(0.5), pytest.approx(0.55)), "memory does not scatter: a range"
    assert only(found, MEMORY, "cce_kahan", "standard").value == pytest.approx(0.26)
    speed = verdict_on(found, SPEED)
    assert (speed.value, speed.verdict) == (pytest.approx(1.09), "inconclusive"), "the interval holds 1.08"
    assert (speed.low or 2) < 1.08 < (speed.high or 0)
    for criterion, value in ((MVE_LOSS, 0.004), (CURVES, 0.004), (PERPLEXITY, 0.04), (VALID_LOSS, 0.004)):
        one = verdict_on(found, criterion)
        assert (one.value, one.verdict) == (pytest.approx(value), "reached")


@pytest.mark.parametrize("n", range(1, 5))
def test_fewer_than_five_pairs_decide_nothing_but_memory(n):
    runs = [*five("compiled")[:n], *five("cce_kahan", speed=5000, gib=1)[:n]]
    found = judged(runs)
    for criterion in (SPEED, PERPLEXITY, VALID_LOSS, CURVES, MVE_LOSS):
        verdict = verdict_on(found, criterion)
        assert (verdict.verdict, verdict.n) == ("inconclusive", n)
        assert f"n = {n}, needs 5" in verdict.remark
    assert verdict_on(found, MEMORY).verdict == "reached", "one run decides"


def test_equal_within_a_margin_means_to_either_side():
    """A perplexity two below the baseline's is welcome, but it is not the same model."""
    for nats, expected in ((4.8, "not reached"), (5.2, "not reached"), (5.004, "reached"), (4.996, "reached")):
        found = judged([*five("compiled"), *five("cce_kahan", nats=nats)])
        for criterion in (PERPLEXITY, VALID_LOSS, MVE_LOSS):
            assert verdict_on(found, criterion).verdict == expected


def test_an_interval_on_both_sides_of_the_target_decides_nothing():
    intervals = ((0.5, 0.9), (0.5, 1.1), (1.1, 1.2), (-1.2, -1.0), (-1.2, 1.2))
    for rule, target, expected in (
        (AT_MOST, 1.0, [True, None, False, True, None]),
        (AT_LEAST, 1.0, [False, None, True, False, None]),
        (WITHIN, 0.9, [True, None, False, False, None]),
    ):
        assert [answer_of(low, high, rule, target) for low, high in intervals] == expected


def test_the_interval_of_five_ratios_holds_the_truth_nine_times_in_ten():
    draw = random.Random(0)
    studies = [[1.05 * 2.718281828 ** draw.gauss(0, 0.02) for _ in range(5)] for _ in range(1000)]
    found = [estimate(values, ratios=True) for values in studies]
    held = sum(one.low <= 1.05 <= one.high for one in found if one.low is not None and one.high is not None)
    assert 0.87 < held / len(found) < 0.93
    assert estimate([1, 2, 3, 4, 5], ratios=False).high == pytest.approx(3 + 2.1318 * (2.5 / 5) ** 0.5, rel=1e-4)
    inverse = estimate([1 / value for value in studies[0]], ratios=True)
    assert inverse.high == pytest.approx(1 / found[0].low), "neither loss is preferred"


def test_runs_that_learn_differently_are_not_compared(tmp_path):
    """With another learning rate, schedule or initial weights, loss and curve say nothing about the loss layer."""

    def trained(loss: str, lr: float = 0.001, horizon: int = 60, **more: Any) -> Run:
        words = f"optimizer.lr={lr} schedule.steps={horizon} init_from=None"
        return run(loss, training=words, run_name=f"{loss}-{lr}-{horizon}", **more)

    runs = [trained("compiled"), trained("cce_kahan", lr=0.002, nats=4.0)]
    runs.append(trained("cce_kahan", horizon=120, speed=3000))
    assert not [v for v in judged(runs) if v.against == "compiled" and v.value is not None]
    runs.append(trained("cce_kahan"))
    values = [v.value for v in judged(runs) if v.target == SPEED and v.against == "compiled"]
    assert [value for value in values if value is not None] == [1.0]
    text = write_report(runs, tmp_path, "g")[0].read_text()
    assert "| cce_kahan-0.002-60 | gla |" in text, "two rows would look alike without their names"
    assert "| seed | steps | status |" in text
    assert "| 0 | 60 of 120 | finished |" in text
    assert "| 3,000 | - |" in text, "no ratio to a run of another horizon"


def test_losses_of_a_few_steps_are_not_compared():
    found = judged([run("compiled", steps=49), run("cce_kahan", steps=49, nats=7.0)])
    for criterion in (PERPLEXITY, VALID_LOSS, MVE_LOSS, CURVES):
        verdict = verdict_on(found, criterion)
        assert verdict.verdict == "not measured"
        assert "50 steps" in verdict.remark
    assert verdict_on(found, MEMORY).value is not None
    enough = judged([run("compiled", steps=50), run("cce_kahan", steps=50, nats=7.0)])
    assert verdict_on(enough, VALID_LOSS).value == pytest.approx(2.0)


def test_speed_and_memory_on_a_cpu_are_no_answer():
    cpu = {"memory_bytes": {"resident_peak": GIB}}
    runs = [*five("compiled", **cpu), *five("cce_kahan", speed=2000, **cpu)]
    for batch in (16, 32):
        runs += [*five("compiled", batch_size=batch, **cpu), *five("cce_kahan", batch_size=batch, speed=2000, **cpu)]
    found = judged(runs)
    for criterion in (SPEED, MVE_SPEED, MVE_NOT_SLOWER, MVE_LARGER, MEMORY, MVE_MEMORY):
        verdict = verdict_on(found, criterion)
        assert (verdict.verdict, "on a GPU" in verdict.remark) == ("not measured", True)


def test_device_time_decides_no_speed_and_is_never_held_against_wall_clock():
    def old(runs: list[Run]) -> list[Run]:
        kept = [{k: v for k, v in one.summary.items() if k != "tokens_per_second_is"} for one in runs]
        return [replace(one, summary=summary) for one, summary in zip(runs, kept, strict=True)]

    base, ours = five("compiled"), five("cce_kahan", speed=2000)
    both = verdict_on(judged([*old(base), *old(ours)]), SPEED)
    assert (both.verdict, both.value) == ("inconclusive", 2.0)
    assert "to be measured again" in both.remark
    mixed = verdict_on(judged([*old(base), *ours]), SPEED)
    assert mixed.value is None


def test_what_was_not_measured_is_open_and_says_what_it_needs():
    found = judged([run("cce_kahan")])
    memory = verdict_on(found, MEMORY)
    assert (memory.verdict, memory.value, memory.n) == ("not measured", None, 0)
    assert "compiled has no finished run" in memory.remark
    assert "find_max_batch" in verdict_on(found, BATCH).remark


def test_the_loss_layer_s_share_says_whether_gradients_count():
    found = judged([run("cce_kahan", gib=10)])
    gradients = 2 * 256 * (8 * 2048 + 32000)
    assert only(found, SHARE, "cce_kahan", None).value == pytest.approx(0.1)
    without = only(found, SHARE_WITHOUT, "cce_kahan", None)
    assert without.value == pytest.approx((GIB - gradients) / (10 * GIB))


def test_a_run_that_was_made_again_is_no_further_seed():
    again = [run("cce_kahan", gib=gib, run_name=f"again-{gib}") for gib in (4, 5, 6)]
    memory = verdict_on(judged([run("compiled"), *again]), MEMORY)
    assert (memory.value, memory.n, memory.low) == (0.5, 1, None)


def test_a_run_is_compared_with_the_baseline_s_run_of_its_own_seed():
    runs = [run("compiled", seed=seed, gib=8 * (seed + 1)) for seed in range(3)]
    runs += [run("cce_kahan", seed=seed, gib=4 * (seed + 1)) for seed in range(1, 4)]
    memory = verdict_on(judged(runs), MEMORY)
    assert (memory.value, memory.low, memory.high, memory.n) == (0.5, 0.5, 0.5, 2)


def test_a_search_answers_also_where_the_runs_tell_more_losses_apart():
    kahan, fp32 = ({"loss_options": {"accumulate": way}} for way in ("kahan", "fp32"))
    answers = [answer("compiled", 8, 1000), {**answer("cce_kahan", 16, 1100), **kahan}]
    runs = [
        run(loss, seed=seed, **more) for loss, more in (("compiled", {}), ("cce_kahan", kahan)) for seed in range(3)
    ]
    met = verdict_on(judged(runs, answers), BATCH)
    assert (met.verdict, met.value) == ("reached", 2.0)
    runs += [run("cce_kahan", seed=seed, run_name=f"fp32-{seed}", **fp32) for seed in range(3)]
    found = judged(runs, answers)
    both = [only(found, BATCH, f"cce_kahan accumulate={way}", "compiled") for way in ("kahan", "fp32")]
    assert [one.verdict for one in both] == ["reached", "not measured"]


def test_largest_batches_answer_batch_and_speed_and_other_origins_do_not():
    answers = [answer("compiled", 12, 1000), answer("cce_kahan", 13, 1010)]
    of_batches = (BATCH, "cce_kahan", "compiled")
    found = judged(FIVE_SEEDS, answers)
    batch = verdict_on(found, BATCH)
    assert (batch.value, batch.verdict) == (pytest.approx(13 / 12), "not reached")
    speed = verdict_on(found, SPEED_AT_LARGEST)
    assert (speed.value, speed.verdict) == (pytest.approx(1.01), "inconclusive"), "a probe each"
    by_device = [{**one["probes"][0], "tokens_per_second_is": "device time"} for one in answers]
    by_device = [{**one, "probes": [probe]} for one, probe in zip(answers, by_device, strict=True)]
    assert "by the device time" in verdict_on(judged(FIVE_SEEDS, by_device), SPEED_AT_LARGEST).remark
    compiled_blocks = {**answer("cce_kahan", 24, 1010), "training": "trainer.compile_blocks=True"}
    unlike = judged(FIVE_SEEDS, [answer("compiled", 12, 1000), compiled_blocks])
    assert verdict_on(unlike, BATCH).value is None
    of_two = [{**one, "parallel": "fsdp", "world_size": 2} for one in answers]
    assert only(judged(FIVE_SEEDS, [answers[0], of_two[1]]), *of_batches).value is None
    both = only(judged(FIVE_SEEDS, of_two), *of_batches)
    assert both.value == pytest.approx(13 / 12)
    assert "on each of 2 ranks (fsdp)" in both.setting
    strange = judged(FIVE_SEEDS, [answer("compiled", 12, 1000), answer("cce_kahan", 24, 1010, ELSEWHERE)])
    batch = verdict_on(strange, BATCH)
    assert batch.verdict == "not measured"
    assert "another device" in batch.remark


def test_a_search_that_met_no_fitting_batch_and_left_some_untried_answers_nothing():
    compiled, nothing = answer("compiled", 12, 1000), answer("cce_kahan", 0, 0)
    cut_off = verdict_on(judged(FIVE_SEEDS, [compiled, {**nothing, "exact": False}]), BATCH)
    assert (cut_off.value, cut_off.verdict) == (None, "not measured")
    assert "needs a search by scripts/find_max_batch.py" in cut_off.remark
    for ours, exact, of_base in ((18, False, True), (13, False, True), (18, True, False)):
        answers = [{**compiled, "exact": of_base}, {**answer("cce_kahan", ours, 1000), "exact": exact}]
        found = verdict_on(judged(FIVE_SEEDS, answers), BATCH)
        assert (found.verdict, found.remark) == ("inconclusive", "a search did not end exact")
    none = verdict_on(judged(FIVE_SEEDS, [compiled, nothing]), BATCH)
    assert (none.value, none.verdict) == (0, "not reached")


def test_the_fastest_batch_is_chosen_alike_for_both_from_the_batches_that_both_ran():
    def larger(*runs: Run) -> Verdict:
        return verdict_on(judged(runs), MVE_LARGER)

    both = [*FIVE_SEEDS, *five("compiled", batch_size=32, speed=1500), *five("cce_kahan", batch_size=32, speed=1800)]
    verdict = larger(*both)
    assert (verdict.value, verdict.verdict, verdict.n) == (pytest.approx(1.2), "reached", 5)
    assert verdict.remark == "B = 32 against 32, of 8, 32"
    alone = larger(*both, *five("cce_kahan", batch_size=64, speed=9000))
    assert alone.value == verdict.value, "a batch that the baseline lacks counts for nothing"
    one_batch = larger(*FIVE_SEEDS, *five("cce_kahan", batch_size=32, speed=1800))
    assert one_batch.verdict == "not measured"
    unlike = (run("cce_kahan", speed=9e3, batch_size=32, seq_len=512), run("cce_kahan", speed=9e3, tokens=2))
    assert larger(*both, *unlike) == verdict


def test_the_backward_pass_is_judged_from_the_loss_layer_s_times():
    times = {"compiled": 3.0, "cce_filter": 1.5}
    runs = [one for loss, ms in times.items() for one in five(loss, loss_layer_ms={"forward": 1.0, "backward": ms})]
    verdict = only(judged(runs), BACKWARD, "cce_filter", "compiled")
    assert (verdict.value, verdict.verdict) == (2.0, "reached")
    unmeasured = only(judged([run("compiled"), run("cce_filter")]), BACKWARD, "cce_filter", "compiled")
    assert unmeasured.verdict == "not measured"
    exact = judged([*runs, run("liger", loss_layer_ms={"forward": 4.0, "backward": 0.1})])
    asked = {verdict.backend for verdict in exact if verdict.target == BACKWARD}
    assert asked == {"cce_filter"}  # a loss that computes gradients in its forward pass has no backward pass to compare


def test_runs_with_checkpointing_are_judged_beside_those_without():
    how = {"activation_checkpointing": "full"}
    full = [run("compiled", gib=4, **how), run("cce_kahan", gib=1, **how)]
    found = judged([*FIVE_SEEDS, *full], [answer("compiled", 12, 1000), answer("cce_kahan", 13, 1010)])
    memory = [v for v in found if (v.target, v.backend, v.against) == (MEMORY, "cce_kahan", "compiled")]
    assert [(v.value, v.setting) for v in memory] == [
        (pytest.approx(0.52), "checkpointing none"),
        (0.25, "checkpointing full"),
    ]
    batches = [v for v in found if (v.target, v.backend, v.against) == (BATCH, "cce_kahan", "compiled")]
    assert [v.value for v in batches] == [pytest.approx(13 / 12), None]


def test_blocks_that_are_executed_differently_are_judged_apart():
    losses = {BLOCKS: {"compiled": 5.0, "cce_kahan": 5.001}, FLOAT8: {"compiled": 5.02, "cce_kahan": 5.022}}
    runs = [
        trained(loss, seed, training, nats + seed)
        for training, both in losses.items()
        for loss, nats in both.items()
        for seed in range(5)
    ]
    found = [v for v in judged(runs) if (v.target, v.against) == (MVE_LOSS, "compiled")]
    assert [(v.setting, v.n, v.verdict) for v in found if v.backend == "cce_kahan"] == [
        ("compile=blocks", 5, "reached"),
        ("compile=blocks, float8=blocks", 5, "reached"),
    ]
    assert [v.value for v in found] == [pytest.approx(0.001), pytest.approx(0.002)]


def test_backends_are_told_apart_by_the_options_in_which_they_differ():
    options = [{"accumulate": "kahan", "workspace_mib": None}, {"accumulate": "fp32", "workspace_mib": None}]
    summaries = [run("cce_kahan", loss_options=o).summary for o in options] + [run("standard").summary]
    assert backend_names(summaries) == ["cce_kahan accumulate=kahan", "cce_kahan accumulate=fp32", "standard"]
    assert backend_names(summaries[1:]) == ["cce_kahan", "standard"]


def test_what_filters_dropped_stands_in_the_report_and_reads_back(tmp_path):
    curves = {"loss/entries_kept": [(1, 0.5), (2, 0.25)], "loss/dropped_mass_mean": [(1, 0.5), (2, 0.3)]}
    filtered = replace(run("cce_filter"), curves={**run("cce_filter").curves, **curves})
    paths = write_report([run("compiled"), filtered], tmp_path, "g")
    assert "| gla | cce_filter | 0 | 37.5000% | 0.400 | - | - | - |" in paths[0].read_text()
    assert curves.items() <= read_committed(tmp_path)[1].curves.items()


def test_runs_on_shared_gpus_decide_losses_and_memory_and_no_times(tmp_path):
    state = {"sm_mhz": 1980.0, "memory_mhz": 3201.0, "watts": 600.0, "celsius": 50.0, "other_processes": 7}
    shared = NO_TIMES | {"gpu_state": state}
    losses = ("compiled", "cce_kahan", "cce_filter")
    found = judged([one for loss in losses for one in five(loss, **shared)])
    of_times = [v for v in found if v.target in OF_TIMES and v.against == "compiled"]
    assert len(of_times) == 2 * 4 + 1, "the backward pass is asked of the filter alone"
    assert {(v.verdict, v.value) for v in of_times} == {("not measured", None)}
    others = (MVE_MEMORY, MVE_LOSS, CURVES, PERPLEXITY, VALID_LOSS)
    assert {verdict_on(found, one).n for one in others} == {5}
    text = write_report([one for loss in losses for one in five(loss, **shared)], tmp_path, "g")[0].read_text()
    assert "every run shared its GPU with other runs" in text
    assert "tokens/s, not measured" in text
    assert "other processes computed on the GPU" not in text


def test_a_mean_of_twenty_steps_is_of_steps_whatever_was_logged():
    """A swing of 40 steps: means over 20 steps keep two thirds of it, means over 20 records of every 5th step none."""
    flat = [(step, 5.0) for step in range(1, 401)]
    swing = [(step, 5.0 + 0.03 * (1 if step % 40 < 20 else -1)) for step, _ in flat]
    assert largest_difference(swing, flat) == (pytest.approx(0.03), 1)
    for log_every in (2, 5, 10):
        logged = [point for point in swing if point[0] % log_every == 0]
        assert largest_difference(logged, flat) == (pytest.approx(0.03), log_every)
    assert largest_difference([point for point in swing if point[0] % 20 == 0], flat)[0] is None, "no mean of one step"
    assert largest_difference(swing[:19], flat[:19])[0] is None
    assert largest_difference(swing[49:50], flat)[0] is None, "no mean of the only step that both logged"


def test_a_run_of_two_origins_is_named_and_decides_nothing(tmp_path):
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
    assert {one.summary["loss"]: len(one.environments) for one in runs} == {"cce_kahan": 2, "compiled": 1}
    for of_runs in (runs, read_committed(write_report(runs, tmp_path / "report", "g")[0].parent)):
        assert origin_warning(of_runs) == (
            "the runs differ in device. A (commit aaaaaaaaa): gla-cce_kahan-8-s0, gla-compiled-8-s0; "
            "B (commit aaaaaaaaa): gla-cce_kahan-8-s0; a run of two origins decides nothing"
        )
        assert not [v for v in judged(of_runs) if v.value is not None and v.backend == "cce_kahan"]
    assert "**Warning**: the runs differ in device." in (tmp_path / "report" / "report.md").read_text()


@pytest.mark.usefixtures("text_alone")
def test_each_setting_has_the_baseline_that_ran_in_it(tmp_path):
    """A compiled run on another text does not take eager's place where only eager ran."""
    other = {"model": "kda", "vocab_size": 4096}
    text = write_report([run("standard"), run("cce_kahan"), run("compiled", **other)], tmp_path, "g")[0].read_text()
    assert "| validation loss, difference, nats | +0.0000 | - | 1 | gla | cce_kahan | standard |" in text
    assert "has no finished run" not in text
