"""The README names tests that there are, and its Python runs."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

import linrnn.config

ROOT = Path(__file__).resolve().parents[2]


def test_every_fault_in_the_readme_has_the_test_that_it_names() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "README.md").read_text())
    assert len(named) >= 12
    for file, test in named:
        assert f"def {test}(" in (ROOT / file).read_text(), f"{file}::{test}"


def test_the_readme_s_python_trains_and_its_next_lines_name_train_py(
    small: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [source] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    load_config = linrnn.config.load_config
    monkeypatch.setattr(linrnn.config, "load_config", lambda overrides: load_config([*overrides, *small()]))
    names: dict[str, object] = {}
    exec(source, names)
    summary = names["summary"]
    assert isinstance(summary, dict)
    assert summary["status"] == "finished"
    [line] = [line for line in capsys.readouterr().out.splitlines() if "another loss" in line]
    _, script, *overrides = shlex.split(line, comments=True)
    assert script == "train.py"
    assert overrides[-1] == "loss=standard", "the last override wins"
    assert load_config([*overrides[:-1], "loss=cce_kahan"]) == load_config(["loss=cce_kahan", *small()])
