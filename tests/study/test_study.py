"""What the study says of committed rows: largest batches, verdicts on losses of ours, the speed of steps."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from made_up_runs import five, run

from benchmarks.steps_rows import Row
from linrnn.core.errors import DataError
from linrnn.report.runs import Run, read_committed
from study.criteria import MVE_LOSS
from study.criteria import verdicts as judged
from study.searches import Search, batch_ratios, searches
from study.step_speed import CPU_BOUND, speed_of
from study.tables import times_as_fast

ROOT = Path(__file__).resolve().parents[2]
GROUP = ROOT / "results" / "summaries" / "largest_h100_gated_deltanet"
ROW = Row(
    "model=gla size=1b3", "gla", "1b3", 10**9, 8, 2048, 2048, 128256, "bf16_autocast", "compiled", "a", 2,
    wall_ms=[100.0, 102.0, 98.0, 101.0, 99.0], host_ms=[80.0] * 5, loss_forward_ms=8.0, loss_backward_ms=12.0,
)  # fmt: skip


def search(*fitting: int, too_large: int) -> Search:
    rows = {batch: {"status": "finished"} for batch in fitting}
    return Search({**rows, too_large: {"status": "out_of_memory"}})


def test_a_search_is_exact_if_one_sequence_more_did_not_fit():
    found = searches(read_committed(GROUP))
    assert {key: one.exact for key, one in found.items() if not one.exact} == {
        ("gated_deltanet", "full", "liger"): False
    }
    unfinished = found["gated_deltanet", "full", "liger"]
    assert (unfinished.batch, unfinished.too_large) == (75, 85)


def test_searches_without_an_answer_give_no_ratio():
    found = {
        ("gla", "none", "cce_kahan"): search(3, too_large=4),
        ("gla", "none", "compiled"): search(too_large=1),
        ("gla", "none", "standard"): search(1, too_large=4),
        ("kda", "none", "cce_kahan"): search(3, too_large=4),
        ("kda", "none", "compiled"): search(2, too_large=3),
    }
    assert batch_ratios(found) == {("kda", "none", "compiled"): 1.5}


def test_searches_of_another_setting_are_refused():
    first, *others = read_committed(GROUP)
    with pytest.raises(DataError, match="memory_budget_gib"):
        searches([replace(first, summary={**first.summary, "memory_budget_gib": 80.0}), *others])


def test_ways_of_summing_are_compared_with_compensated_sums_and_with_compiled():
    def way(accumulate: str, nats: float) -> list[Run]:
        options = {"accumulate": accumulate, "workspace_mib": 128}
        how = {"nats": nats, "loss_options": options}
        return [run("cce_kahan", seed=seed, run_name=f"{accumulate}-{seed}", **how) for seed in range(5)]

    runs = [*five("compiled"), *way("kahan", 5.001), *way("fp32", 5.002), *way("bf16", 5.03)]
    found = [v for v in judged(runs) if v.target == MVE_LOSS and v.value is not None]
    kahan = "cce_kahan accumulate=kahan"
    assert {(v.backend, v.against): (v.verdict, v.n) for v in found} == {
        (kahan, "compiled"): ("reached", 5),
        ("cce_kahan accumulate=fp32", "compiled"): ("reached", 5),
        ("cce_kahan accumulate=bf16", "compiled"): ("not reached", 5),
        ("cce_kahan accumulate=fp32", kahan): ("reached", 5),
        ("cce_kahan accumulate=bf16", kahan): ("not reached", 5),
    }
    few = judged([one for one in runs if one.summary["seed"] < 4])
    assert {v.against for v in few} == {"compiled", "standard", None}, "pairs too few to decide are not listed"


def times(row: Row, factor: float, **other: object) -> Row:
    return replace(row, wall_ms=[ms * factor for ms in row.wall_ms], **other)  # type: ignore[arg-type]


def test_the_ratio_is_of_tokens_per_second_and_each_round_is_a_pair():
    ours = times(ROW, 0.9, loss="cce_kahan")
    speed = speed_of(ours, ROW)
    assert (speed.value, speed.n) == (pytest.approx(1 / 0.9), 5)
    assert speed_of(replace(ours, batch=16), ROW).value == pytest.approx(2 / 0.9), "for equally many tokens"
    assert ROW.speed_with_a_free_loss == pytest.approx(100 / 80), "a loss layer of 20 ms in a step of 100"


@pytest.mark.parametrize("other", [{"status": "out_of_memory", "wall_ms": []}, {"run": "b"}])
def test_what_shares_no_process_with_its_baseline_has_no_ratio(other):
    assert speed_of(ROW, replace(ROW, **other)) is None  # type: ignore[arg-type]
    assert times_as_fast(ROW, replace(ROW, **other)) == "-"  # type: ignore[arg-type]


def test_a_step_that_waits_for_the_host_decides_nothing():
    assert times_as_fast(times(ROW, 1.0, host_ms=[99.0] * 5), ROW) == CPU_BOUND


def test_each_file_of_c_with_text_is_a_line_of_the_text_of_the_long_runs(tmp_path):
    for name, text in {"a.c": "int a;", "b.h": "int b;", "empty.c": " ", "c.txt": "no"}.items():
        (tmp_path / name).write_text(text)
    subprocess.run([sys.executable, ROOT / "study" / "linux_text.py", tmp_path, tmp_path / "out.jsonl"], check=True)
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["text"] for line in lines) == ["int a;", "int b;"]
