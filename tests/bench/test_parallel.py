"""benchmarks/parallel.py: rows and their page, the memory that formulas foresee for them, and what is refused."""

import dataclasses
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks.parallel import StepRow, in_one, read_steps, run_benchmark, write_report
from linrnn import costs
from linrnn.config import load_config
from linrnn.core.errors import ConfigError, UnsupportedError
from linrnn.core.machine import GIB
from linrnn.distributed import DistributedRanks, Launch
from linrnn.models.architecture import resolve

RESULTS = Path(__file__).resolve().parents[2] / "results" / "bench_parallel"


def step_memory(row: StepRow) -> costs.MemoryEstimate:
    """A rank's memory in that step, by formulas. DDP holds the gradients all the time, as its buckets."""
    name, *options = row.parallel.split()
    batch = row.sequences_of_rank * (row.ranks if name == "vocab" else 1)
    run = [f"model={row.model}", f"size={row.size}", f"parallel={name}", *(f"parallel.{option}" for option in options)]
    run += ["loss=cce_kahan", f"trainer.batch_size={batch}", f"trainer.seq_len={row.seq_len}"]
    config = load_config(run)
    arch = resolve(config.model, config.size, row.vocab_size)
    return costs.memory_estimate(arch, config, row.precision, row.ranks)


def steps(parallel: str, ranks: int, ms: float, share: float | None, **other: Any) -> StepRow:
    scaling = {"none": "alone"}.get(parallel, "weak")
    return StepRow("gla", "1b3", 128256, "bf16_autocast", parallel, scaling, ranks, 8, 2048, ms, share, 60.0, **other)


def test_formulas_agree_with_the_memory_of_every_committed_step():
    """FSDP's rows of a later process are lower bounds: they lack at most all of the gradients of the DDP row before."""
    rows = [row for folder in RESULTS.iterdir() for row in read_steps(folder)]
    assert {(row.parallel.split()[0], row.cuda_graph) for row in rows} >= {
        *product(("none", "fsdp", "vocab"), (True, False)),
        ("ddp", False),
    }
    for row in rows:
        memory, measured = step_memory(row), row.gib * GIB
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
    config = load_config(["device=cpu", "cuda_graph=true", f"output_dir={tmp_path}"], "bench_parallel")
    with pytest.raises(error) as refusal:
        run_benchmark(ranks, dataclasses.replace(config, **change))
    assert remedy in refusal.value.remedy
    assert not list(tmp_path.iterdir())


def test_repeats_give_an_efficiency_of_one_repeat_each_and_their_interval(tmp_path):
    rows = []
    for repeat, slower in enumerate((1.0, 2.0, 1.0, 1.0, 3.0), start=1):
        rows += [
            steps("none", 1, 400.0 * slower, None, repeat=repeat),
            steps("fsdp", 2, 500.0 * slower, 0.8, repeat=repeat, host_ms=240.0 * slower),
        ]
    alone, together = in_one(rows[::2]), in_one(rows[1::2])
    assert (together.host_ms, together.step_ms, alone.host_ms) == (240.0, 500.0, None), "medians"
    assert together.tokens_per_second == pytest.approx(2 * 8 * 2048 / 0.5)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(dataclasses.asdict(row)) + "\n" for row in rows))
    assert read_steps(tmp_path) == rows
    [page] = write_report(tmp_path)
    assert "| fsdp | weak | 2 | 8 | 500 | 240 | 65,536 | 0.800 (0.800 to 0.800), n = 5 | 60.0 |" in page.read_text()
