"""Nothing is lost at the end of a run or at a signal: the checkpoint is written before the validation."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fitting import fitted, records, summary_of
from forked import run_script, start

from linrnn.config import load_config
from linrnn.core.errors import InterruptedRun, OutOfMemoryError, StorageError
from linrnn.core.interrupts import SIGNALS, StopRequest
from linrnn.training import checkpoint
from linrnn.training import trainer as trainer_module
from linrnn.training.checkpoint import estimated_bytes, found
from linrnn.training.run_log import RunLog
from linrnn.training.trainer import Trainer

Small = Callable[..., list[str]]
NO_MEMORY = Mock(side_effect=torch.OutOfMemoryError("tried to allocate 1 EiB"))


class OutsideTheGuard(Exception):
    """A signal arrived where it would have killed the process."""


@pytest.fixture
def deadly(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A signal that the run does not handle fails the test instead of ending it."""

    previous = {number: signal.signal(number, Mock(side_effect=OutsideTheGuard)) for number in SIGNALS}
    yield
    for number, old in previous.items():
        signal.signal(number, old)


@pytest.fixture(scope="module")
def whole(small_of_module: Small) -> dict[str, Any]:
    """The summary of a run of four steps without a signal."""
    return Trainer(load_config(small_of_module("trainer.max_steps=4", "trainer.valid_every=2"))).fit()


