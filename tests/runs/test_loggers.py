"""What the mirror in wandb receives, with a stand-in for wandb."""

from pathlib import Path
from typing import Any

import pytest

from linrnn.config.schema import WandbConfig
from linrnn.runs import loggers
from linrnn.runs.loggers import WandbMirror

RECORD = {"step": 3, "time": "now", "train/loss_nats": 2.0, "speed/mfu": None}


class FakeRun:
    """Keeps what is logged. It can fail, as wandb does when its own process dies."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.summary: dict[str, Any] = {}
        self.fails = False

    def log(self, metrics: dict[str, Any], step: int) -> None:
        if self.fails:
            raise BrokenPipeError("wandb is gone")
        self.logged.append((step, metrics))

    def finish(self, exit_code: int) -> None:
        pass


def mirror(directory: Path, mode: str = "offline") -> WandbMirror:
    config = WandbConfig(mode=mode, project="p", entity=None, tags=["own"])
    return WandbMirror(config, directory, history=lambda: [RECORD], say=lambda line: None, tags=["gla"])


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, FakeRun]]:
    """The runs that are opened, each with its mode."""
    runs: list[tuple[str, FakeRun]] = []

    def open_run(self: WandbMirror, mode: str, run_id: str) -> FakeRun:
        runs.append((mode, FakeRun()))
        return runs[-1][1]

    monkeypatch.setattr(WandbMirror, "_open", open_run)
    monkeypatch.setattr(loggers, "_end_service", lambda: None)
    return runs


def test_no_none_reaches_wandb_not_even_when_a_run_is_recorded_anew(opened, tmp_path):
    lost = mirror(tmp_path)
    lost.log(3, {"train/loss_nats": 2.0, "speed/mfu": None})
    opened[0][1].fails = True
    lost.log(4, {"train/loss_nats": 1.0})
    lost.finish({}, 0)
    assert [run.logged for _, run in opened] == [[(3, {"train/loss_nats": 2.0})]] * 2


@pytest.mark.parametrize(
    ("configured", "asked", "modes"),
    [("auto", "offline", ["offline"]), ("auto", "disabled", []), ("offline", "disabled", ["offline"])],
)
def test_wandbs_own_variable_decides_where_the_mode_is_auto(configured, asked, modes, opened, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", asked)
    monkeypatch.setattr(loggers, "has_wandb_key", lambda: True)
    mirror(tmp_path, configured)
    assert [mode for mode, _ in opened] == modes
