"""The search for the largest batch: few probes if the forecast is nearly right, honest if it did not end exactly.

And `scripts/find_max_batch.py` on a CPU: real training runs, measured by the process's resident set.
"""

import json
from bisect import bisect_right
from collections.abc import Callable
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linrnn.config import load_config
from linrnn.config.cli import split_overrides
from linrnn.core.errors import ConfigError
from linrnn.experiments import max_batch
from linrnn.experiments.max_batch import Answer, Probe, report, search
from linrnn.experiments.points import Point, write_summary

GIB = 2**30


def line(fixed: float, slope: float) -> Callable[[int], float]:
    return lambda batch: (fixed + slope * batch) * GIB


def searched(truth, forecast, gib: float, max_probes: int) -> tuple[list[int], Answer]:
    """The probes of a search and its answer."""
    log: list[int] = []

    def probe(batch: int) -> Probe:
        log.append(batch)
        peak = int(truth(batch))
        fits = peak <= gib * GIB
        return Probe(batch, fits, peak if fits else None, 100.0 if fits else None)

    estimated = None if forecast is None else bisect_right(range(1, 9999), gib * GIB, key=forecast)
    return log, search(probe, estimated, gib * GIB, max_probes)


@pytest.mark.parametrize(
    ("truth", "forecast", "gib", "log"),
    [
        (line(27, 4.6), line(27, 4.6), 80, [11, 12]),
        (line(20.7, 0.7), line(20, 0.7), 78, [82, 81]),  # one sequence too high
        (line(60, 9.9), line(0, 20), 80, [4, 3, 1, 2]),  # two too high: the one between 1 and 3 is tried
        (line(90, 1), line(90, 1), 80, [1]),  # not even one fits
        (line(10, 0.2), None, 80, [1, 7, 112, 350]),  # at most sixteen times what fitted, as peaks may mislead
        (line(0.01, 0.01), None, 80, [1, 16, 256, 4096]),
        (line(70, 1), line(0, 1), 80, [80, 79, 39, 19]),  # far too high: by half
    ],
)
def test_the_first_probe_is_the_forecast_and_peaks_decide_the_next(truth, forecast, gib, log):
    probed, answer = searched(truth, forecast, gib, 4)
    assert probed == log
    assert answer.batch == max((batch for batch in log if truth(batch) <= gib * GIB), default=0)


@pytest.mark.parametrize("error", [0.8, 0.9, 0.97, 1.03, 1.1, 1.25])
@pytest.mark.parametrize(("fixed", "slope"), [(27, 4.6), (30, 0.35), (20, 1.2)])
def test_a_forecast_wrong_by_up_to_a_quarter_ends_near_the_answer_within_seven_probes(error, fixed, slope):
    """The default of max_probes."""
    _, answer = searched(line(fixed, slope), line(fixed * error, slope * error), 80, 7)
    expected = int((80 - fixed) / slope)
    assert answer.batch <= expected
    assert answer.exact or slope < 1
    assert expected - answer.batch <= 0.03 * expected


@pytest.mark.parametrize(("fixed", "slope"), [(27, 4.6), (30, 0.35), (20, 1.2), (79.5, 1)])
def test_without_formulas_what_is_measured_takes_their_place(fixed, slope):
    log, answer = searched(line(fixed, slope), None, 80, 6)
    assert log[0] == 1, "nothing is estimated"
    assert (answer.batch, answer.estimated, answer.exact) == (int((80 - fixed) / slope), None, True)
    assert "estimated unknown" in report(answer, on_gpu=True)[0]


@settings(max_examples=200, deadline=None)
@given(
    fixed=st.floats(0.5, 60),
    slope=st.floats(0.01, 10),
    error=st.floats(0.3, 3),
    offset=st.floats(0, 20),
    n=st.integers(1, 9),
)
def test_whatever_the_forecast_says_the_answer_is_what_was_seen(fixed, slope, error, offset, n):
    truth = line(fixed + offset, slope)
    log, answer = searched(truth, line(fixed * error, slope * error), 80, n)
    assert len(log) <= n
    assert len(set(log)) == len(log), "no batch is probed twice"
    assert min(log) >= 1
    assert answer.batch == max([batch for batch in log if int(truth(batch)) <= 80 * GIB], default=0)  # whole bytes
    assert answer.too_large == min([batch for batch in log if int(truth(batch)) > 80 * GIB], default=None)