@pytest.mark.parametrize(("number", "at_step"), [(signal.SIGTERM, 2), (signal.SIGUSR1, 4)])
def test_a_signal_in_a_validation_leaves_a_checkpoint_and_a_summary(number, at_step, small, whole, monkeypatch, deadly):
    options = ("trainer.max_steps=4", "trainer.valid_every=2")
    trainer = Trainer(load_config(small(*options)))
    evaluate = trainer_module.evaluate

    def signalled(*arguments: Any, **more: Any) -> Any:
        if trainer.step == at_step:
            os.kill(os.getpid(), number)
        return evaluate(*arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(trainer_module, "evaluate", signalled)
        with pytest.raises(InterruptedRun, match=f"in the validation after step {at_step} of 4") as error:
            trainer.fit()
    assert error.value.exit_code == 128 + number
    summary = summary_of(trainer)
    assert (summary["status"], summary["steps"]) == ("interrupted", at_step)
    assert [path.name for path in found(trainer.directory.checkpoints)] == [f"step_{at_step:08d}"]
    again = Trainer(load_config(small(*options)))
    resumed = again.fit()
    for name in ("status", "steps", "train_loss_nats", "valid_loss_nats"):
        assert resumed[name] == whole[name], name
    validated = [record["step"] for record in records(again, "valid/loss_nats")]
    assert validated == [2, 4], "the validation that was cut short is made up for"


@pytest.mark.parametrize("at_step", [2, 3])
def test_out_of_memory_in_a_validation_leaves_a_checkpoint(at_step, small, monkeypatch):
    monkeypatch.setattr(trainer_module, "evaluate", NO_MEMORY)
    trainer = Trainer(load_config(small(f"trainer.valid_every={at_step}")))
    with pytest.raises(OutOfMemoryError, match=f"in the validation after step {at_step}"):
        trainer.fit()
    summary = summary_of(trainer)
    assert (summary["status"], summary["steps"]) == ("out_of_memory", at_step)
    assert summary["train_loss_nats"] > 0
    assert [path.name for path in found(trainer.directory.checkpoints)] == [f"step_{at_step:08d}"]


def test_why_the_checkpoint_after_a_failure_was_not_written_is_said_in_full(small, monkeypatch, capsys):
    cause = f"{'long/' * 40} cannot be written (No space left)"
    trainer = Trainer(load_config(small("trainer.valid_every=2")))
    monkeypatch.setattr(trainer_module, "evaluate", NO_MEMORY)
    monkeypatch.setattr(trainer.checkpointer, "save", Mock(side_effect=StorageError(cause, "free space")))
    with pytest.raises(OutOfMemoryError, match="in the validation after step 2"):
        trainer.fit()
    assert f"error: {cause}\n" in capsys.readouterr().out


def test_a_signal_while_the_summary_is_written_does_not_lose_it(small, monkeypatch, deadly):
    summarise = RunLog.summary

    def signalled(*arguments: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return summarise(*arguments, **options)

    monkeypatch.setattr(RunLog, "summary", signalled)
    assert summary_of(fitted(small()))["status"] == "finished"


class Killed(BaseException):
    """Stands for kill -9."""


def test_a_run_that_dies_before_its_summary_has_its_last_validation_once(small, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "summary", Mock(side_effect=Killed))
        with pytest.raises(Killed):
            fitted(small())
    again = fitted(small())
    assert summary_of(again)["status"] == "finished"
    assert [record["step"] for record in records(again, "valid/loss_nats")] == [3]


def test_a_hangup_that_is_ignored_already_stays_ignored():
    """As under nohup."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.signal_number is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_a_second_signal_ends_at_once():
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.signal_number == signal.SIGHUP
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGQUIT)


def _in_a_terminal(terminal: Path, overrides: list[str]) -> None:
    """`train.py` as the leader of a terminal's session, which receives the terminal's hangup."""
    os.setsid()
    os.open(terminal, os.O_RDWR)  # the leader's first terminal becomes the session's
    run_script("train.py", overrides, terminal)


def test_a_terminal_that_is_closed_leaves_a_checkpoint_and_a_summary(small, tmp_path):
    ours, theirs = os.openpty()
    os.set_blocking(ours, False)
    overrides = small("trainer.max_steps=3000", "run_name=run")
    process = start(_in_a_terminal, Path(os.ttyname(theirs)), overrides)
    os.close(theirs)
    directory, seen = tmp_path / "results/default/run", b""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.is_alive():
        try:
            seen += os.read(ours, 65536)  # otherwise the terminal fills up and the run waits
        except OSError:
            time.sleep(0.01)
        if (directory / "metrics.jsonl").exists() and (directory / "metrics.jsonl").read_text().count("\n") > 3:
            break
    os.close(ours)
    process.join(60)
    code = process.exitcode
    process.kill()
    assert code == 128 + signal.SIGHUP, seen.decode(errors="replace")
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert found(directory / "checkpoints")[-1].name == f"step_{summary['steps']:08d}"


def test_a_run_without_options_writes_checkpoints_by_the_clock(small, monkeypatch, capsys):
    """Every step takes four minutes here. A kill must lose at most ten minutes, not the run."""
    assert load_config(small()).trainer.checkpoint_minutes == 10
    clock, step, steps = time.monotonic, Trainer.train_step, list[int]()

    def train_step(self: Trainer) -> Any:
        steps.append(self.step)
        return step(self)

    monkeypatch.setattr(Trainer, "train_step", train_step)
    monkeypatch.setattr(trainer_module.time, "monotonic", lambda: clock() + 240 * len(steps))
    trainer = fitted(small("trainer.max_steps=8", "trainer.keep_checkpoints=9"))
    assert [int(path.name.removeprefix("step_")) for path in found(trainer.directory.checkpoints)] == [3, 6, 8]
    assert "checkpoints every 10 minutes, and at the end: a checkpoint takes" in capsys.readouterr().out
    none = fitted(small("trainer.max_steps=8", "trainer.checkpoint_every=0", "group=none"))
    assert not found(none.directory.checkpoints)


def test_a_disk_without_room_for_the_checkpoints_is_refused_before_training(small, monkeypatch):
    size = 3 * 4 * 461_696
    usage = shutil.disk_usage

    def with_free(free: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=free))

    with_free(size - 1)
    trainer = Trainer(load_config(small()))
    with pytest.raises(StorageError, match="no room for 1 checkpoint") as error:
        trainer.fit()
    assert (error.value.exit_code, trainer.steps_here) == (7, 0)
    assert "trainer.checkpoint_every=0" in error.value.remedy
    with_free(3 * size - 1)
    with pytest.raises(StorageError, match="no room for 3 checkpoint"):
        Trainer(load_config(small("trainer.max_steps=6", "trainer.checkpoint_every=2"))).fit()
    trainer = fitted(small("trainer.max_steps=2", "trainer.checkpoint_every=1"))
    files = found(trainer.directory.checkpoints)[-1].rglob("*")
    estimated = estimated_bytes(trainer.model.hf, trainer.optimizer)
    assert estimated == pytest.approx(sum(file.stat().st_size for file in files), rel=0.02)
    assert Trainer(load_config(small("trainer.checkpoint_every=0", "group=none"))).fit()["steps"] == 3


def test_a_checkpoint_that_cannot_be_written_ends_the_run_at_once(small, monkeypatch):
    """Without waiting for the next checkpoint, which may be the last."""
    monkeypatch.setattr(checkpoint, "sync", Mock(side_effect=OSError(28, "No space left on device")))
    trainer = Trainer(load_config(small("trainer.max_steps=1000", "trainer.checkpoint_every=500")))
    trainer.step = 497
    with pytest.raises(StorageError, match=r"checkpoint of step 500 was not written .*No space left") as error:
        trainer.fit()
    assert trainer.step < 1000
    assert (error.value.exit_code, summary_of(trainer)["status"]) == (7, "failed")
    assert not list(trainer.directory.checkpoints.iterdir()), "no half-written checkpoint"
