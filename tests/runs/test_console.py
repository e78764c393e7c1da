"""The console: one line in place on a terminal, a line now and then elsewhere; the picture; TensorBoard's files."""

import io
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from PIL import Image

from linrnn.config import load_config
from linrnn.core import machine
from linrnn.core.errors import UnsupportedError
from linrnn.core.machine import GIB, busy_with_others, size_in_words, wait_asleep_if_busy
from linrnn.runs import loggers
from linrnn.runs.loggers import Console, TensorboardMirror, check_loggers
from linrnn.runs.picture import draw_progress
from linrnn.runs.summary import progress_line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(stream: io.StringIO, path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a run of 100 steps with a validation after step 50 prints, a step taking a second."""
    clock = iter(range(1000))
    monkeypatch.setattr(loggers.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    console = Console(path, every_seconds=30.0)
    for step in range(1, 101):
        console.progress(step, 100, f"loss {step}")
        if step == 50:
            console.line("valid")
    console.end_progress()
    console.line("the end")
    console.close()
    return stream.getvalue()


def test_on_a_terminal_one_line_moves_in_place(tmp_path, monkeypatch):
    text = printed(Terminal(), tmp_path / "log", monkeypatch)
    lines = text.split("\n")
    assert [line.rsplit("\r", 1)[-1].strip() for line in lines] == [
        "valid", lines[1].rsplit("\r", 1)[-1].strip(), "the end", "",
    ]  # fmt: skip
    assert lines[1].rsplit("\r", 1)[-1].startswith("100%|██████████| 100/100 | loss 100")
    assert text.count("\r") >= 100, "it moves at every step"
    assert all(len(part) < 60 for part in text.replace("\n", "\r").split("\r"))


def test_elsewhere_a_line_comes_every_thirty_seconds(tmp_path, monkeypatch):
    text = printed(io.StringIO(), tmp_path / "log", monkeypatch)
    steps = [line.split("/")[0] for line in text.splitlines() if line.startswith("step")]
    assert steps == ["step   1", "step  31", "step  61", "step  91", "step 100"]
    assert "\r" not in text
    assert len((tmp_path / "log").read_text().splitlines()) == 102, "the log has every line"


def test_a_progress_line_says_what_a_person_watches():
    line = progress_line(2.3456, 3e-3, 0.512, 12700.4, 0.41, 31.0)
    assert line == "loss 2.3456 | 12,700 tokens/s | 0:31 left | lr 3.0e-03 | grad norm 0.51 | MFU 41.0%"
    assert progress_line(2.0, 1e-3, 1.0, None, None, None) == "loss 2.0000 | warming up | lr 1.0e-03 | grad norm 1.00"


@pytest.mark.parametrize(("size", "words"), [(0, "0.00 KiB"), (10.3 * 2**20, "10.3 MiB"), (40.25 * GIB, "40.2 GiB")])
def test_a_size_is_written_in_the_unit_that_reads_best(size, words):
    assert size_in_words(size) == words


def test_a_busy_machine_is_named_and_what_helps_there(monkeypatch):
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 2)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (2.1, 0, 0))
    assert busy_with_others(2) is None, "its own threads"
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (3.4, 0, 0))
    assert "OMP_WAIT_POLICY=PASSIVE" in (busy_with_others(2) or "")
    assert "PASSIVE" not in (busy_with_others(1) or "PASSIVE"), "one thread waits for nobody"


@pytest.mark.parametrize(("busy", "threads", "policy"), [(0.6, None, "PASSIVE"), (0.4, None, None), (2.0, "1", None)])
def test_threads_sleep_while_they_wait_where_others_are_busy(busy, threads, policy, monkeypatch):
    monkeypatch.setattr(machine, "_seconds_of_others", lambda: machine.OTHERS_BEFORE + busy * 10)
    monkeypatch.setattr(machine, "seconds_since_start", lambda: 10.0)
    for name, value in (("OMP_WAIT_POLICY", None), ("OMP_NUM_THREADS", threads)):
        monkeypatch.delenv(name, raising=False)
        if value:
            monkeypatch.setenv(name, value)
    wait_asleep_if_busy()
    assert os.environ.pop("OMP_WAIT_POLICY", None) == policy


def test_the_time_of_others_is_the_busy_time_of_our_cores_without_our_own(monkeypatch):
    cores = ["cpu 0 0 0 0 0 0 0 0 0 0", "cpu0 100 20 30 5000 400 6 7 8 0 0", "cpu1 9000 0 0 0 0 0 0 0 0 0", "ctxt 1"]
    monkeypatch.setattr(machine.Path, "read_text", lambda *_, **__: "\n".join(cores))
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(machine.os, "sysconf", lambda _: 10)
    monkeypatch.setattr(machine.os, "times", lambda: (3.0, 1.5, 0.0, 0.0, 0.0))
    assert machine._seconds_of_others() == pytest.approx((100 + 20 + 30 + 6 + 7 + 8) / 10 - 4.5)


def test_a_run_ends_with_a_picture(tmp_path):
    records = [{"step": step, "train/loss_nats": 5 / step, "speed/tokens_per_second": 9.0} for step in range(1, 40)]
    draw_progress([*records, {"step": 39, "valid/loss_nats": 1.0, "train/loss_nats": None}], "run", tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.size == (800, 300)
        assert len(picture.convert("RGB").getcolors(100_000) or []) > 20, "not blank"


def test_tensorboard_is_refused_where_it_is_missing(monkeypatch):
    config = load_config(["logger=tensorboard", "logger.wandb.mode=disabled"]).logger
    assert config.tensorboard
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UnsupportedError, match=r"(?s)tensorboard=true: tensorboard.*linrnn\[tensorboard\]"):
        check_loggers(config)
    check_loggers(load_config(["logger.wandb.mode=disabled"]).logger)


def test_tensorboard_gets_every_metric_and_may_fail(tmp_path, monkeypatch):
    calls: list[Any] = []

    class Writer:
        def __init__(self, directory: str, purge_step: int) -> None:
            calls.append((directory, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            if step > 8:
                raise OSError("disk full")
            calls.append((name, value, step))

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    said: list[str] = []
    mirror = TensorboardMirror(tmp_path / "run", 7, said.append)
    mirror.log(8, {"train/loss_nats": 2.0, "speed/mfu": None})
    mirror.log(9, {"train/loss_nats": 1.0})
    mirror.log(10, {"train/loss_nats": 1.0})
    mirror.finish()
    assert calls == [(str(tmp_path / "run" / "tensorboard"), 8), ("train/loss_nats", 2.0, 8)]
    assert said[0] == f"TensorBoard: tensorboard --logdir {tmp_path}"
    assert [line for line in said[1:] if "disk full" in line] == said[1:]
    assert len(said) == 2
