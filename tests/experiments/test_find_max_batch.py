"""`scripts/find_max_batch.py` on a CPU: real training runs, measured by the process's resident set."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from linrnn.config import load_config
from linrnn.config.cli import split_overrides
from linrnn.core.errors import ConfigError
from linrnn.experiments import max_batch
from linrnn.experiments.max_batch import Answer, find_max_batch
from linrnn.experiments.points import Point, write_summary

Small = Callable[..., list[str]]
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.usefixtures("quick_points")
def test_probes_are_training_runs_and_are_not_made_again(small: Small, command: Command, tmp_path: Path) -> None:
    own = ["memory_budget_gib=0.05", "max_probes=1", "probe_steps=3", "warmup_steps=1"]
    overrides = [o for o in small("model=transformer", "loss=standard") if not o.startswith("trainer.max_steps")]

    def search() -> Answer:
        """The command in this process."""
        own_keys, _, runs = split_overrides([*overrides, *own], "find_max_batch")
        return find_max_batch(load_config(own_keys, "find_max_batch"), runs, print)

    search()
    (path,) = (tmp_path / "results/max_batch/answers").glob("*/max_batch.json")
    answer = json.loads(path.read_text())
    (probe,) = answer["probes"]
    (run,) = (tmp_path / "results/max_batch").glob("*/summary.json")
    summary = json.loads(run.read_text())
    assert (summary["status"], summary["steps"], summary["batch_size"]) == ("finished", 3, probe["batch"])
    assert summary["peak_memory_bytes"] == probe["peak_bytes"] > 0.05 * 2**30
    assert (answer["max_sequences"], answer["model"], answer["loss"]) == (0, "transformer", "standard")

    written = run.stat().st_mtime_ns
    done = command("scripts/find_max_batch.py", *overrides, *own)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "do not fit" in done.stdout, "Python and torch alone take more than 50 MiB"
    assert "resident set" in done.stdout
    again = json.loads(path.read_text())
    keys = ("batch", "fits", "peak_bytes")
    assert [[p[key] for key in keys] for p in again["probes"]] == [[probe["batch"], False, probe["peak_bytes"]]]
    assert run.stat().st_mtime_ns == written
    assert answer["vocab_size"] == summary["vocab_size"] == 512, "the data's, where the size has none"

    environment = run.with_name("environment.json")
    [process] = json.loads(environment.read_text())["processes"]
    environment.write_text(json.dumps({"processes": [{**process, "packages": {"torch": "99"}}]}))
    with pytest.raises(ConfigError, match=r"was made with another .*torch"):  # an answer is of one origin
        search()
    environment.write_text(json.dumps({"processes": [process]}))
    own[own.index("warmup_steps=1")] = "warmup_steps=2"
    with pytest.raises(ConfigError, match=r"was made with another trainer\.warmup_measurement_steps"):
        search()


class FakeProcess:
    """The ranks of a probe. With more than `fitting` sequences a rank, rank 1 runs out of memory."""

    started: ClassVar[list[tuple[int, int]]] = []
    fitting: ClassVar[int] = 5
    bytes_of_a_sequence: ClassVar[int] = 9 * 2**20

    def __init__(self, point: Point, environment: dict[str, str]) -> None:
        self.point = point
        self.started.append((point.ranks, point.config.trainer.batch_size))

    def wait(self) -> None:
        pass

    kill = wait

    def conclude(self) -> dict[str, Any]:
        batch = self.point.config.trainer.batch_size // UNIT[self.point.config.parallel.name]
        summary = write_summary(self.point, "out_of_memory", "rank 1 stopped: out of memory at step 3")
        if batch > self.fitting:
            return summary
        figures = {
            "status": "finished",
            "peak_memory_bytes": self.bytes_of_a_sequence * batch,
            "tokens_per_second": 9.0,
        }
        return {**summary, **figures, "tokens_per_second_is": "wall clock"}


UNIT = {"fsdp": 1, "vocab": 2}  # trainer.batch_size for one sequence on each of two ranks


@pytest.mark.usefixtures("quick_points")
@pytest.mark.parametrize("parallel", ["fsdp", "vocab"])
def test_probes_of_two_ranks_find_the_batch_of_a_rank(
    parallel: str, small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank out of memory is a batch that does not fit."""
    monkeypatch.setattr(max_batch, "Process", FakeProcess)
    monkeypatch.setattr(FakeProcess, "started", [])
    overrides = [o for o in small(f"parallel={parallel}") if not o.startswith("trainer.max_steps")]
    own = ["memory_budget_gib=0.05", "max_probes=9", "ranks=2"]
    own_keys, _, runs = split_overrides([*overrides, *own], "find_max_batch")
    said: list[str] = []
    answer = find_max_batch(load_config(own_keys, "find_max_batch"), runs, said.append)
    assert (answer.batch, answer.exact) == (5, True)
    assert all(ranks == 2 and batch % UNIT[parallel] == 0 for ranks, batch in FakeProcess.started)
    assert {5 * UNIT[parallel], 6 * UNIT[parallel]} <= {batch for _, batch in FakeProcess.started}
    assert "  sequences and memory are those of each of 2 ranks" in said
    [path] = (tmp_path / "results/max_batch/answers").glob("*/max_batch.json")
    written = json.loads(path.read_text())
    assert (written["world_size"], written["parallel"], written["max_sequences"]) == (2, parallel, 5)


@pytest.mark.usefixtures("quick_points")
def test_a_right_forecast_asks_one_process_alone(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them takes seconds to start, beside the two probes."""
    asked: list[str] = []

    def ask(function: Callable[..., Any], *arguments: Any) -> Any:
        asked.append(function.__name__)
        return function(*arguments)

    def search(group: str) -> Answer:
        overrides = [o for o in small("parallel=fsdp") if not o.startswith("trainer.max_steps")]
        own = [f"group={group}", "memory_budget_gib=0.5", "max_probes=9", "ranks=2"]
        own_keys, _, runs = split_overrides([*overrides, *own], "find_max_batch")
        return find_max_batch(load_config(own_keys, "find_max_batch"), runs, lambda line: None)

    monkeypatch.setattr(max_batch, "Process", FakeProcess)
    monkeypatch.setattr(max_batch, "in_another_process", ask)
    monkeypatch.setattr(FakeProcess, "started", [])
    foreseen = search("wrong").foreseen
    assert foreseen is not None
    assert foreseen > FakeProcess.fitting
    assert "_point" in asked
    asked.clear()
    monkeypatch.setattr(FakeProcess, "fitting", foreseen)
    monkeypatch.setattr(FakeProcess, "bytes_of_a_sequence", 2**29 // (foreseen + 1))
    assert (search("right").batch, asked) == (foreseen, ["_look_ahead"])


@pytest.mark.usefixtures("quick_points")
def test_a_search_with_ranks_that_one_process_cannot_have_is_refused(small: Small) -> None:
    own_keys, _, runs = split_overrides([*small(), "ranks=2"], "find_max_batch")
    with pytest.raises(ConfigError, match="2 ranks, and parallel=none"):
        find_max_batch(load_config(own_keys, "find_max_batch"), runs, print)


def test_what_cannot_be_searched_is_refused(small: Small, command: Command) -> None:
    done = command("scripts/find_max_batch.py", *small("loss=liger"))
    assert done.returncode == 4
    assert "loss=liger" in done.stderr
    wrong = command("scripts/find_max_batch.py", "model=gal")
    assert wrong.returncode == 2
    assert "gla" in wrong.stderr
