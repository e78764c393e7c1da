"""scripts/check_recurrence.py prints the comparison, and its exit code says whether the two agree."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from linrnn.experiments import recurrence
from linrnn.experiments.recurrence import Agreement
from linrnn.training import runtime

SCRIPT = str(Path(__file__).resolve().parents[2] / "scripts" / "check_recurrence.py")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, float]], int]:
    """The exit code of the command on a machine whose GPU has these errors."""

    def call(errors: dict[str, float]) -> int:
        monkeypatch.setattr(sys, "argv", [SCRIPT, "model=kda"])
        monkeypatch.setattr(runtime, "resolve_device", lambda name: torch.device("cuda"))
        monkeypatch.setattr(recurrence, "measure", lambda config, device: Agreement("kda smoke on a GPU", errors))
        try:
            runpy.run_path(SCRIPT, run_name="__main__")
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    return call


def test_an_agreement_is_printed(run, capsys):
    assert run({"output": 0.002, "gradient of k": 0.004}) == 0
    assert "| gradient of k | 4.0e-03 | yes |" in capsys.readouterr().out


def test_a_wrong_gradient_ends_the_command_with_an_error(run, capsys):
    assert run({"output": 0.002, "gradient of k": 0.5}) == 4
    out, err = capsys.readouterr()
    assert "| gradient of k | 5.0e-01 | **no** |" in out
    assert "FLA's kernels compute something else than plain torch here" in err


def test_a_cpu_has_nothing_to_compare(command):
    ended = command("scripts/check_recurrence.py", "model=gla", "device=cpu")
    assert ended.returncode == 4
    assert "there is no kernel to compare" in ended.stderr
