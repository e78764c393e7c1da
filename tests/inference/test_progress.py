"""What takes long shows progress lines: a script's on standard error, so that standard output holds results alone."""

import time
from typing import Any

from fitting import fitted

from linrnn.models.tuning import progress
from linrnn.training import evaluation


def test_a_validation_and_an_evaluation_say_how_far_they_are(small, command_here, data_cache, monkeypatch):
    """Lines come every few milliseconds, and a batch waits for one."""
    lines: list[str] = []
    line, inputs, expected = progress._line, evaluation.loss_inputs, "evaluated 0 of "

    def noted(*arguments: Any) -> str:
        lines.append(line(*arguments))
        return lines[-1]

    def slow(*arguments: Any) -> Any:
        end = time.monotonic() + 60
        while not any(expected in line for line in lines):
            assert time.monotonic() < end, f"no line with {expected!r}, but {lines[-3:]}"
            time.sleep(0.002)
        return inputs(*arguments)

    monkeypatch.setattr(progress, "_line", noted)
    monkeypatch.setattr(progress, "SECONDS", 0.002)
    monkeypatch.setattr(evaluation, "loss_inputs", slow)
    run = fitted(small()).directory.path
    assert "batches: 0 s so far" in (run / "train.log").read_text()
    lines.clear()
    done = command_here("scripts/evaluate.py", f"checkpoint={run}", f"data.cache_dir={data_cache}")
    assert done.returncode == 0, done.stderr
    assert expected in done.stderr
    assert " so far" not in done.stdout