def find(overrides: list[str], *own: str, say: Callable[[str], None] = print) -> Answer:
    """The command in this process."""
    overrides = [override for override in overrides if not override.startswith("trainer.max_steps")]
    own_keys, runs = split_overrides([*overrides, *own], "find_max_batch")
    with patch.object(max_batch, "say", say):
        return max_batch.find_max_batch(load_config(own_keys, "find_max_batch"), runs)


@pytest.mark.usefixtures("quick_points")
def test_probes_are_training_runs_and_are_not_made_again(small, tmp_path):
    own = ["memory_budget_gib=0.05", "max_probes=1", "probe_steps=3"]
    overrides = small("model=transformer", "loss=standard")
    find(overrides, *own, "warmup_steps=1")
    (path,) = (tmp_path / "results/max_batch/answers").glob("*/max_batch.json")
    answer = json.loads(path.read_text())
    (probe,) = answer["probes"]
    (run,) = (tmp_path / "results/max_batch").glob("*/summary.json")
    summary = json.loads(run.read_text())
    assert (summary["status"], summary["steps"], summary["batch_size"]) == ("finished", 3, probe["batch"])
    assert summary["peak_memory_bytes"] == probe["peak_bytes"] > 0.05 * 2**30
    assert (answer["max_sequences"], answer["model"], answer["loss"]) == (0, "transformer", "standard")
    assert answer["vocab_size"] == summary["vocab_size"] == 512, "the data's, where the size has none"

    written = run.stat().st_mtime_ns
    said: list[str] = []
    find(overrides, *own, "warmup_steps=1", say=said.append)
    assert "do not fit" in said[-5], "Python and torch alone take more than 50 MiB"
    assert "resident set" in said[-2]
    assert json.loads(path.read_text())["probes"] == answer["probes"]
    assert run.stat().st_mtime_ns == written
    with pytest.raises(ConfigError, match="was made with another warmup_steps"):
        find(overrides, *own, "warmup_steps=2")

    environment = run.with_name("environment.json")
    [process] = json.loads(environment.read_text())["processes"]
    environment.write_text(json.dumps({"processes": [{**process, "packages": {"torch": "99"}}]}))
    with pytest.raises(ConfigError, match=r"was made with another .*torch"):  # an answer is of one origin
        find(overrides, *own, "warmup_steps=1")


class FakeProcess:
    """The ranks of a probe. With more than five sequences a rank, rank 1 runs out of memory."""

    started: ClassVar[list[tuple[int, int]]] = []

    def __init__(self, point: Point, environment: dict[str, str]) -> None:
        self.point = point
        self.started.append((point.ranks, point.config.trainer.batch_size))

    def finish(self) -> dict[str, Any]:
        batch = self.point.config.trainer.batch_size // UNIT[self.point.config.parallel.name]
        summary = write_summary(self.point, "out_of_memory", "rank 1 stopped: out of memory at step 3")
        figures = {"peak_memory_bytes": 9 * 2**20 * batch, "tokens_per_second": 9.0, "tokens_per_second_is": "clock"}
        return summary if batch > 5 else {**summary, "status": "finished", **figures}


UNIT = {"fsdp": 1, "vocab": 2}  # trainer.batch_size for one sequence on each of two ranks


@pytest.mark.usefixtures("quick_points")
@pytest.mark.parametrize("parallel", ["fsdp", "vocab"])
def test_probes_of_two_ranks_find_the_batch_of_a_rank(parallel, small, tmp_path, monkeypatch):
    """A rank out of memory is a batch that does not fit."""
    monkeypatch.setattr(max_batch, "Process", FakeProcess)
    monkeypatch.setattr(FakeProcess, "started", [])
    said: list[str] = []
    own = ["memory_budget_gib=0.05", "max_probes=9", "ranks=2"]
    answer = find(small(f"parallel={parallel}"), *own, say=said.append)
    assert (answer.batch, answer.exact) == (5, True)
    assert all(ranks == 2 and batch % UNIT[parallel] == 0 for ranks, batch in FakeProcess.started)
    assert {5 * UNIT[parallel], 6 * UNIT[parallel]} <= {batch for _, batch in FakeProcess.started}
    assert "  sequences and memory are those of each of 2 ranks" in said
    [path] = (tmp_path / "results/max_batch/answers").glob("*/max_batch.json")
    written = json.loads(path.read_text())
    assert (written["world_size"], written["parallel"], written["max_sequences"]) == (2, parallel, 5)
