"""Checkpoints: complete or absent, without pickle, readable by every model that they fit."""

import errno
import itertools
import os
import shutil
import stat
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from linrnn.core.checksums import CHECKSUMS
from linrnn.core.errors import ConfigError, DataError, StorageError
from linrnn.training import checkpoint


def build(width: int = 6) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small model with a tied parameter and a bf16 one, after two steps of AdamW."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4, bias=False), nn.Linear(4, 4))
    model[2].weight = model[1].weight if width == 4 else model[2].weight
    model[2].bias.data = model[2].bias.data.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for number, parameter in enumerate(model.parameters(), start=1):
        parameter.grad = torch.full_like(parameter, 0.1 * number)
    optimizer.step()


def progress(number: int) -> checkpoint.Progress:
    return checkpoint.Progress(
        run="default/run",
        step=number,
        tokens=100 * number,
        data={"rows": 8 * number},
        recent_losses=[3.0, 2.5],
        token_fingerprint="f00d",
    )


def saved(root: Path, *steps: int, keep: int = 9) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = build()
    saver = checkpoint.Checkpointer(root, keep)
    for number in steps:
        saver.save(progress(number), model, optimizer, "seed: 0\n")
    saver.wait()
    return model, optimizer


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {**checkpoint.model_tensors(model), **checkpoint.optimizer_tensors(model, optimizer)}


def test_model_optimizer_progress_and_generators_come_back(tmp_path):
    model, optimizer = saved(tmp_path, 7)
    drawn = torch.rand(3)
    torch.manual_seed(99)
    [path] = checkpoint.found(tmp_path)
    other, other_optimizer = restored(path)
    assert checkpoint.read_progress(path) == progress(7)
    assert_equal(values(other, other_optimizer), values(model, optimizer))
    assert torch.equal(torch.rand(3), drawn)
    step(model, optimizer)
    step(other, other_optimizer)
    assert_equal(values(other, other_optimizer), values(model, optimizer))


def test_what_is_written_is_what_was_there_when_it_began(tmp_path, monkeypatch):
    """Training continues while a checkpoint is written."""
    model, optimizer = build()
    expected = {name: tensor.clone() for name, tensor in values(model, optimizer).items()}
    may_write, original = threading.Event(), checkpoint.write

    def slowly(*arguments: object) -> None:
        may_write.wait()
        original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint, "write", slowly)
    saver = checkpoint.Checkpointer(tmp_path, keep=2)
    saver.save(progress(1), model, optimizer, "")
    step(model, optimizer)
    assert checkpoint.found(tmp_path) == [], "it is not there before it is whole"
    may_write.set()
    saver.wait()
    other, other_optimizer = restored(checkpoint.found(tmp_path)[0])
    assert_equal(values(other, other_optimizer), expected)
    assert not torch.equal(next(model.parameters()), next(other.parameters()))


def test_the_newest_are_kept_and_a_killed_one_is_removed(tmp_path):
    (tmp_path / "step_00000009.partial/tensors").mkdir(parents=True)
    (tmp_path / "step_00000009.partial" / checkpoint.STATE).write_text("{}")
    saved(tmp_path, 1, 2, 3, 4, keep=2)
    assert [path.name for path in checkpoint.found(tmp_path)] == ["step_00000003", "step_00000004"]
    copy = shutil.copytree(tmp_path / "step_00000004", tmp_path / "step_00000004.mine")
    (tmp_path / "step_00000004" / checkpoint.STATE).unlink()  # as one that was being deleted
    checkpoint.Checkpointer(tmp_path, keep=2).begin(3)
    assert {path.name for path in tmp_path.iterdir()} == {"step_00000003", copy.name}, "a user's copy stays"
    saved(tmp_path, 4, keep=2)
    assert checkpoint.newest(tmp_path) == tmp_path / "step_00000004"


def test_a_part_that_another_machine_keeps_to_itself_makes_no_checkpoint(tmp_path, monkeypatch):
    away, finish = "shard-00002-model-00001-of-00001.safetensors", checkpoint.Writer.finish
    other = SimpleNamespace(storage_data=SimpleNamespace(relative_path=away))
    monkeypatch.setattr(
        checkpoint.Writer, "finish", lambda self, metadata, results: finish(self, metadata, [*results, [other]])
    )
    with pytest.raises(StorageError, match=f"{away} of another rank is not in"):
        saved(tmp_path, 1)
    assert not list(tmp_path.iterdir())


