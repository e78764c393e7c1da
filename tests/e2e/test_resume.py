"""A killed, interrupted or diverged run loses nothing: resumed equals never broken, bit for bit."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from forked import ROOT, run_script, start
from safetensors.torch import load_file

from linrnn.checkpoint import TENSORS, found
from linrnn.config import load_config
from linrnn.errors import ConfigError, DataError, DivergedError
from linrnn.trainer import Trainer

STEPS = 30
LONG = (
    f"trainer.max_steps={STEPS}",
    "trainer.checkpoint_every=3",
    "trainer.accumulation_steps=2",
    "trainer.valid_every=5",
)


def curve(directory: Path) -> list[tuple[int, float, float]]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [(x["step"], x["train/loss_nats"], x["train/grad_norm"]) for x in lines if "train/loss_nats" in x]


def tensors_of(checkpoint: Path) -> dict[str, bytes]:
    """Bytes of every tensor; their order in a file may differ."""
    [file] = (checkpoint / TENSORS).iterdir()
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(file).items()}


def wait_for_step(directory: Path, step: int, exit_code: Callable[[], int | None]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and exit_code() is None:
        if (directory / "metrics.jsonl").exists() and (steps := curve_or_empty(directory)) and steps[-1][0] >= step:
            return
        time.sleep(0.01)
    raise AssertionError(f"step {step} was not reached: exit code {exit_code()}")


def curve_or_empty(directory: Path) -> list[tuple[int, float, float]]:
    try:
        return curve(directory)
    except ValueError:  # a line is being written
        return []


@pytest.fixture(scope="module")
def unbroken(small_of_module: Callable[..., list[str]]) -> Path:
    trainer = Trainer(load_config(small_of_module(*LONG)))
    trainer.fit()
    return trainer.directory.path


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_stopped_run_continues_bit_for_bit(
    number: signal.Signals, small: Callable[..., list[str]], unbroken: Path, tmp_path: Path
) -> None:
    overrides = small(*LONG, "group=broken")
    directory = tmp_path / "results/broken" / unbroken.name
    process = start(run_script, "train.py", overrides, tmp_path / "log")
    wait_for_step(directory, 5, lambda: process.exitcode)
    assert process.pid
    os.kill(process.pid, number)
    process.join(60)
    if number != signal.SIGKILL:
        assert process.exitcode == 128 + number, (tmp_path / "log").read_text()
        summary = json.loads((directory / "summary.json").read_text())
        assert summary["status"] == "interrupted"
        assert found(directory / "checkpoints")[-1].name == f"step_{summary['steps']:08d}"
    assert curve_or_empty(directory)[-1][0] < STEPS, "the run was over before the signal came"
    summary = Trainer(load_config(overrides)).fit()
    assert summary["status"] == "finished"
    assert curve(directory) == curve(unbroken)
    old, new = (tensors_of(found(path / "checkpoints")[-1]) for path in (unbroken, directory))
    assert old == new
    reference = json.loads((unbroken / "summary.json").read_text())
    assert summary["train_loss_nats"] == reference["train_loss_nats"]
    assert summary["valid_loss_nats"] == reference["valid_loss_nats"]


def test_a_run_outlives_the_reader_of_its_output(small: Callable[..., list[str]], tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "train.py", *small(*LONG, "run_name=run", "logger.console_every_seconds=0")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout
    process.stdout.close()  # as of a `| tee` that the same Ctrl-C ends
    directory = tmp_path / "results/default/run"
    wait_for_step(directory, 5, process.poll)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 128 + signal.SIGINT
    summary = json.loads((directory / "summary.json").read_text())
    assert (summary["status"], found(directory / "checkpoints")[-1].name) == (
        "interrupted",
        f"step_{summary['steps']:08d}",
    )


def test_a_finished_run_is_not_run_again_but_continues_when_it_may_be_longer(
    small: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    first = Trainer(load_config(small())).fit()
    assert Trainer(load_config(small())).fit() == first
    assert "already finished" in capsys.readouterr().out
    longer = Trainer(load_config(small("trainer.max_steps=5")))
    assert longer.fit()["steps"] == 5
    assert [step for step, _, _ in curve(longer.directory.path)] == [1, 2, 3, 4, 5]


def test_a_directory_with_another_configuration_is_refused(small: Callable[..., list[str]]) -> None:
    Trainer(load_config(small("run_name=mine"))).fit()
    with pytest.raises(ConfigError, match=r"optimizer\.lr"):
        Trainer(load_config(small("run_name=mine", "optimizer.lr=0.5")))


def test_never_moves_the_old_run_aside_and_must_needs_one(small: Callable[..., list[str]], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        Trainer(load_config(small("trainer.resume=must")))
    Trainer(load_config(small())).fit()
    again = Trainer(load_config(small("trainer.resume=never")))
    again.fit()
    aside = again.directory.path.with_name(again.directory.path.name + ".1")
    assert json.loads((aside / "summary.json").read_text())["status"] == "finished"


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    small: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer(load_config(small("trainer.max_steps=4", "trainer.checkpoint_every=2")))
    trainer.fit()
    [newest] = (found(trainer.directory.checkpoints)[-1] / TENSORS).iterdir()
    with newest.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    with pytest.raises(DataError, match="does not match its checksum"):
        Trainer(load_config(small(f"init_from={newest.parent.parent}", "group=other")))
    resumed = Trainer(load_config(small("trainer.max_steps=6", "trainer.checkpoint_every=2")))
    resumed.fit()
    output = capsys.readouterr().out
    assert "does not match its checksum" in output
    assert "resuming at step 2" in output


def test_a_diverging_run_keeps_its_last_good_checkpoint(small: Callable[..., list[str]]) -> None:
    overrides = small(
        "trainer.max_steps=40",
        "trainer.checkpoint_every=1",
        "optimizer.lr=1e30",
        "optimizer.max_grad_norm=null",
    )
    trainer = Trainer(load_config(overrides))
    with pytest.raises(DivergedError) as error:
        trainer.fit()
    assert error.value.exit_code == 6
    summary = trainer.directory.read_summary()
    assert summary["status"] == "diverged"
    assert found(trainer.directory.checkpoints)
