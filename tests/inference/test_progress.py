"""What takes long shows progress lines: a script's on standard error, so that standard output holds results alone."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from linrnn.config import load_config
from linrnn.inference import generate
from linrnn.models import language_model
from linrnn.models.tuning import progress
from linrnn.training import evaluation
from linrnn.training.trainer import Trainer


@pytest.fixture
def waiting_for(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Lines come every few milliseconds. The returned function waits for one with a text."""
    lines: list[str] = []
    line = progress._line

    def noted(*arguments: Any) -> str:
        lines.append(line(*arguments))
        return lines[-1]

    def wait(text: str) -> None:
        end = time.monotonic() + 60
        while not any(text in line for line in lines):
            assert time.monotonic() < end, f"no line with {text!r}, but {lines[-3:]}"
            time.sleep(0.002)

    monkeypatch.setattr(progress, "_line", noted)
    monkeypatch.setattr(progress, "SECONDS", 0.002)
    return wait


def test_a_validation_an_evaluation_samples_a_profile_and_a_breakdown(
    small, command_here, data_cache, tmp_path, waiting_for, monkeypatch
):
    def slow(owner: Any, name: str, text: Callable[..., str]) -> None:
        original = getattr(owner, name)

        def wait_then_call(*arguments: Any, **options: Any) -> Any:
            result = original(*arguments, **options)
            waiting_for(text(*arguments))
            return result

        monkeypatch.setattr(owner, name, wait_then_call)

    slow(evaluation, "loss_inputs", lambda *_: "evaluated 0 of ")
    slow(language_model, "loss_inputs", lambda *_: ": 0 tokens")
    slow(generate._Counter, "put", lambda counter, _: counter.text())
    trainer = Trainer(load_config(small()))
    trainer.fit()
    run = trainer.directory.path
    assert "batches: 0 s so far" in (run / "train.log").read_text()
    slow(Trainer, "train_step", lambda *_: "broken_down")
    cache = f"data.cache_dir={data_cache}"
    for script, overrides, line in (
        ("scripts/evaluate", [f"checkpoint={run}", cache], "evaluated 0 of "),
        (
            "scripts/generate",
            [f"checkpoint={run}", "prompt_tokens=[1]", "max_new_tokens=3", "n_samples=2"],
            "2 of 2, 3 of 3",
        ),
        ("study/sparsity", [f"checkpoints=[{run}]", cache, f"output_dir={tmp_path}"], "step_00000003: 0 tokens"),
        (
            "scripts/breakdown",
            [*small("run_name=broken_down"), f"output={tmp_path}", "steps=1"],
            "broken_down: 0 s so far",
        ),
    ):
        done = command_here(f"{script}.py", *overrides)
        assert done.returncode == 0, done.stderr
        assert line in done.stderr
        assert " so far" not in done.stdout
