"""`linrnn COMMAND`: the same as the scripts, with help, a version, and an answer to a wrong name."""

import subprocess
import sys
from pathlib import Path

import pytest

from linrnn.commands import COMMANDS
from linrnn.config.manual import WIDTH
from linrnn.core.output import as_started
from linrnn.runs import environment

ROOT = Path(__file__).resolve().parents[2]


def linrnn(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "linrnn", *arguments], capture_output=True, text=True, check=False)


def test_every_script_is_a_command_of_the_same_name():
    scripts = {path.stem: path for path in [*(ROOT / "scripts").glob("*.py"), ROOT / "train.py"]}
    assert scripts.keys() == COMMANDS.keys()
    for name, path in scripts.items():
        assert f'start("{name}")' in path.read_text()
    assert all(command.main.__doc__ for command in COMMANDS.values())


@pytest.mark.parametrize(
    ("arguments", "code", "printed"),
    [
        (["--version"], 0, "linrnn "),
        ([], 0, "find_max_batch"),
        (["trian", "model=gla"], 2, "-> linrnn train;"),
        (["model=gla"], 2, "-> linrnn train model=gla;"),
        (["train", "--model", "gla"], 2, "-> write model=gla"),
        (["sweep", "hydra.x=1", "--help"], 0, "usage: linrnn sweep "),
        (["breakdown", "--help"], 0, "warmup_steps: 3"),
        (["find_max_batch", "-h"], 0, "those of the runs: linrnn train --help"),
    ],
)
def test_what_the_program_answers(arguments, code, printed):
    done = linrnn(*arguments)
    assert done.returncode == code
    assert printed in done.stdout + done.stderr
    assert all(len(line) <= WIDTH for line in done.stdout.splitlines())


def test_printed_commands_are_of_the_kind_that_was_typed(monkeypatch):
    text = "python scripts/report.py group=x, or python train.py; scripts/maintain/diagrams.py"
    assert as_started(text) == text
    monkeypatch.setattr(sys, "argv", ["linrnn train", "model=gla"])
    assert as_started(text) == "linrnn report group=x, or linrnn train; scripts/maintain/diagrams.py"
    assert environment.command_line() == "linrnn train model=gla"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert environment.command_line() == "torchrun --nproc-per-node=2 -m linrnn train model=gla"
