"""Verdicts on the speed of steps: a pair is a round of one process. Steps that wait for the host decide nothing."""

from dataclasses import replace

import pytest

from benchmarks.steps_rows import AGAIN, Row
from study.step_speed import CPU_BOUND, names_of, speed_of
from study.tables import times_as_fast

LINE = "model=gla size=1b3"
SMALL = "model=gla size=350m size.vocab_size=32000"
ROW = Row(
    LINE, "gla", "1b3", 10**9, 8, 2048, 2048, 128256, "bf16_autocast", "compiled", "a", 2,
    wall_ms=[100.0, 102.0, 98.0, 101.0, 99.0], host_ms=[80.0] * 5, loss_forward_ms=8.0, loss_backward_ms=12.0,
)  # fmt: skip


def times(row: Row, factor: float, **other: object) -> Row:
    return replace(row, wall_ms=[ms * factor for ms in row.wall_ms], **other)  # type: ignore[arg-type]


def test_the_ratio_is_of_tokens_per_second_and_each_round_is_a_pair():
    ours = times(ROW, 0.9, loss="cce_kahan")
    speed = speed_of(ours, ROW)
    assert speed is not None
    assert (speed.value, speed.n) == (pytest.approx(1 / 0.9), 5)
    larger = speed_of(replace(ours, batch=16), ROW)
    assert larger is not None
    assert larger.value == pytest.approx(2 / 0.9), "for equally many tokens"
    assert ROW.speed_with_a_free_loss == pytest.approx(100 / 80), "a loss layer of 20 ms in a step of 100"


@pytest.mark.parametrize("other", [{"status": "out_of_memory", "wall_ms": []}, {"run": "b"}])
def test_what_shares_no_process_with_its_baseline_has_no_ratio(other):
    assert speed_of(ROW, replace(ROW, **other)) is None  # type: ignore[arg-type]
    assert times_as_fast(ROW, replace(ROW, **other)) == "-"  # type: ignore[arg-type]


def test_a_step_that_waits_for_the_host_decides_nothing():
    assert times_as_fast(times(ROW, 1.0, host_ms=[99.0] * 5), ROW) == CPU_BOUND


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


def test_a_line_with_batches_of_its_own_names_them():
    line = f"{LINE} trainer.activation_checkpointing=none"
    own = [replace(ROW, line=line, loss=loss, batch=batch) for loss, batch in (("compiled", 8), (AGAIN, 8))]
    own += [replace(own[0], loss="standard", batch=5), replace(own[0], loss="cce_kahan", batch=8)]
    assert names_of(own) == {line: "GLA 1b3, 8 / 5 / 8 x 2,048"}
