"""A learning-rate schedule ends at its planned step, whether a run is stopped, continued or part of a sweep."""

import json
from pathlib import Path

import pytest
from fitting import fitted, summary_of

from linrnn.config import load_config
from linrnn.core.errors import ConfigError
from linrnn.training.checkpoint import found
from linrnn.training.run_log import RunLog
from linrnn.training.trainer import Trainer

COSINE = ("schedule.warmup_steps=2", "trainer.max_steps=8")


def records(directory: Path, key: str) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line[key]) for line in lines if key in line]


def test_a_run_that_stops_early_goes_on_as_one_that_never_stopped(small):
    whole = fitted(small(*COSINE, "group=whole")).directory.path
    early = small(*COSINE, "group=stopped", "schedule.steps=8")
    stopped = fitted([*early, "trainer.max_steps=4"])
    assert stopped.directory.path.name == whole.name, "it is the same run"
    assert stopped.directory.read_summary()["status"] == "finished"
    fitted(early)
    for key in ("train/lr", "train/loss_nats"):
        assert records(stopped.directory.path, key) == records(whole, key)


def test_a_finished_run_that_goes_on_and_is_killed_is_not_finished(small, monkeypatch):
    early = small(*COSINE, "schedule.steps=8", "trainer.checkpoint_every=5")
    stopped = fitted([*early, "trainer.max_steps=4"])
    longer = Trainer(load_config(early))
    saved = longer.save

    def killed_after_the_checkpoint() -> None:
        saved()
        longer.checkpointer.wait()
        raise Killed

    monkeypatch.setattr(longer, "save", killed_after_the_checkpoint)
    monkeypatch.setattr(RunLog, "summary", Killed.now)  # a killed process writes nothing more
    with pytest.raises(Killed):
        longer.fit()
    assert found(longer.directory.checkpoints)[-1].name == "step_00000005"
    assert stopped.directory.read_summary() is None
    with pytest.raises(ConfigError, match="holds a run of 5 steps, and this command stops at 4"):
        Trainer(load_config([*early, "trainer.max_steps=4"])).fit()


class Killed(BaseException):
    """Stands for SIGKILL."""

    @classmethod
    def now(cls, *_: object, **__: object) -> None:
        raise cls


def test_a_constant_schedule_goes_on_as_one_that_never_stopped(small, capsys):
    constant = small("schedule=constant", "schedule.steps=6")
    fitted([*constant, "trainer.max_steps=6"])
    capsys.readouterr()
    longer = fitted([*constant, "trainer.max_steps=9"])
    output = capsys.readouterr().out
    assert "resuming at step 6 from" in output
    assert "schedule ends" not in output
    whole = fitted([*constant, "trainer.max_steps=9", "group=whole"])
    for key in ("train/lr", "train/loss_nats"):
        assert records(longer.directory.path, key) == records(whole.directory.path, key)
    assert " schedule.steps=9 " in summary_of(longer)["training"], "reports show all other ends"