def restored(path: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model whose own state was another."""
    model, optimizer = build()
    step(model, optimizer)
    checkpoint.load(path, model, optimizer)
    return model, optimizer


def assert_equal(there: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert there.keys() == expected.keys()
    assert all(torch.equal(there[n], expected[n]) and there[n].dtype == expected[n].dtype for n in there)


def test_large_states_are_cut_into_files_that_fit_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 200)
    expected = values(*saved(tmp_path, 1))
    [path] = checkpoint.found(tmp_path)
    assert len(list(path.glob("*.safetensors"))) > 3
    assert_equal(values(*restored(path)), expected)


def test_every_cut_and_every_flipped_bit_is_found_and_the_one_before_is_used(tmp_path, capsys):
    saved(tmp_path, 1, 2)
    first, second = checkpoint.found(tmp_path)
    names = sorted(path.name for path in second.iterdir())
    assert len(names) == 4
    for name, damage in itertools.product(names, ("cut", "flip", "remove", "empty")):
        path = second / name
        whole = path.read_bytes()
        middle = len(whole) // 2
        if damage == "remove":
            path.unlink()
        elif damage == "flip":
            path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
        else:
            path.write_bytes(whole[:-2] if damage == "cut" else b"")
        assert checkpoint.newest(tmp_path) == first, (name, damage)
        if (name, damage) != (checkpoint.STATE, "remove"):  # without it, it is no checkpoint
            said = f"{second}: " if name == CHECKSUMS else f"{second}: {second / name} "
            assert f"skipping {said}" in capsys.readouterr().out, (name, damage)
        path.write_bytes(whole)
    (second / ".config.yaml.swp").write_bytes(b"")
    assert checkpoint.newest(tmp_path) == second, "nobody reads what an editor left"
    (second / "more.safetensors").write_bytes(b"")
    assert checkpoint.newest(tmp_path) == first, "a file that was not written with it is read by nobody"


def test_a_checkpoint_that_cannot_be_read_now_is_not_taken_for_damaged(tmp_path, monkeypatch):
    """As on a network file system that is away for a moment: the run would go on from the one before, and delete it."""
    saved(tmp_path, 1, 2)

    def away(path: Path) -> str:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("linrnn.core.checksums.sha256", away)
        with pytest.raises(StorageError, match=r"step_00000002 cannot be read \(Input/output error"):
            checkpoint.newest(tmp_path)
    assert checkpoint.newest(tmp_path) == tmp_path / "step_00000002"


def test_a_failure_is_raised_where_somebody_waits_and_leaves_nothing(tmp_path, monkeypatch):
    model, optimizer = build()
    saver = checkpoint.Checkpointer(tmp_path, keep=2)
    saver.save(progress(1), model, optimizer, "")
    saver.wait()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
        saver.save(progress(2), model, optimizer, "")
        with pytest.raises(StorageError, match=r"checkpoint of step 2 was not written .*No space left"):
            saver.save(progress(3), model, optimizer, "")
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    saver.save(progress(4), model, optimizer, "")
    saver.wait()
    assert checkpoint.newest(tmp_path) == tmp_path / "step_00000004"


def test_every_file_is_flushed_before_the_checkpoint_gets_its_name(tmp_path, monkeypatch):
    """Also on a file system that cannot flush a directory."""
    done: list[str] = []
    rename, sync, flush = Path.rename, checkpoint.sync, os.fsync

    def refuses_directories(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", refuses_directories)
    monkeypatch.setattr(checkpoint, "sync", lambda path: (done.append(path.name), sync(path)))
    monkeypatch.setattr(Path, "rename", lambda self, target: (done.append("renamed"), rename(self, target))[1])
    saved(tmp_path, 1)
    [path] = checkpoint.found(tmp_path)
    assert {file.name for file in path.rglob("*")} <= set(done[: done.index("renamed")])


def test_another_model_is_refused_by_name_and_shape(tmp_path):
    saved(tmp_path, 1)
    with pytest.raises(ConfigError, match=r"0.bias is \(6,\) in the checkpoint and \(5,\) in this model"):
        checkpoint.load_model(checkpoint.found(tmp_path)[0], build(5)[0])


def test_there_is_no_pickle_in_a_checkpoint_and_none_is_read(tmp_path):
    saved(tmp_path, 1)
    [path] = checkpoint.found(tmp_path)
    suffixes = {file.suffix for file in path.rglob("*") if file.is_file()}
    assert suffixes == {".safetensors", ".json", ".yaml", ""}, "DCP's own format would have a pickled .metadata"
    for file in path.glob("*.safetensors"):
        file.write_bytes(b"\x80\x04cos\nsystem\n.")
    model, optimizer = build()
    with pytest.raises(DataError, match="cannot be read as safetensors"):
        checkpoint.load(path, model, optimizer)
