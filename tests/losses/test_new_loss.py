"""A new loss is one file and one import line: the example of docs/extending.md, on a command line and in a package."""

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from linrnn.config import load_config, overrides_of, read_config, run_name
from linrnn.config.cli import help_text
from linrnn.core.errors import ConfigError
from linrnn.costs import loss_memory
from linrnn.losses import loss_names
from linrnn.training.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def source() -> str:
    """The example's file."""
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    [source] = [
        block for block in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL) if "@register" in block
    ]
    return source


def test_one_file_and_one_word_make_a_loss_of_the_command_line(source, tmp_path):
    for folder in ("src", "configs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "train.py", tmp_path)
    losses = tmp_path / "src" / "linrnn" / "losses"
    (losses / "chunked.py").write_text(source, encoding="utf-8")
    init = (losses / "__init__.py").read_text(encoding="utf-8")
    assert init.count("import cce, cce_apple, fla") == 1
    (losses / "__init__.py").write_text(init.replace("cce_apple, fla", "cce_apple, chunked, fla"), encoding="utf-8")
    command = [sys.executable, "train.py", "loss=chunked", "--help"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert re.search(r"^rows: 1024 +# rows whose", done.stdout, re.MULTILINE)


@pytest.mark.usefixtures("new_losses")
def test_a_loss_of_another_package_trains_three_steps_as_the_standard_one(source, small, tmp_path, monkeypatch):
    (tmp_path / "package" / "my_losses").mkdir(parents=True)
    (tmp_path / "package" / "my_losses" / "__init__.py").touch()
    (tmp_path / "package" / "my_losses" / "chunked.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path / "package")
    with pytest.raises(ConfigError, match="there is no such loss"):
        load_config(["loss=chunked"])
    importlib.import_module("my_losses.chunked")
    assert loss_names()[-1] == "chunked"

    config = load_config(small("loss=chunked", "loss.rows=50"))
    summary = Trainer(config).fit()
    standard = Trainer(load_config(small("loss=standard"))).fit()
    assert (summary["loss"], summary["steps"]) == ("chunked", 3)
    assert summary["train_loss_nats"] == pytest.approx(standard["train_loss_nats"], abs=1e-5)
    assert summary["loss_options"] == {"rows": 50}

    [saved] = (tmp_path / "results" / "default").glob("gla-smoke-chunked-*/config.yaml")
    assert read_config(saved) == config
    assert "rows_50" in run_name(config)
    assert {"loss=chunked", "loss.rows=50"} <= set(overrides_of(config))
    assert loss_memory(config.loss, 10, 4, 100, 2) == (6000, 6000 + 110 * 4 * 2)
    assert re.search(r"^rows: 1024 +# rows whose", help_text("train", "", ["loss=chunked"]), re.MULTILINE)
    for override, message in (("loss.rows=0", "loss.rows=0 is below"), ("loss.row=5", "nearest: loss.rows")):
        with pytest.raises(ConfigError, match=message):
            load_config(["loss=chunked", override])


@pytest.mark.usefixtures("new_losses")
def test_a_name_that_another_file_has_is_refused(source, tmp_path, monkeypatch):
    (tmp_path / "stolen_name.py").write_text(source.replace('"chunked"', '"standard"'), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="loss=standard is registered already"):
        importlib.import_module("stolen_name")
