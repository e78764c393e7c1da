"""`scripts/find_max_batch.py` on a CPU: real training runs, measured by the process's resident set."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from linrnn.config import load_config
from linrnn.config.cli import split_overrides
from linrnn.core.errors import ConfigError
from linrnn.experiments.max_batch import Answer, find_max_batch

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
    environment.write_text(json.dumps({"processes": [{**process, "cuda": "99"}]}))
    with pytest.raises(ConfigError, match="was made with another cuda"):  # an answer is of one origin
        search()
    environment.write_text(json.dumps({"processes": [process]}))
    own[own.index("warmup_steps=1")] = "warmup_steps=2"
    with pytest.raises(ConfigError, match=r"was made with another trainer\.warmup_measurement_steps"):
        search()


def test_what_cannot_be_searched_is_refused(small: Small, command: Command) -> None:
    done = command("scripts/find_max_batch.py", *small("loss=liger"))
    assert done.returncode == 4
    assert "loss=liger" in done.stderr
    wrong = command("scripts/find_max_batch.py", "model=gal")
    assert wrong.returncode == 2
    assert "gla" in wrong.stderr
