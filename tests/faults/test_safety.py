"""A run writes only into its own directory, no file has a secret, and nothing is unpickled."""

import json
import os
import secrets
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from fitting import fitted
from forked import run_script, start
from safetensors.torch import load_file

from linrnn.config import last_of_each, load_config
from linrnn.config.cli import one_line
from linrnn.core.checksums import write_checksums
from linrnn.core.errors import ConfigError, DataError, LinrnnError
from linrnn.training import checkpoint
from linrnn.training.trainer import Trainer

Small = Callable[..., list[str]]
VARIABLES = ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DATABASE_PASSWORD")


def _run_elsewhere(overrides: list[str], root: Path, environment: dict[str, str]) -> None:
    """Run in another process, with its own home, working directory and directory for temporary files."""
    unpickled: list[str] = []
    os.environ.update(environment)
    for name, variable in (("home", "HOME"), ("tmp", "TMPDIR"), ("cwd", None)):
        (root / name).mkdir(exist_ok=True)
        if variable:
            os.environ[variable] = str(root / name)
    tempfile.tempdir = None
    os.chdir(root / "cwd")
    sys.addaudithook(lambda event, given: unpickled.append(str(given)) if event == "pickle.find_class" else None)
    try:
        run_script("train.py", last_of_each(overrides), root / "log")
    finally:
        (root / "unpickled").write_text("\n".join(unpickled))


def test_files_secrets_and_pickles_of_a_run_that_is_continued(small, tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    environment = {name: secrets.token_hex(20) for name in VARIABLES}
    kept = [o for o in small() if not o.startswith(("logger.", "results_dir=", "data.cache_dir="))]
    overrides = [*kept, "trainer.checkpoint_every=1", "schedule.steps=4"]
    for steps, wandb in ((2, "disabled"), (4, "offline")):
        more = [f"trainer.max_steps={steps}", f"logger.wandb.mode={wandb}"]
        process = start(_run_elsewhere, [*overrides, *more], root, environment)
        process.join()
        assert process.exitcode == 0, (root / "log").read_text()
        assert (root / "unpickled").read_text() == ""
    assert "resuming at step 2" in (root / "log").read_text()
    ours = {root / "log", root / "unpickled"}
    files = [path for path in root.rglob("*") if path.is_file() and path not in ours]
    wandb_cache = root / "home/.cache/wandb"  # where its own process logs
    assert {path.relative_to(root).parts[0] for path in files if wandb_cache not in path.parents} == {"cwd"}, files
    assert {path.relative_to(root / "cwd").parts[0] for path in (root / "cwd").rglob("*")} == {"results", "data_cache"}
    names = {path.relative_to(root / "cwd/results").parts[:2] for path in files if "results" in path.parts}
    assert len(names) == 1, "everything lies in the run's directory"
    for path in [*files, *ours]:
        content = path.read_bytes()
        for name, value in environment.items():
            assert value.encode() not in content, f"{name} is in {path}"
            assert name == "WANDB_API_KEY" or name.encode() not in content, f"the environment is in {path}"


def test_a_secret_is_refused_as_a_value_and_scrubbed_from_what_is_said(small, monkeypatch, capsys):
    secret = secrets.token_hex(20)
    monkeypatch.setenv("WANDB_API_KEY", secret)
    for override in (f"logger.wandb.entity={secret}", f"data=text data.path=https://me:{secret}@host/x"):
        with pytest.raises(ConfigError, match="holds the value of WANDB_API_KEY") as error:
            load_config(override.split())
        assert secret not in str(error.value)
    assert one_line(f"no route to https://me:{secret}@host\n") == "no route to https://me:<WANDB_API_KEY>@host"
    trainer = Trainer(load_config(small()))
    fails = Mock(side_effect=RuntimeError(f"no route to https://me:{secret}@host"))
    monkeypatch.setattr(trainer, "_forward_backward", fails)
    monkeypatch.setattr(sys, "argv", ["train.py", f"key={secret}"])
    with pytest.raises(RuntimeError):
        trainer.fit()
    trainer.log.line(f"the key is {secret}")
    assert secret not in capsys.readouterr().out
    files = [path for path in trainer.directory.path.rglob("*") if path.is_file()]
    assert not [path for path in files if secret.encode() in path.read_bytes()]
    assert "<WANDB_API_KEY>" in json.loads((trainer.directory.path / "summary.json").read_text())["reason"]


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.fixture
def finished(small: Small) -> Path:
    trainer = fitted(small("schedule.steps=5"))
    return trainer.directory.path


def test_a_pickle_in_a_checkpoint_s_place_is_never_opened(finished, small, tmp_path):
    newest = checkpoint.found(finished / "checkpoints")[-1]
    [file] = newest.glob("*.safetensors")
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    torch.save({**tensors, "bomb": Bomb(tmp_path / "exploded")}, file)
    write_checksums(newest)  # sound, by its checksums
    with pytest.raises(LinrnnError) as error:
        Trainer(load_config(small("trainer.max_steps=5", "schedule.steps=5"))).fit()
    assert isinstance(error.value, DataError)
    assert str(newest) in error.value.cause
    with pytest.raises(DataError):
        Trainer(load_config(small(f"init_from={newest}", "group=other")))
    torch.save({"bomb": Bomb(tmp_path / "exploded")}, newest / "pytorch_model.bin")
    (newest / checkpoint.STATE).unlink()
    with pytest.raises(LinrnnError):
        Trainer(load_config(small(f"init_from={newest}", "group=other")))
    assert not (tmp_path / "exploded").exists()


def test_a_pickle_in_a_shard_s_place_is_never_opened(small, tmp_path):
    overrides = small(f"data.cache_dir={tmp_path}/data", "data.reset_at_document=true")
    directory = Trainer(load_config(overrides)).data.directory
    ends = directory / "train-00000.ends.npy"
    size = ends.stat().st_size
    np.save(ends, np.array([Bomb(tmp_path / "exploded")], dtype=object), allow_pickle=True)
    ends.write_bytes(ends.read_bytes().ljust(size, b"\0"))
    with pytest.raises(DataError, match="differs from its sha256"):
        Trainer(load_config(overrides))
    with pytest.raises((DataError, ValueError)):
        Trainer(load_config([*overrides, "data.verify=false"])).fit()
    assert not (tmp_path / "exploded").exists()
