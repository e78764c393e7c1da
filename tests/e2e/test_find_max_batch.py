"""`scripts/find_max_batch.py` on a CPU: real training runs, measured by the process's resident set."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

Small = Callable[..., list[str]]
Command = Callable[..., subprocess.CompletedProcess[str]]


def test_probes_are_training_runs_and_are_not_made_again(
    small: Small, fresh_command: Command, command: Command, tmp_path: Path
) -> None:
    own = ["memory_budget_gib=0.05", "max_probes=1", "probe_steps=3", "warmup_steps=1"]
    overrides = [o for o in small("model=transformer", "loss=standard") if not o.startswith("trainer.max_steps")]
    done = fresh_command("scripts/find_max_batch.py", *overrides, *own)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "do not fit" in done.stdout, "Python and torch alone take more than 50 MiB"
    assert "resident set" in done.stdout
    (path,) = (tmp_path / "results/max_batch/answers").glob("*/max_batch.json")
    answer = json.loads(path.read_text())
    (probe,) = answer["probes"]
    (run,) = (tmp_path / "results/max_batch").glob("*/summary.json")
    summary = json.loads(run.read_text())
    assert (summary["status"], summary["steps"], summary["batch_size"]) == ("finished", 3, probe["batch"])
    assert summary["peak_memory_bytes"] == probe["peak_bytes"] > 0.05 * 2**30
    assert (answer["max_sequences"], answer["model"], answer["loss"]) == (0, "transformer", "standard")

    written = run.stat().st_mtime_ns
    again = command("scripts/find_max_batch.py", *overrides, *own)
    assert again.returncode == 0
    assert run.stat().st_mtime_ns == written
    assert answer["vocab_size"] == summary["vocab_size"] == 512, "the data's, where the size has none"

    environment = run.with_name("environment.json")
    environment.write_text(json.dumps({**json.loads(environment.read_text()), "cuda": "99"}))
    other = command("scripts/find_max_batch.py", *overrides, *own)
    assert other.returncode == 2, "an answer is of one origin"
    assert "was made with another cuda" in other.stderr


def test_what_cannot_be_searched_is_refused(small: Small, command: Command) -> None:
    done = command("scripts/find_max_batch.py", *small("loss=liger"))
    assert done.returncode == 4
    assert "loss=liger" in done.stderr
    wrong = command("scripts/find_max_batch.py", "model=gal")
    assert wrong.returncode == 2
    assert "gla" in wrong.stderr
