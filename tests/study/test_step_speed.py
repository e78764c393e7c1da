"""Verdicts on the speed of steps: a pair is a round of one process. Steps that wait for the host decide nothing."""

from dataclasses import replace

import pytest

from benchmarks.steps_rows import AGAIN, Row
from study.criteria import SPEED, SPEED_AT_LARGEST
from study.step_speed import CPU_BOUND, StepSpeed, names_of, step_speeds

LINE = "model=gla size=1b3"
SMALL = "model=gla size=350m size.vocab_size=32000"
ROW = Row(
    LINE, "gla", "1b3", 10**9, 8, 2048, 2048, 128256, "bf16_autocast", "compiled", "a", 2,
    wall_ms=[100.0, 102.0, 98.0, 101.0, 99.0], host_ms=[80.0] * 5, loss_forward_ms=8.0, loss_backward_ms=12.0,
)  # fmt: skip


def times(row: Row, factor: float, **other: object) -> Row:
    return replace(row, wall_ms=[ms * factor for ms in row.wall_ms], **other)  # type: ignore[arg-type]


def found(*others: Row) -> dict[tuple[str, str | None], StepSpeed]:
    return {(one.verdict.backend, one.verdict.against): one for one in step_speeds([ROW, *others])}


def test_the_ratio_is_of_tokens_per_second_and_each_round_is_a_pair():
    eager = times(ROW, 1.2, loss="standard")
    speeds = found(replace(ROW, loss=AGAIN), eager, times(ROW, 0.9, loss="cce_kahan"))
    ours = speeds["cce_kahan", "compiled"]
    assert (ours.verdict.value, ours.verdict.n, ours.verdict.verdict) == (pytest.approx(1 / 0.9), 5, "reached")
    assert ours.attainable == pytest.approx(100 / 80), "a loss layer of 20 ms in a step of 100"
    assert speeds["cce_kahan", "standard"].verdict.value == pytest.approx(1.2 / 0.9)
    assert speeds["standard", "compiled"].verdict.verdict == "not reached"
    assert [against for backend, against in speeds if backend == AGAIN] == ["compiled"], "the control"
    assert speeds[AGAIN, "compiled"].verdict.value == 1


def test_what_shares_no_process_with_its_baseline_has_no_verdict():
    out = replace(ROW, loss="standard", status="out_of_memory", wall_ms=[])
    assert found(out, times(ROW, 0.9, loss="cce_kahan", run="b")) == {}


def test_a_step_that_waits_for_the_host_decides_nothing():
    slow = times(ROW, 1.0, loss="cce_kahan", host_ms=[99.0] * 5)
    verdict = found(slow)["cce_kahan", "compiled"].verdict
    assert (verdict.verdict, verdict.remark) == ("inconclusive", CPU_BOUND)


def test_four_rounds_decide_nothing():
    few = {"wall_ms": ROW.wall_ms[:4], "host_ms": ROW.host_ms[:4]}
    [speed] = step_speeds([replace(ROW, **few), replace(ROW, loss="cce_kahan", **few)])  # type: ignore[arg-type]
    assert (speed.verdict.verdict, speed.verdict.remark) == ("inconclusive", "n = 4, needs 5")


def test_a_line_is_named_by_what_tells_it_apart():
    full = f"{LINE} trainer.activation_checkpointing=full"
    small = replace(ROW, line=SMALL, size="350m", v=32000)
    larger = f"{SMALL.replace('32000', '131072')} optimizer=muon"
    rows = [ROW, replace(ROW, line=full), small, replace(small, line=larger, v=131072)]
    assert names_of(rows) == {
        LINE: "GLA 1b3",
        full: "GLA 1b3, full checkpointing",
        SMALL: "GLA 350m, V = 32,000",
        larger: "GLA 350m, V = 131,072, optimizer=muon",
    }


def test_a_line_with_batches_of_its_own_names_them_and_is_held_to_the_largest_batches():
    line = f"{LINE} trainer.activation_checkpointing=none"
    own = [replace(ROW, line=line, loss=loss, batch=batch) for loss, batch in (("compiled", 8), (AGAIN, 8))]
    own += [replace(own[0], loss="standard", batch=5), replace(own[0], loss="cce_kahan", batch=8)]
    assert names_of(own) == {line: "GLA 1b3, 8 / 5 / 8 x 2,048"}
    speeds = step_speeds(own)
    assert {one.verdict.target for one in speeds} == {SPEED_AT_LARGEST}, "also where two batches are equal"
    assert {one.verdict.target for one in step_speeds([row for row in own if row.batch == 8])} == {SPEED}
