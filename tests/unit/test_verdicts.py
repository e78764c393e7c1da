"""Verdicts from figures worked out by hand; what was not measured stays open; nothing is mixed across origins."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot

from linrnn import plots, verdicts
from linrnn.branches import branches
from linrnn.errors import ConfigError, DataError
from linrnn.report import write_report
from linrnn.results import (
    BREAKDOWNS,
    CURVE_POINTS,
    MAX_BATCHES,
    Run,
    backend_names,
    frame,
    read_committed,
    read_committed_lists,
    read_runs,
    write_committed,
)
from linrnn.verdicts import Verdict

GIB = 2**30
HERE = {"packages": {"torch": "2.11"}, "gpus": [{"name": "H200"}], "git": {"commit": "a" * 40, "dirty": False}}
ELSEWHERE = {**HERE, "gpus": [{"name": "H100"}]}
COMMITTED = Path(__file__).resolve().parents[2] / "results" / "summaries"


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
        "n_parameters": 10_000_000,
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
        "step_time_ms_median": 1.0,
        "mfu": 0.1,
        "device": "H200",
        "command": "python train.py",
        **more,
    }
    return Run(summary, HERE, [(step, nats + 1 / step) for step in range(1, 41)])


def only(found: Sequence[Verdict], criterion: verdicts.Criterion, backend: str, against: str | None) -> Verdict:
    (verdict,) = [v for v in found if (v.criterion, v.backend, v.against) == (criterion, backend, against)]
    return verdict


THREE_SEEDS = [
    *(run("compiled", seed=seed, gib=10, speed=1000) for seed in range(3)),
    *(run("standard", seed=seed, gib=20, speed=900) for seed in range(3)),
    *(
        run("cce_kahan", seed=s, gib=g, speed=v, nats=5.004)
        for s, g, v in ((0, 5, 1090), (1, 5.5, 1100), (2, 5.2, 1000))
    ),
]


def test_ratios_are_medians_over_paired_seeds_with_margin_and_spread() -> None:
    found = verdicts.verdicts(THREE_SEEDS)
    memory = only(found, verdicts.MEMORY, "cce_kahan", "compiled")
    assert (memory.value, memory.verdict, memory.seeds) == (pytest.approx(0.52), "met", 3)
    assert memory.margin == pytest.approx(0.08)
    assert memory.spread == pytest.approx(0.05)
    eager = only(found, verdicts.MEMORY, "cce_kahan", "standard")
    assert eager.value == pytest.approx(0.26)
    loss = only(found, verdicts.MVE_LOSS, "cce_kahan", "compiled")
    assert (loss.value, loss.verdict) == (pytest.approx(0.004), "met")
    curves = only(found, verdicts.CURVES, "cce_kahan", "compiled")
    assert (curves.value, curves.verdict) == (pytest.approx(0.004), "met")
    perplexity = only(found, verdicts.PERPLEXITY, "cce_kahan", "compiled")
    assert perplexity.value == pytest.approx(0.04)


def test_runs_that_learn_differently_are_not_compared(tmp_path: Path) -> None:
    """Another learning rate, or other weights to start from: neither loss nor curve says anything of the loss layer."""
    fast, slow = ("optimizer.lr=0.002 init_from=None", "optimizer.lr=0.001 init_from=None")
    runs = [run("compiled", training=slow), run("cce_kahan", training=fast, nats=4.0)]
    compared = [v for v in verdicts.verdicts(runs) if v.against == "compiled" and v.value is not None]
    assert not compared
    both = [*runs, run("cce_kahan", training=slow, run_name="gla-cce_kahan-lr0.001")]
    values = [v.value for v in verdicts.verdicts(both) if v.criterion is verdicts.SPEED and v.against == "compiled"]
    assert [value for value in values if value is not None] == [1.0]
    table = write_report(both, tmp_path, "g")[0].read_text()
    assert "| run | model |" in table, "two rows would look alike"
    assert "| gla-cce_kahan-lr0.001 | gla |" in table


def test_losses_of_a_few_steps_are_not_compared() -> None:
    found = verdicts.verdicts([run("compiled", steps=49), run("cce_kahan", steps=49, nats=7.0)])
    for criterion in (verdicts.PERPLEXITY, verdicts.MVE_LOSS, verdicts.CURVES):
        verdict = only(found, criterion, "cce_kahan", "compiled")
        assert verdict.verdict == "open"
        assert "50 steps" in verdict.remark
    assert only(found, verdicts.MEMORY, "cce_kahan", "compiled").value is not None


def test_times_of_a_few_steps_are_not_compared() -> None:
    times = {"loss_layer_ms": {"forward": 1.0, "backward": 1.0}}
    found = verdicts.verdicts([run("compiled", **times), run("cce_filter", speed=2000, measured_steps=4, **times)])
    for criterion in (verdicts.SPEED, verdicts.MVE_SPEED, verdicts.BACKWARD):
        verdict = only(found, criterion, "cce_filter", "compiled")
        assert (verdict.verdict, "5 steps after the warm-up" in verdict.remark) == ("open", True)


def test_seeds_that_disagree_leave_a_criterion_open() -> None:
    speed = only(verdicts.verdicts(THREE_SEEDS), verdicts.SPEED, "cce_kahan", "compiled")
    assert (speed.verdict, speed.value) == ("open", pytest.approx(1.09))
    assert "disagree" in speed.remark


def test_what_was_not_measured_is_open_and_says_what_it_needs() -> None:
    found = verdicts.verdicts([run("cce_kahan")])
    memory = only(found, verdicts.MEMORY, "cce_kahan", "compiled")
    assert (memory.verdict, memory.value, memory.margin) == ("open", None, None)
    assert "compiled has no finished run" in memory.remark
    assert "find_max_batch" in only(found, verdicts.BATCH, "cce_kahan", "compiled").remark


def test_the_loss_layer_s_share_says_whether_gradients_count() -> None:
    found = verdicts.verdicts([run("cce_kahan", gib=10)])
    gradients = 2 * 256 * (8 * 2048 + 32000)
    assert only(found, verdicts.SHARE, "cce_kahan", None).value == pytest.approx(0.1)
    without = only(found, verdicts.SHARE_WITHOUT, "cce_kahan", None)
    assert without.value == pytest.approx((GIB - gradients) / (10 * GIB))


def test_the_width_of_a_size_that_was_changed_is_the_run_s_own() -> None:
    found = verdicts.verdicts([run("cce_kahan", gib=10, hidden_size=512)])
    gradients = 2 * 512 * (8 * 2048 + 32000)
    assert only(found, verdicts.SHARE_WITHOUT, "cce_kahan", None).value == pytest.approx((GIB - gradients) / (10 * GIB))


def test_a_process_s_memory_on_a_cpu_is_no_answer() -> None:
    runs = [run(loss, memory_bytes={"resident_peak": GIB}) for loss in ("compiled", "cce_kahan")]
    found = verdicts.verdicts(runs)
    for criterion in (verdicts.MEMORY, verdicts.MVE_MEMORY):
        assert only(found, criterion, "cce_kahan", "compiled").verdict == "open"
        assert "GPU" in only(found, criterion, "cce_kahan", "compiled").remark


def test_a_run_that_was_made_again_is_no_further_seed() -> None:
    again = [run("cce_kahan", gib=gib, run_name=f"again-{gib}") for gib in (4, 5, 6)]
    memory = only(verdicts.verdicts([run("compiled"), *again]), verdicts.MEMORY, "cce_kahan", "compiled")
    assert (memory.value, memory.seeds, memory.spread) == (0.5, 1, None)


def test_runs_moved_aside_are_no_part_of_their_group(tmp_path: Path) -> None:
    for name in ("gla-compiled-8-s0", "gla-compiled-8-s0.1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(json.dumps(run("compiled").summary))
    assert len(read_runs(tmp_path)) == 1


def test_precision_is_lost_only_where_other_exact_losses_stay_closer() -> None:
    def branch(*runs: Run) -> tuple[str, str]:
        (found,) = [(word, figures) for name, word, figures in branches(verdicts.verdicts(runs)) if "precision" in name]
        return found

    base, ours, eager = run("compiled"), run("cce_kahan", nats=5.02), run("standard", nats=5.03)
    assert branch(base, ours) == ("open", "at most 0.0200 nats apart")
    assert branch(base, ours, eager) == ("open", "at most 0.0200 nats apart, other exact losses 0.0300")
    assert branch(base, ours, run("standard", nats=5.001))[0] == "holds"
    seeds = [run(loss, seed=1, nats=5.0) for loss in ("compiled", "cce_kahan")]
    assert branch(base, ours, *seeds) == ("open", "at most 0.0100 nats apart, medians over seeds")
    assert branch(base, run("cce_kahan", model="transformer", nats=5.02))[0] == "open", "it is no linear RNN"
    plain = run("cce_kahan", nats=5.5, loss_options={"accumulate": "bf16"}, run_name="a")
    kahan = run("cce_kahan", nats=5.001, loss_options={"accumulate": "kahan"})
    assert branch(base, plain, kahan)[0] == "does not hold"


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
        "probes": probes,
        "environment": environment,
    }


def test_largest_batches_answer_batch_and_speed_and_other_origins_do_not() -> None:
    answers = [answer("compiled", 12, 1000), answer("cce_kahan", 13, 1010)]
    found = verdicts.verdicts(THREE_SEEDS, answers)
    batch = only(found, verdicts.BATCH, "cce_kahan", "compiled")
    assert (batch.value, batch.verdict) == (pytest.approx(13 / 12), "missed")
    assert only(found, verdicts.SPEED_AT_LARGEST, "cce_kahan", "compiled").value == pytest.approx(1.01)
    holds = {branch: word for branch, word, _ in branches(found)}
    assert holds["a larger batch does not give speed: the GPU is saturated already"] == "holds"
    assert holds["CCE-Kahan loses precision in linear RNNs"] == "does not hold"
    assert holds["Liger already captures most of the benefit"] == "open"
    no_larger = verdicts.verdicts(THREE_SEEDS, [answer("compiled", 12, 1000), answer("cce_kahan", 12, 1010)])
    assert branches(no_larger)[0][1] == "open"
    compiled_blocks = {**answer("cce_kahan", 24, 1010), "training": "trainer.compile_blocks=True"}
    unlike = verdicts.verdicts(THREE_SEEDS, [answer("compiled", 12, 1000), compiled_blocks])
    assert only(unlike, verdicts.BATCH, "cce_kahan", "compiled").value is None
    strange = verdicts.verdicts(THREE_SEEDS, [answer("compiled", 12, 1000), answer("cce_kahan", 24, 1010, ELSEWHERE)])
    batch = only(strange, verdicts.BATCH, "cce_kahan", "compiled")
    assert batch.verdict == "open"
    assert "another gpus" in batch.remark


def test_a_search_that_met_no_fitting_batch_and_left_some_untried_answers_nothing() -> None:
    compiled, nothing = answer("compiled", 12, 1000), answer("cce_kahan", 0, 0)
    cut_off = only(
        verdicts.verdicts(THREE_SEEDS, [compiled, {**nothing, "exact": False}]), verdicts.BATCH, "cce_kahan", "compiled"
    )
    assert (cut_off.value, cut_off.verdict) == (None, "open")
    assert "did not end exact" in cut_off.remark
    none = only(verdicts.verdicts(THREE_SEEDS, [compiled, nothing]), verdicts.BATCH, "cce_kahan", "compiled")
    assert (none.value, none.verdict) == (0, "missed")


def test_a_report_keeps_the_answers_that_counted_for_those_who_have_the_report_alone(tmp_path: Path) -> None:
    stranger = {**answer("compiled", 3, 10), "size": "1b3"}
    write_report(THREE_SEEDS, tmp_path / "g", "g", [answer("compiled", 12, 1000), stranger])
    assert [entry["max_sequences"] for entry in read_committed_lists(tmp_path, MAX_BATCHES)] == [12]
    assert read_committed_lists(tmp_path, BREAKDOWNS) == []


def test_larger_batches_compare_each_loss_at_its_fastest() -> None:
    runs = [*THREE_SEEDS, run("compiled", batch_size=32, speed=1500), run("cce_kahan", batch_size=64, speed=1800)]
    verdict = only(verdicts.verdicts(runs), verdicts.MVE_LARGER, "cce_kahan", "compiled")
    assert (verdict.value, verdict.remark) == (pytest.approx(1.2), "B = 64 against 32")
    unlike = (run("cce_kahan", speed=9e3, batch_size=64, seq_len=512), run("cce_kahan", speed=9e3, tokens=2))
    assert only(verdicts.verdicts([*runs, *unlike]), verdicts.MVE_LARGER, "cce_kahan", "compiled") == verdict


def test_the_backward_pass_is_judged_from_the_loss_layer_s_times() -> None:
    times = {"compiled": 3.0, "cce_filter": 1.5}
    runs = [run(loss, loss_layer_ms={"forward": 1.0, "backward": ms}) for loss, ms in times.items()]
    verdict = only(verdicts.verdicts(runs), verdicts.BACKWARD, "cce_filter", "compiled")
    assert (verdict.value, verdict.verdict) == (2.0, "met")
    unmeasured = only(
        verdicts.verdicts([run("compiled"), run("cce_filter")]), verdicts.BACKWARD, "cce_filter", "compiled"
    )
    assert unmeasured.verdict == "open"
    exact = verdicts.verdicts([*runs, run("liger", loss_layer_ms={"forward": 4.0, "backward": 0.1})])
    judged = {verdict.backend for verdict in exact if verdict.criterion == verdicts.BACKWARD}
    assert judged == {"cce_filter"}  # a forward pass that does all of the work leaves nothing to be fast at


def test_runs_with_checkpointing_are_judged_beside_those_without() -> None:
    full = [
        run("compiled", gib=4, activation_checkpointing="full"),
        run("cce_kahan", gib=1, activation_checkpointing="full"),
    ]
    found = verdicts.verdicts([*THREE_SEEDS, *full], [answer("compiled", 12, 1000), answer("cce_kahan", 13, 1010)])
    memory = [v for v in found if (v.criterion, v.backend, v.against) == (verdicts.MEMORY, "cce_kahan", "compiled")]
    assert [(v.value, v.remark) for v in memory] == [
        (pytest.approx(0.52), "checkpointing none"),
        (0.25, "checkpointing full"),
    ]
    batches = [v for v in found if (v.criterion, v.backend, v.against) == (verdicts.BATCH, "cce_kahan", "compiled")]
    assert [v.value for v in batches] == [pytest.approx(13 / 12), None]


def test_the_next_bottleneck_and_the_bound_of_a_free_loss_come_from_breakdowns_of_this_origin(tmp_path: Path) -> None:
    time = {"loss": {"forward": 1.0, "backward": 1.0}, "mixer": {"forward": 6.0}, "step": {"total": 10.0}}
    own = {"run": run("compiled").summary, "environment": HERE, "time": time, "hardware_utilisation": 0.93}
    own["memory"] = {"peak": {"measured": 13 * GIB}, "peak/without_loss_layer": {"measured": 10 * GIB}}
    text = write_report(THREE_SEEDS, tmp_path, "g", (), [own, {**own, "environment": ELSEWHERE}])[0].read_text()
    assert (
        "the largest part of a step is mixer (60%); the loss takes 20.0%: without any cost a step would be 1.250 x"
        in text
    )
    assert "at 93% of the peak: more sequences would only queue" in text
    assert "Its peak is 1.300 x that of the same step without a loss layer." in text
    assert "its breakdown is left out, made with another gpus" in text


def test_the_bound_of_a_free_loss_comes_from_the_runs_own_times(tmp_path: Path) -> None:
    times = {"loss_layer_ms": {"forward": 0.05, "backward": 0.15}, "step_time_ms_median": 1.0}
    runs = [run("compiled", **times), run("liger", **times), run("compiled", seed=1, **times)]
    lines = write_report(runs, tmp_path, "g")[0].read_text().splitlines()
    words = (
        "T = 2048, V = 32,000, checkpointing none: the loss takes 20.0% of a step; without any cost it would be 1.250 x"
    )
    assert [line for line in lines if "without any cost" in line] == [f"* gla x compiled, B = 8, {words} as fast."]


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
    paths = write_report([*THREE_SEEDS, *other, failed], tmp_path, "a group")
    names = {path.name for path in paths}
    assert {"report.md", "verdicts.md", "runs.json", "loss_curves.png"} <= names
    assert "pareto.png" not in names, "points of two vocabularies belong in no one cloud"
    assert {"batch_scaling.png", "vocabulary_crossover.png", "loss_share_by_vocab_size.png"} <= names
    text = paths[0].read_text()
    assert "unsupported: no such GPU" in text
    setting = "batch_size=8, vocab_size=32000"
    assert f"| gla | cce_kahan | compiled | 0.520 | ≤ 0.600 | +0.080 | 0.050 | 3 | **met** ({setting}) |" in text
    assert "Follow-up 2 (FP8 or INT4 scan): open" in text
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


def test_a_run_that_ended_early_is_compared_over_the_steps_that_it_has(tmp_path: Path) -> None:
    def course(loss: str, steps: int, nats: float, seed: int = 0) -> Run:
        killed = {} if steps == 80 else {"status": "failed", "reason": "killed", "data_fingerprint": None}
        curve = [(step, nats + 1 / step) for step in range(1, steps + 1)]
        valid = [(step, 100 * nats + step) for step in (40, 80) if step <= steps]
        return replace(run(loss, seed=seed, steps=steps, **killed), losses=curve, validations=valid)

    runs = [course("cce_kahan", 70, 4.998), course("compiled", 80, 5.0), course("cce_kahan", 80, 4.9, seed=1)]
    text = write_report(runs, tmp_path, "g")[0].read_text()
    assert "| gla | cce_kahan, seed 0 | compiled, seed 0 | 70 | 0.0020 | -0.0020 | 40 | 539.80 | 540.00 |" in text
    assert "| gla | cce_kahan, seed 1 | cce_kahan, seed 0 | 70 | 0.0980 | -0.0980 | 40 | 530.00 | 539.80 |" in text
    assert "cce_kahan, seed 1 | compiled, seed 0" not in text
    assert [one.validations for one in read_committed(tmp_path)] == [one.validations for one in runs]
    figure = plots.loss_curves(runs, "g")
    assert max(figure.axes[1].lines[0].get_xdata()) == 70, "the killed run's curve is drawn against compiled's"
    pyplot.close(figure)
    assert "steps that two runs have" not in write_report(runs[1:], tmp_path, "g")[0].read_text()
    short = [course("cce_kahan", 40, 4.998), runs[1]]
    assert "steps that two runs have" not in write_report(short, tmp_path, "g")[0].read_text()


def test_checkpointing_has_a_column_where_runs_differ_in_it(tmp_path: Path) -> None:
    runs = [run("compiled"), run("compiled", activation_checkpointing="full", run_name="other")]
    text = write_report(runs, tmp_path, "g")[0].read_text()
    assert "| gla | mve | compiled | full | 8 | 2048 |" in text
    assert "checkpointing |" not in write_report(runs[:1], tmp_path, "g")[0].read_text().splitlines()[2]


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
    assert [(axes.get_title(), len(axes.lines)) for axes in figure.axes] == [("gla", 4), ("kda", 2)]
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words == ["cce_filter, mean", "cce_filter, 99th percentile"]
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
        "* gla x cce_kahan: step faster than compiled's above about 64,000",
        "* gla x standard: step slower than compiled's from 32,000 to 128,000",
    ]
    layers = {"compiled": (5.0, 20.0), "cce_kahan": (4.0, 19.0)}
    timed = [
        replace(one, summary={**one.summary, "loss_layer_ms": {"forward": ms, "backward": 0.0}})
        for one, ms in zip(runs[:4], [*layers["compiled"], *layers["cce_kahan"]], strict=True)
    ]
    assert plots.crossover_lines(timed) == [
        "* gla x cce_kahan: step faster than compiled's above about 64,000; "
        "loss layer faster than compiled's from 32,000 to 128,000",
    ]
    assert plots.crossover_lines(runs[:1]) == []


def test_other_processes_on_the_gpu_stand_in_the_report(tmp_path: Path) -> None:
    state = {"sm_mhz": 1980.0, "memory_mhz": 3201.0, "watts": 600.0, "celsius": 50.0, "other_processes": 2}
    text = write_report([run("compiled", gpu_state=state)], tmp_path, "g")[0].read_text()
    assert "SM clock at the end of training: 1,980 to 1,980 MHz" in text
    assert "2 other processes computed on the GPU" in text


def test_runs_of_two_origins_are_refused(tmp_path: Path) -> None:
    stranger = Run(run("standard").summary, ELSEWHERE)
    with pytest.raises(ConfigError, match="differ in gpus"):
        write_report([run("compiled"), stranger], tmp_path, "a group")
    assert not list(tmp_path.iterdir())


def test_committed_runs_read_back_with_thinned_curves(tmp_path: Path) -> None:
    long = Run(run("compiled").summary, HERE, [(step, 1.0) for step in range(1, 2404)])
    killed = Run(run("standard").summary, HERE, [(step, 1 / step) for step in range(1, 961)])
    write_committed([long, killed], tmp_path / "runs.json")
    json.loads((tmp_path / "runs.json").read_text())
    first, second = read_committed(tmp_path)
    assert first.summary == long.summary
    assert len(first.losses) <= CURVE_POINTS
    assert first.losses[-1] == (2403, 1.0)
    assert second.losses[-1] == (960, pytest.approx(1 / 960, rel=1e-5))
    steps = {step for step, _ in first.losses} & {step for step, _ in second.losses}
    assert len(steps) == 320, "curves that ended at different steps keep the same ones"
    with pytest.raises(DataError, match=r"scripts/report\.py"):
        read_committed(tmp_path / "nowhere")


@pytest.mark.parametrize("directory", sorted(p.parent.name for p in COMMITTED.glob("*/runs.json")))
def test_every_committed_summary_reads_judges_and_plots(directory: str) -> None:
    runs = read_committed(COMMITTED / directory)
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
