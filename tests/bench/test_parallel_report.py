"""The page on several GPUs: rates, forecasts and rows; what the formulas must give, whatever the constants."""

import dataclasses
from datetime import timedelta
from itertools import product
from pathlib import Path

import pytest
from older_kernels import further_bytes, third_of_the_logits

from linrnn.bench.parallel import forecast
from linrnn.bench.parallel.forecast import Rates, measured_rates, sending_ms, step_forecasts, step_memory
from linrnn.bench.parallel.report import markdown, two_digits
from linrnn.bench.parallel.rows import CollectiveRow, LossRow, Measured, StepRow, read, write
from linrnn.bench.parallel.run import run_benchmark
from linrnn.config import load_config
from linrnn.config.schema import Config
from linrnn.core.errors import ConfigError, LinrnnError, UnsupportedError
from linrnn.core.machine import GIB
from linrnn.costs.memory import WORKSPACES
from linrnn.distributed import DistributedRanks, Launch
from linrnn.models.architecture import resolve

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results" / "bench_parallel"
of_row = forecast._config
RATES = Rates(link=300e9, call=20e-6, hop=4e-6)


def steps(parallel: str, ranks: int, sequences: int, ms: float) -> StepRow:
    scaling = {"none": "alone"}.get(parallel, "weak")
    return StepRow(
        "gla", "1b3", 128256, "bf16_autocast", parallel, scaling, ranks, sequences, 2048, ms,
        ranks * sequences * 2048 / ms * 1e3, None, 60.0, 0.0,
    )  # fmt: skip


def run(ranks: int) -> Measured:
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
    return Measured("torchrun …", "NVIDIA H200", ranks, environment, collectives, [loss], rows)


def test_rates_are_those_of_the_most_ranks_and_the_largest_tensors() -> None:
    rates = measured_rates([run(2), run(4)])
    assert rates is not None
    assert rates.link == pytest.approx(440e9)
    assert rates.hop == pytest.approx(5e-6)
    assert rates.call == pytest.approx(0)


def test_what_was_not_measured_is_not_assumed() -> None:
    without = [dataclasses.replace(run(ranks), collectives=[]) for ranks in (2, 4)]
    assert measured_rates([]) is measured_rates(without) is None
    assert measured_rates([run(2)]) is None, "one number of ranks does not tell a call from a hop"
    assert "forecast" in markdown([run(2), run(4)])
    assert "forecast" not in markdown(without)
    unknown = [dataclasses.replace(run(4).loss[0], sent_mib=None)]
    assert sending_ms(unknown[0], RATES) is None
    assert "loss, forecast" not in markdown([dataclasses.replace(one, loss=unknown) for one in (run(2), run(4))])


def test_steps_are_compared_with_those_of_one_gpu_and_what_communication_exposes() -> None:
    ddp, fsdp = step_forecasts(run(4), RATES)
    assert ddp.ms == pytest.approx(400 + ddp.exposed_ms)
    assert fsdp.ms == pytest.approx(200 + fsdp.exposed_ms)  # half the sequences
    embedding = 2 * 4 * 128256 * 2048 / 300e9 * 1e3  # reduced last, both ways
    assert ddp.exposed_ms == pytest.approx(embedding, rel=0.01)
    assert fsdp.memory.peak < ddp.memory.peak
    slow = dataclasses.replace(RATES, link=220e9)
    assert [step.exposed_ms for step in step_forecasts(run(4), slow)] > [ddp.exposed_ms, fsdp.exposed_ms]
    assert step_forecasts(dataclasses.replace(run(4), steps=run(4).steps[1:]), RATES) == []


@pytest.mark.parametrize("parallel", ["ddp", "fsdp", "vocab"])
def test_more_ranks_expose_no_less_and_shards_hold_less(parallel: str) -> None:
    few, many = (
        step_forecasts(dataclasses.replace(run(ranks), steps=[steps("none", 1, 8, 400.0), row]), RATES)[0]
        for ranks, row in [(ranks, steps(parallel, ranks, 8, 410.0)) for ranks in (2, 4)]
    )
    assert few.exposed_ms <= many.exposed_ms
    if parallel == "ddp":
        assert few.memory.peak == many.memory.peak
    else:
        assert few.memory.peak > many.memory.peak


def loss_layer(row: StepRow) -> tuple[int, int, int]:
    """Tokens, hidden dimensions and vocabulary entries of a rank's loss."""
    config, ranks = of_row(row), row.ranks if row.parallel == "vocab" else 1
    arch = resolve(config.model, config.size, row.vocab_size)
    return row.sequences_of_rank * row.seq_len * ranks, arch.hidden_size, row.vocab_size // ranks


def with_the_older_default(row: StepRow) -> Config:
    config = of_row(row)
    config.loss = third_of_the_logits(config.loss, *loss_layer(row))
    return config


def test_formulas_agree_with_the_memory_of_every_committed_step_with_todays_kernels() -> None:
    """The measured memory is larger by what the allocator rounds up, and by workspaces: at most 1 %."""
    rows = [row for run in read(RESULTS) for row in run.steps if "H100" in run.device or row.cuda_graph]
    assert {row.parallel for row in rows} == {"none", "ddp", "fsdp", "vocab"}
    assert {row.parallel for row in rows if row.cuda_graph} == {"none", "fsdp", "vocab"}
    for row in rows:
        memory = step_memory(row)
        assert memory is not None
        assert 0 < row.gib * GIB / memory.peak - 1 < 0.01, row


