"""A learning-rate schedule ends at its planned step, whether a run is stopped, continued or part of a sweep."""

from unittest.mock import Mock

import pytest
import torch
from fitting import fitted, records, summary_of

from linrnn.config import load_config
from linrnn.core.errors import ConfigError
from linrnn.training.checkpoint import found
from linrnn.training.run_log import RunLog
from linrnn.training.trainer import Trainer

COSINE = ("schedule.warmup_steps=2",)


def steps_with(trainer: Trainer, key: str) -> list[tuple[int, float]]:
    return [(record["step"], record[key]) for record in records(trainer, key)]


@pytest.mark.parametrize(
    ("options", "early"),
    [
        (COSINE, ["schedule.steps=8"]),
        (("schedule=constant", "schedule.warmup_steps=0"), []),
        (("optimizer=muon", "model=gated_deltanet"), ["schedule.steps=8"]),
    ],
)
def test_a_run_that_stops_early_goes_on_as_one_that_never_stopped(options, early, small, capsys):
    whole = fitted(small(*options, "trainer.max_steps=8", "group=whole"))
    stopped = fitted(small(*options, *early, "trainer.max_steps=4"))
    assert stopped.directory.path.name == whole.directory.path.name, "it is the same run"
    assert stopped.directory.read_summary()["status"] == "finished"
    assert ("schedule ends at step 8" in capsys.readouterr().out) == bool(early)
    second = fitted(small(*options, *early, "trainer.max_steps=8"))
    assert "resuming at step 4 from" in capsys.readouterr().out
    for key in ("train/lr", "train/loss_nats"):
        assert steps_with(second, key) == steps_with(whole, key)
    theirs = whole.model.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in second.model.state_dict().items())
    assert " schedule.steps=8 " in summary_of(second)["training"], "reports show all other ends"


def test_a_finished_run_that_goes_on_and_is_killed_is_not_finished(small, monkeypatch):
    early = small(*COSINE, "schedule.steps=8", "trainer.max_steps=8", "trainer.checkpoint_every=5")
    stopped = fitted([*early, "trainer.max_steps=4"])
    longer = Trainer(load_config(early))
    saved = longer.save

    def killed_after_the_checkpoint() -> None:
        saved()
        longer.checkpointer.wait()
        raise Killed

    monkeypatch.setattr(longer, "save", killed_after_the_checkpoint)
    monkeypatch.setattr(RunLog, "summary", Mock(side_effect=Killed))  # a killed process writes nothing more
    with pytest.raises(Killed):
        longer.fit()
    assert found(longer.directory.checkpoints)[-1].name == "step_00000005"
    assert stopped.directory.read_summary() is None
    with pytest.raises(ConfigError, match="holds a run of 5 steps, and this command stops at 4"):
        Trainer(load_config([*early, "trainer.max_steps=4"])).fit()


class Killed(BaseException):
    """Stands for SIGKILL."""
