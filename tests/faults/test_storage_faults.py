"""A disk that fills up."""

import json
import shutil
from pathlib import Path

import pytest
import small_disk
from fitting import fitted
from forked import run_script, start
from rank_process import curve

from linrnn.config import load_config
from linrnn.core.errors import DivergedError, StorageError
from linrnn.runs.directory import SUMMARY, RunDirectory
from linrnn.training.checkpoint import found
from linrnn.training.trainer import StepRecord, Trainer


def _fill_and_free(overrides: list[str], disk: Path, kept: Path) -> None:
    """In another process: a run on a disk that other files fill up at the third step, and that has room again later.

    At that step the disk has room for two checkpoints, not for three.
    """
    small_disk.mount(disk, "24m")
    step = Trainer.train_step

    def filling(self: Trainer) -> StepRecord:
        if self.step == 2:
            (disk / "others").write_bytes(bytes(10 << 20))
        return step(self)

    Trainer.train_step = filling  # type: ignore[method-assign]
    for attempt, room in enumerate(("24m", "64m")):
        small_disk.resize(disk, room)
        try:
            run_script("train.py", overrides, kept / f"log{attempt}")
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        (kept / f"code{attempt}").write_text(str(code))
        shutil.copytree(disk, kept / f"attempt{attempt}")


def test_a_disk_that_fills_up_ends_the_run_and_with_more_room_it_goes_on(small, tmp_path):
    options = ("trainer.max_steps=6", "trainer.checkpoint_every=1", "run_name=run")
    whole = fitted(small(*options))
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    kept.mkdir()
    overrides = [o for o in small(*options) if not o.startswith("results_dir=")]
    process = start(_fill_and_free, [*overrides, f"results_dir={disk}"], disk, kept)
    small_disk.end(process)
    full, finished = (kept / f"attempt{n}/default/run" for n in (0, 1))
    log = (kept / "log0").read_text()
    assert (kept / "code0").read_text() == "7", log
    assert "error: checkpoint of step 3 was not written" in log
    assert "No space left" in log
    assert [path.name for path in found(full / "checkpoints")] == ["step_00000001", "step_00000002"]
    assert len(list((full / "checkpoints").iterdir())) == 2, "no half-written checkpoint"
    assert curve(full).items() <= curve(whole.directory.path).items(), "metrics hold whole lines"
    assert json.loads((full / SUMMARY).read_text())["status"] == "failed"
    assert (kept / "code1").read_text() == "0", (kept / "log1").read_text()
    assert json.loads((finished / SUMMARY).read_text())["status"] == "finished"
    assert list(curve(finished)) == [1, 2, 3, 4, 5, 6]


def test_a_log_that_cannot_be_written_stops_no_run(small, capsys):
    trainer = Trainer(load_config(small()))
    trainer.directory.path.mkdir(parents=True)
    (trainer.directory.path / "train.log").symlink_to("/dev/full")
    assert trainer.fit()["status"] == "finished"
    assert capsys.readouterr().out.count("train.log is given up (No space left") == 1


def test_a_summary_that_cannot_be_written_does_not_hide_why_a_run_ended(small, monkeypatch):
    write = RunDirectory.write_json

    def full(self: RunDirectory, name: str, content: dict[str, object]) -> None:
        if name == SUMMARY:
            raise StorageError("No space left", "free space")
        write(self, name, content)

    monkeypatch.setattr(RunDirectory, "write_json", full)
    with pytest.raises(StorageError, match="No space left"):
        Trainer(load_config(small())).fit()
    diverging = small("trainer.max_steps=40", "optimizer.lr=1e30", "optimizer.max_grad_norm=null")
    with pytest.raises(DivergedError):
        Trainer(load_config(diverging)).fit()
