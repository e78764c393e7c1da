"""Names above 80 characters: as many choices as fit, then a hash of all choices. And paths that no system takes."""

import shlex
import sys
from pathlib import Path

import pytest

from linrnn.config import load_config, run_name
from linrnn.config.cli import run
from linrnn.runs.summary import names_of_run

LONG = ["trainer.batch_size=3", "trainer.seq_len=777", "optimizer.beta1=0.81", "optimizer.beta2=0.91"]
LONG += ["optimizer.weight_decay=0.123", "schedule.min_lr_ratio=0.2", "trainer.valid_tokens=4321"]


def test_a_long_name_keeps_the_words_that_fit_and_tells_runs_apart() -> None:
    names = [run_name(load_config([*LONG, f"optimizer.eps={eps}"])) for eps in ("1e-7", "1e-6")]
    assert len(set(names)) == 2
    for name in names:
        assert 60 < len(name) <= 80
        assert name.startswith("gla-smoke-cce_kahan-")
        assert "0.81" in name
        assert name.endswith("-s0")


def test_a_summary_lists_every_choice_as_overrides_that_make_the_run() -> None:
    config = load_config(LONG)
    choices = names_of_run(config, run_name(config), world_size=1)["choices"]
    assert load_config(shlex.split(choices)) == config


def test_a_path_too_long_for_the_file_system_is_no_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", f"data.cache_dir={'x' * 300}", "data=markov"])
    with pytest.raises(SystemExit, match="2"):
        run(lambda config: Path(config.data.cache_dir).stat())
    assert "is too long for the file system" in capsys.readouterr().err


def test_a_home_that_nobody_has_is_no_bug(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As with HOME unset in a container whose user has no entry."""
    monkeypatch.setattr(sys, "argv", ["train.py", "data=markov", "data.cache_dir=~nobody_at_all/x"])
    with pytest.raises(SystemExit, match="2"):
        run(lambda config: Path(config.data.cache_dir).expanduser())
    assert "set HOME" in capsys.readouterr().err
