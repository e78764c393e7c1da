"""benchmarks/parallel.py: rows and their page, the memory that formulas foresee for them, and what is refused."""

import dataclasses
from itertools import product
from pathlib import Path

import pytest

from benchmarks.parallel import (
    CollectiveRow,
    LossRow,
    Measured,
    StepRow,
    read_rows,
    run_benchmark,
    weak_scaling,
    write,
    write_pages,
)
from linrnn import costs
from linrnn.config import load_config
from linrnn.config.schema import Config
from linrnn.core.errors import ConfigError, UnsupportedError
from linrnn.core.machine import GIB
from linrnn.distributed import DistributedRanks, Launch
from linrnn.models.architecture import resolve
from linrnn.runs.environment import describe_environment

RESULTS = Path(__file__).resolve().parents[2] / "results" / "bench_parallel"


def of_row(row: StepRow) -> Config:
    """The run whose steps a row measured."""
    gathering = [f"parallel.blocks_together={row.blocks_together}", f"parallel.keep_gathered={row.keep_gathered}"]
    sharded = gathering if row.parallel in ("fsdp", "vocab") else []
    run = [f"model={row.model}", f"size={row.size}", f"parallel={row.parallel}"]
    return load_config(["loss=cce_kahan", *run, *sharded])


def step_memory(row: StepRow, config: Config) -> costs.MemoryEstimate:
    """A rank's memory in that step, by formulas. DDP holds the gradients all the time, as its buckets."""
    found = costs.memory_estimate(
        resolve(config.model, config.size, row.vocab_size), batch_size=row.sequences_of_rank, seq_len=row.seq_len,
        precision=row.precision, loss=config.loss, activation_checkpointing="none", optimizer=config.optimizer,
        accumulation_steps=2 if row.parallel == "ddp" else 1,
        shard_ranks=row.ranks if row.parallel in ("fsdp", "vocab") else 1, by_vocabulary=row.parallel == "vocab",
        blocks_together=row.blocks_together, keep_gathered=row.keep_gathered,
    )  # fmt: skip
    assert found is not None
    return found


def steps(parallel: str, ranks: int, sequences: int, ms: float) -> StepRow:
    scaling = {"none": "alone"}.get(parallel, "weak")
    return StepRow(
        "gla", "1b3", 128256, "bf16_autocast", parallel, scaling, ranks, sequences, 2048, ms,
        ranks * sequences * 2048 / ms * 1e3, None, 60.0, 0.0,
    )  # fmt: skip


def run(ranks: int) -> Measured:
    collectives = [CollectiveRow("all_gather", ranks, mib, 1.0, 50.0) for mib in (0, 64, 1024)]
    loss = LossRow("x", 16384, 2048, 128256, ranks, 11.0, 40.0, 10.5, 500.0, 900.0, 100.0, 0.9, 1e-3, 1e-3)
    rows = [steps("none", 1, 8, 400.0), steps("ddp", ranks, 8, 410.0), steps("fsdp", ranks, 4, 230.0)]
    return Measured("torchrun …", "NVIDIA H200", ranks, describe_environment(), collectives, [loss], rows)


def test_formulas_agree_with_the_memory_of_every_committed_step():
    """FSDP's rows of a later process are lower bounds: they lack at most all of the gradients of the DDP row before."""
    rows = [row for run in read_rows(RESULTS) for row in run.steps]
    assert {(row.parallel, row.cuda_graph) for row in rows} >= {
        *product(("none", "fsdp", "vocab"), (True, False)),
        ("ddp", False),
    }
    for row in rows:
        memory, measured = step_memory(row, of_row(row)), row.gib * GIB
        if row.memory.startswith("≥ "):
            assert not row.gib_is_own
            assert measured < memory.peak < 1.1 * (measured + row.ranks * memory.state["gradients"]), row
        else:
            assert memory.peak == pytest.approx(measured, rel=0.1), row


@pytest.mark.parametrize(
    ("change", "error", "remedy"),
    [({"weak": ["ddp"]}, ConfigError, "weak=[fsdp,vocab]"), ({"weak": ["fsdp"]}, UnsupportedError, "cuda_graph=false")],
)
def test_a_graph_that_cannot_be_had_is_refused_before_anything_is_measured(change, error, remedy, tmp_path):
    ranks = DistributedRanks(Launch(0, 0, 1, True), None, None, load_config(["parallel=ddp"]).parallel)
    config = load_config(["device=cpu", "cuda_graph=true", "strong=[]", f"output_dir={tmp_path}"], "bench_parallel")
    with pytest.raises(error) as refusal:
        run_benchmark(ranks, dataclasses.replace(config, **change), "")
    assert remedy in refusal.value.remedy
    assert not list(tmp_path.iterdir())


def test_the_page_shows_every_row_with_the_number_of_its_run(tmp_path):
    runs = [run(2), run(4)]
    for one in runs:
        write(one, tmp_path, None)
    assert read_rows(tmp_path) == runs
    assert write_pages(tmp_path) == [tmp_path / "nvidia_h200.md"], "no row has an efficiency"
    lines = (tmp_path / "nvidia_h200.md").read_text().splitlines()
    for begins, number in (("| all_gather", 3), ("| gla 1b3", 3), ("| 16384 ×", 1)):
        ends = [line.split("|")[-2].strip() for line in lines if line.startswith(begins)]
        assert ends == ["1"] * number + ["2"] * number


def test_repeats_give_an_efficiency_of_one_repeat_each_and_their_interval(tmp_path):
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
    write(dataclasses.replace(run(2), steps=[alone, together]), tmp_path, None)
    [page] = write_pages(tmp_path)
    assert together.efficiency_in_words in page.read_text()
    graphed = dataclasses.replace(steps("fsdp", 2, 4, 210.0), cuda_graph=True, efficiency=0.95)
    write(dataclasses.replace(run(2), steps=[alone, together, graphed]), tmp_path, "graphed")
    figure = weak_scaling(read_rows(tmp_path))
    assert [round(bar.get_width(), 2) for bar in figure.axes[0].patches] == [0.8, 0.95]
    assert figure.get_suptitle() == "With CUDA graphs each of 2 GPUs keeps 95% of its speed, without 80%"
