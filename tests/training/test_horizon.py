"""A learning-rate schedule ends at its planned step, whether a run is stopped, continued or part of a sweep."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fitting import fitted

from linrnn.config import load_config
from linrnn.core.errors import ConfigError
from linrnn.experiments.points import foresee
from linrnn.training.checkpoint import found, read_progress, read_state
from linrnn.training.checkpoint.format import write_state
from linrnn.training.run_log import RunLog
from linrnn.training.trainer import Trainer

Small = Callable[..., list[str]]
COSINE = ("schedule.warmup_steps=2", "trainer.max_steps=8")


def records(directory: Path, key: str) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line[key]) for line in lines if key in line]


def test_a_run_that_stops_early_goes_on_as_one_that_never_stopped(small: Small) -> None:
    whole = fitted(small(*COSINE, "group=whole")).directory.path
    early = small(*COSINE, "group=stopped", "schedule.steps=8")
    stopped = fitted([*early, "trainer.max_steps=4"])
    assert stopped.directory.path.name == whole.name, "it is the same run"
    assert stopped.directory.read_summary()["status"] == "finished"
    assert read_progress(found(stopped.directory.checkpoints)[-1]).schedule["horizon"] == 8
    fitted(early)
    for key in ("train/lr", "train/loss_nats"):
        assert records(stopped.directory.path, key) == records(whole, key)


def test_a_finished_run_that_goes_on_and_is_killed_is_not_finished(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_checkpoint_of_another_schedule_is_refused(small: Small) -> None:
    run = small("schedule.steps=5")
    [newest] = found(fitted(run).directory.checkpoints)
    state = read_state(newest)
    state["schedule"]["horizon"] = 9
    write_state(newest, state)
    with pytest.raises(ConfigError, match=r"was trained under another schedule \(horizon: 9 -> 5\)"):
        Trainer(load_config([*run, "trainer.max_steps=5"])).fit()


class Killed(BaseException):
    """Stands for SIGKILL."""

    @classmethod
    def now(cls, *_: object, **__: object) -> None:
        raise cls


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_another_horizon_in_the_same_directory_is_refused_with_the_choices_named(small: Small, schedule: str) -> None:
    run = small("run_name=run", f"schedule={schedule}")
    directory = fitted(run).directory.path
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"schedule ends at step 3, and this command's ends at step 9") as error:
        Trainer(load_config([*run, "trainer.max_steps=9"]))
    assert "schedule.steps=3" not in error.value.remedy, "that schedule has no step left"
    for choice in (f"continue_from={directory} run_name=run-2", "trainer.resume=never"):
        assert choice in error.value.remedy
    assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("more", [[], ["run_name=run"], ["schedule.warmup_steps=2"], ["schedule.steps=20"]])
@pytest.mark.parametrize(("first", "then"), [(6, 9), (20, 40)])
def test_a_constant_schedule_goes_on_as_one_that_never_stopped(
    more: list[str], first: int, then: int, small: Small, capsys: pytest.CaptureFixture[str]
) -> None:
    constant = small("schedule=constant", *more)
    fitted([*constant, f"trainer.max_steps={first}"])
    capsys.readouterr()
    longer = fitted([*constant, f"trainer.max_steps={then}"])
    output = capsys.readouterr().out
    assert f"resuming at step {first} from" in output
    assert f"step {then}/{then} |" in output
    assert "schedule ends" not in output
    whole = fitted([*constant, f"trainer.max_steps={then}", "group=whole"])
    for key in ("train/lr", "train/loss_nats"):
        assert records(longer.directory.path, key) == records(whole.directory.path, key)
    assert f" schedule.steps={then} " in longer.directory.read_summary()["training"], "reports show all other ends"


def labels(points: list[Any]) -> list[str]:
    return [point.label for point in points]


def test_a_sweep_over_max_steps_has_a_directory_for_every_point(small: Small) -> None:
    steps = [f"trainer.max_steps={number}" for number in (20, 60, 100)]
    points = foresee([small(one) for one in steps])
    assert labels(points) == steps
    assert len({point.directory for point in points}) == 3
    repeated = foresee([small(steps[0]), small(steps[0], "trainer.accumulation_steps=1")])
    assert len(repeated) == 1, "a point that repeats another is run once"


@pytest.mark.parametrize(
    ("shared", "varied", "remedy"),
    [
        (["schedule.steps=100"], "trainer.max_steps", "leave schedule.steps=null"),
        (["run_name=run"], "optimizer.lr", "leave run_name out"),
        ([], "trainer.log_every", "names do not tell these values of trainer.log_every apart"),
    ],
)
def test_points_that_would_share_a_directory_are_refused_by_name(
    small: Small, shared: list[str], varied: str, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=f"the points {varied}=1 and {varied}=2 would share") as error:
        foresee([small(*shared, f"{varied}={value}") for value in (1, 2)])
    assert remedy in error.value.remedy


def test_a_point_that_stops_before_a_finished_run_of_its_directory_is_refused(small: Small) -> None:
    long = small("schedule.steps=100")
    fitted(long)
    [same] = foresee([long])
    [shorter] = foresee([[*long, "trainer.max_steps=2"]])
    [longer] = foresee([[*long, "trainer.max_steps=5"]])
    assert same.is_answered(retry=False)
    assert not longer.is_answered(retry=False)
    with pytest.raises(ConfigError, match=r"holds a run of 3 steps, and .* stops at 2"):
        shorter.is_answered(retry=False)
