"""Data that changed between two processes of a run is rejected before a step. The error names the file."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from linrnn.config import load_config
from linrnn.core.checksums import sha256
from linrnn.core.errors import DataError
from linrnn.data.shards import META, read_meta, write_meta
from linrnn.training.trainer import Trainer

Small = Callable[..., list[str]]
SHARD = "train-00000.bin"


@pytest.fixture
def started(small: Small, tmp_path: Path) -> tuple[list[str], Path]:
    """The overrides of a run that has made three steps on its own data, and that data's directory."""
    overrides = small(f"data.cache_dir={tmp_path}/data", "schedule.steps=5")
    trainer = Trainer(load_config(overrides))
    trainer.fit()
    return [*overrides, "trainer.max_steps=5"], trainer.data.directory


def flip_a_bit(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def test_an_altered_byte(started):
    overrides, directory = started
    flip_a_bit(directory / SHARD)
    with pytest.raises(DataError, match=rf"{SHARD} differs from its sha256") as error:
        Trainer(load_config(overrides))
    assert str(directory) in error.value.remedy
    assert Trainer(load_config([*overrides, "data.verify=false"])).fit()["steps"] == 5, "the hash alone tells"


def test_other_data_that_is_sound_in_itself(started):
    overrides, directory = started
    flip_a_bit(directory / SHARD)
    meta = read_meta(directory)
    del meta["fingerprint"]
    meta["splits"]["train"][0]["sha256"] = sha256(directory / SHARD)
    write_meta(directory, meta)
    assert json.loads((directory / META).read_text())["fingerprint"]
    trainer = Trainer(load_config(overrides))
    with pytest.raises(DataError, match="the checkpoint's data position has fingerprint="):
        trainer.fit()
