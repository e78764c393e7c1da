"""The page on many GPUs: what the formulas must give, whatever the constants; rates and steps that were measured."""

import dataclasses
from itertools import pairwise, product
from pathlib import Path

import pytest

from linrnn.bench.parallel.report import CollectiveRow, LossRow, Measured, StepRow, markdown, read, write
from linrnn.bench.parallel.scale_out import (
    ASSUMED,
    GPU,
    GPUS,
    SETTINGS,
    WAYS,
    compare,
    foresee,
    measured_rates,
    page,
    step_memory,
)
from linrnn.costs.memory import WORKSPACES
from linrnn.runs.summary import GIB

ROOT = Path(__file__).resolve().parents[2]


def test_the_committed_page_is_what_the_script_writes() -> None:
    runs = read(ROOT / "results" / "bench_parallel")
    committed = (ROOT / "results" / "scale_out.md").read_text()
    assert committed == page(runs) + "\n", "run python scripts/maintain/scale_out.py"


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_more_gpus_compute_less_each_and_shards_hold_less(setting) -> None:
    for way in WAYS:
        rows = [foresee(setting, way, gpus) for gpus in GPUS]
        for fewer, more in pairwise(rows):
            assert fewer.compute == pytest.approx(2 * more.compute, rel=0.02)
            assert more.memory <= fewer.memory
        assert all(0 < row.mfu <= 0.4 for row in rows)
    for gpus in GPUS:
        ddp, fsdp, hsdp, vocab = (foresee(setting, way, gpus) for way in WAYS)
        assert fsdp.memory < hsdp.memory < ddp.memory
        assert vocab.memory < ddp.memory
        assert ddp.sent_across == fsdp.sent_across == 0 < hsdp.sent_across


def steps(parallel: str, ranks: int, sequences: int, ms: float) -> StepRow:
    scaling = {"none": "alone"}.get(parallel, "weak")
    return StepRow(
        "gla", "1b3", 128256, "bf16_autocast", parallel, scaling, ranks, sequences, 2048, ms,
        ranks * sequences * 2048 / ms * 1e3, None, 60.0, 0.0,
    )  # fmt: skip


def run(ranks: int, device: str = GPU) -> Measured:
    collectives = [
        CollectiveRow("all_gather", ranks, 0, 0.005 * (ranks - 1), None),
        CollectiveRow("all_gather", ranks, 64, 1.0, 50.0),
        CollectiveRow("all_gather", ranks, 1024, 1.0, 100.0 * ranks),
        CollectiveRow("all_reduce", ranks, 1024, 1.0, 110.0 * ranks),
        CollectiveRow("reduce_scatter", ranks, 1024, 1.0, 120.0 * ranks),
    ]
    environment = {"packages": {"torch": "2", "triton": "3"}, "git": None}
    loss = LossRow("x", 16384, 2048, 128256, ranks, 11.0, 40.0, 10.5, 500.0, 900.0, 100.0, 0.9, 1e-3, 1e-3)
    rows = [steps("none", 1, 8, 400.0), steps("ddp", ranks, 8, 410.0), steps("fsdp", ranks, 4, 230.0)]
    return Measured("torchrun …", device, ranks, environment, collectives, [loss], rows)


def test_rates_are_those_of_the_most_ranks_and_the_largest_tensors() -> None:
    rates = measured_rates([run(2), run(4), run(8, "another")])
    assert rates.link == pytest.approx(440e9)
    assert rates.hop == pytest.approx(5e-6)
    assert rates.card == ASSUMED.card
    assert rates.share("gla", "350m") == ASSUMED.share("gla", "350m")
    setting = SETTINGS[1]
    ddp = foresee(setting, "ddp", 256, rates)  # 8 sequences a GPU, as measured
    assert (ddp.sequences, ddp.micro_steps) == (8, 1)
    assert ddp.compute == pytest.approx(0.4, rel=1e-6)
    assert measured_rates([]) == measured_rates([run(8, "another")]) == ASSUMED