def test_formulas_agree_with_the_memory_of_every_committed_step_with_older_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The measured memory is larger by what the allocator rounds up: at most 0.7 % for a rank with 8 sequences or more.

    In rows of a later process the workspaces existed before, and hidden states and head outlived the loss. FSDP's rows
    lack at most all of the gradients of the DDP row before them.
    """
    monkeypatch.setattr(forecast, "_config", with_the_older_default)
    rows = [row for run in read(RESULTS) for row in run.steps if "H200" in run.device and not row.cuda_graph]
    assert {(row.parallel, row.ranks) for row in rows} == {("none", 1), *product(("ddp", "fsdp", "vocab"), (2, 4))}
    for row in rows:
        memory, measured = step_memory(row), row.gib * GIB
        assert memory is not None
        foreseen = memory.peak + further_bytes(*loss_layer(row))
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
    # The weights of the block and of the next block.
    assert fsdp.block_backward > alone.block_backward


@pytest.mark.parametrize(
    ("change", "error", "remedy"),
    [({"weak": ["ddp"]}, ConfigError, "weak=[fsdp,vocab]"), ({"weak": ["fsdp"]}, UnsupportedError, "cuda_graph=false")],
)
def test_a_graph_that_cannot_be_had_is_refused_before_anything_is_measured(
    change: dict, error: type[LinrnnError], remedy: str, tmp_path: Path
) -> None:
    ranks = DistributedRanks(Launch(0, 0, 1, True), None, None, timedelta(seconds=1))
    config = load_config(["device=cpu", "cuda_graph=true", "strong=[]", f"output_dir={tmp_path}"], "bench_parallel")
    with pytest.raises(error) as refusal:
        run_benchmark(ranks, dataclasses.replace(config, **change), "")
    assert remedy in refusal.value.remedy
    assert not list(tmp_path.iterdir())


def test_tokens_that_the_ranks_cannot_share_are_refused_before_anything_is_measured(tmp_path: Path) -> None:
    ranks = DistributedRanks(Launch(0, 0, 2, True), None, None, timedelta(seconds=1))
    overrides = ["device=cpu", "losses=[100x16x64,101x16x64]", f"output_dir={tmp_path}"]
    with pytest.raises(ConfigError, match="losses: 2 ranks cannot share the tokens of 101x16x64 evenly"):
        run_benchmark(ranks, load_config(overrides, "bench_parallel"), "")
    assert not list(tmp_path.iterdir())


def test_the_page_says_what_was_measured(tmp_path: Path) -> None:
    for ranks in (2, 4):
        write(run(ranks), tmp_path, None)
    assert read(tmp_path) == [run(2), run(4)]
    text = markdown(read(tmp_path))
    assert "(n = 1)" in text
    assert "440 GB/s of a GPU, 0 µs a collective, 5.0 µs a hop" in text
    assert text.count("| gla 1b3 | ddp | weak |") == 2 + 2
    # 0.24 ms of sending at 440 GB/s and 45 µs of latency
    assert "| 16384 × 2048 × 128256 | 4 | 10.5 | 0.28 | 10.8 | 11.0 | 1.02 | 2 |" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0384, "0.038"), (0.2964, "0.30"), (3.3206, "3.3"), (9.96, "10"), (14.6, "15"), (322.6, "320")],
)
def test_two_digits_are_never_written_as_a_power_of_ten(value: float | None, text: str) -> None:
    assert two_digits(value) == text


def test_every_row_of_several_runs_names_its_run() -> None:
    lines = markdown([run(2), run(4)]).splitlines()
    assert [line[:12] for line in lines if "torchrun" in line] == ["1. `torchrun", "2. `torchrun"]
    for begins in ("| all_gather", "| gla 1b3", "| 16384 ×"):
        ends = [line.split("|")[-2].strip() for line in lines if line.startswith(begins)]
        assert set(ends) == {"1", "2"}


def test_repeats_give_an_efficiency_of_one_repeat_each_and_their_interval() -> None:
    """Ranks with half of the sequences each. A machine that slows down between two repeats moves no efficiency."""
    alone, together = steps("none", 1, 8, 400.0), steps("fsdp", 2, 4, 250.0)
    for slower in (1.0, 2.0, 1.0, 1.0, 3.0):
        alone.repeat(steps("none", 1, 8, 400.0 * slower), None)
        again = dataclasses.replace(steps("fsdp", 2, 4, 250.0 * slower), host_ms=240.0 * slower)
        together.repeat(again, alone)
    assert together.host_ms == 240.0, "the median"
    assert alone.host_ms is None
    assert together.efficiencies == pytest.approx([0.8] * 5)
    assert together.efficiency == pytest.approx(0.8)
    assert together.step_ms == 250.0, "the median"
    assert together.tokens_per_second == pytest.approx(2 * 4 * 2048 / 0.25)
    assert together.efficiency_in_words == "0.800 (0.800 to 0.800), n = 5"
    assert alone.efficiency_in_words == "-"
    together.repeat(steps("fsdp", 2, 4, 500.0), alone)
    assert together.efficiency_in_words.startswith("0.800 (0.7"), "the last repeat is an outlier"
    run_of_rows = dataclasses.replace(run(2), steps=[alone, together])
    assert together.efficiency_in_words in markdown([run_of_rows])
