"""Files are written whole or not at all, and nobody writes one in place."""

import errno
import os
import re
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
from forked import start

from linrnn.core.files import whole_lines, write_text

SOURCE = Path(__file__).resolve().parents[2] / "src/linrnn"
# These write into directories of which nobody reads anything before they are renamed.
INTO_NEW_DIRECTORIES = {"core/checksums.py", "data/prepare.py", "inference/export.py", "training/checkpoint.py"}


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_or_ctrl_c_leaves_the_old_file_and_nothing_beside_it(tmp_path, monkeypatch, error, call):
    path = tmp_path / "runs.json"
    write_text(path, "old")

    with monkeypatch.context() as patched:
        patched.setattr(os, call, Mock(side_effect=error))
        with pytest.raises(type(error)):
            write_text(path, "new")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]


def _write_often(path: Path, letter: str) -> None:
    with patch("os.getpid", return_value=7):  # as on two hosts, or in two containers, that share a file system
        for length in range(1, 200):
            write_text(path, letter * 100 * length)
            assert len(set(path.read_text())) == 1


def test_two_processes_may_write_the_same_file_at_once(tmp_path):
    path = tmp_path / "report.md"
    writers = [start(_write_often, path, letter) for letter in "ab"]
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert path.read_text() in ("a" * 19900, "b" * 19900)
    assert [file.name for file in tmp_path.iterdir()] == ["report.md"]


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        (b"", b""),
        (b"[1]\n[2]\n", b"[1]\n[2]\n"),
        (b"[1]\n[2", b"[1]\n"),
        (b"[1]\n[2]", b"[1]\n[2]\n"),
        (b"[1]\n" + b"\0" * 9, b"[1]\n"),
        (b"[1]\n" + b"[" * 100000, b"[1]\n"),
        (b"[1\n[2]\nno\n", b"[1\n[2]\nno\n"),
    ],
    ids=["empty", "whole", "cut off", "without its end", "zeros", "nested deeply", "no JSON, but not cut off"],
)
def test_only_a_last_line_that_was_cut_off_is_left_out(content, kept):
    assert whole_lines(content) == kept


def test_no_module_writes_a_file_in_place():
    in_place = re.compile(r"(?<!self)(?<!directory)\.write_(text|bytes)\(|json\.dump\(")
    found = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if in_place.search(path.read_text())}
    assert found == INTO_NEW_DIRECTORIES