def test_no_step_is_foreseen_to_be_shorter_than_those_of_strong_scaling() -> None:
    strong = [dataclasses.replace(steps("fsdp", 4, 2, ms), scaling="strong") for ms in (230.0, 220.0)]
    rates = measured_rates([dataclasses.replace(run(4), steps=[*run(4).steps, row]) for row in strong])
    assert rates.floors == (("gla", "1b3", "fsdp", pytest.approx(0.22)),)
    for way, floor in (("ddp", 0.0), ("fsdp", 0.22), ("vocab, shard_ranks=8", 0.22)):
        few, many = (foresee(SETTINGS[1], way, gpus, rates) for gpus in (64, 1024))
        assert (few.micro_steps, few.launches) == (4, pytest.approx(4 * floor))
        assert many.launches == pytest.approx(floor)
        unbound = foresee(SETTINGS[1], way, 1024, dataclasses.replace(rates, floors=()))
        step = unbound.compute + unbound.exposed
        assert many.mfu == pytest.approx(unbound.mfu * step / max(step, floor))


def test_steps_are_compared_with_those_of_one_gpu_and_what_communication_exposes() -> None:
    ddp, fsdp = compare(run(4), ASSUMED)
    assert ddp.foreseen_ms == pytest.approx(400 + ddp.exposed_ms)
    assert fsdp.foreseen_ms == pytest.approx(200 + fsdp.exposed_ms)  # half the sequences
    embedding = 2 * 4 * 128256 * 2048 / 300e9 * 1e3  # reduced last, both ways
    assert ddp.exposed_ms == pytest.approx(embedding, rel=0.01)
    assert fsdp.foreseen_gib < ddp.foreseen_gib
    slow = measured_rates([run(2)])
    assert [c.exposed_ms for c in compare(run(4), slow)] > [ddp.exposed_ms, fsdp.exposed_ms]


def test_formulas_agree_with_the_memory_of_every_committed_step() -> None:
    """Measured is more by what the allocator rounds up: of a rank with 8 sequences or more at most 0.7 %.

    Of rows that are not their own the workspaces were in place before, and hidden states and head outlived the loss.
    FSDP's lack some of the gradients of DDP's row before, at most all."""
    rows = [row for run in read(ROOT / "results" / "bench_parallel") for row in run.steps]
    assert {(row.parallel, row.ranks) for row in rows} == {("none", 1), *product(("ddp", "fsdp", "vocab"), (2, 4))}
    for row in rows:
        memory, measured = step_memory(row), row.gib * GIB
        foreseen = memory.peak
        if not row.gib_is_own:
            measured += WORKSPACES if row.parallel != "none" else 0
            foreseen = max(foreseen, max(memory.at_head, memory.at_blocks) + memory.loss_inputs)
        if row.parallel == "fsdp" and not row.gib_is_own:
            assert row.memory.startswith("≥ ")
            assert 0 < foreseen - measured < row.ranks * memory.gradients, row
        else:
            assert not row.memory.startswith("≥ ")
            assert 0 < measured / foreseen - 1 < (0.007 if row.sequences_of_rank >= 8 else 0.018), row


def test_nothing_of_the_blocks_is_gathered_while_the_loss_is_computed() -> None:
    alone, fsdp = (step_memory(steps(parallel, ranks, 8, 400.0)) for parallel, ranks in (("none", 1), ("fsdp", 2)))
    assert fsdp.weight_copies == 0 < alone.weight_copies
    sharded = (alone.parameters + alone.optimizer) // 2
    assert alone.at_loss - fsdp.at_loss == sharded + alone.weight_copies
    # The block's weights and those of the next one.
    assert fsdp.block_backward > alone.block_backward


def test_the_page_says_what_was_measured(tmp_path: Path) -> None:
    for ranks in (2, 4):
        write(run(ranks), tmp_path, None)
    text = page(read(tmp_path))
    assert read(tmp_path) == [run(2), run(4)]
    assert "440 GB/s of a GPU within a machine (measured)" in text
    assert "40 GB/s of its network card (assumed)" in text
    assert "0 µs a collective and 5.0 µs a hop (measured)" in text
    assert "one GPU reaches gla 1b3" in text
    assert "others 40% (assumed)" in text
    assert text.count("| gla 1b3 | ddp | weak |") == 2
    # 0.24 ms of sending at 440 GB/s and 45 µs of latency
    assert "| 16384 × 2048 × 128256 | 4 | 10.50 | 0.28 | 10.78 | 11.00 | 1.020 |" in text


def test_every_row_of_several_runs_names_its_run() -> None:
    lines = markdown([run(2), run(4)]).splitlines()
    assert [line[:12] for line in lines if "torchrun" in line] == ["1. `torchrun", "2. `torchrun"]
    for begins in ("| all_gather", "| gla 1b3", "| 16384 ×"):
        ends = [line.split("|")[-2].strip() for line in lines if line.startswith(begins)]
        assert set(ends) == {"1", "2"}
