"""The arithmetic of metrics, and metrics.jsonl through kills, resumes and a full disk."""

import errno
import json
import math
from contextlib import closing
from types import SimpleNamespace
from unittest.mock import ANY, Mock

import pytest

from linrnn.core.errors import DataError, StorageError
from linrnn.runs.metrics import JsonlWriter, bits_per_byte, perplexity, read_jsonl


def write(path, *steps):
    with closing(JsonlWriter(path)) as writer:
        for step in steps:
            writer.write({"step": step, "train/loss_nats": float(step)})


def steps_in(path):
    return [record["step"] for record in read_jsonl(path)]


def test_perplexity_of_a_uniform_guess_is_the_vocabulary_size():
    assert perplexity(math.log(32000)) == pytest.approx(32000)
    assert perplexity(1e6) == math.inf
    assert math.isnan(perplexity(math.nan))


def test_bits_per_byte_of_a_uniform_byte_model_is_eight_whatever_the_tokenizer():
    assert bits_per_byte(math.log(256), 1) == pytest.approx(8)
    assert bits_per_byte(4 * math.log(256), 4) == pytest.approx(8)
    assert bits_per_byte(1.0, 0) is None


def test_a_record_can_be_read_as_soon_as_it_is_written(tmp_path):
    writer = JsonlWriter(tmp_path / "run" / "metrics.jsonl")
    writer.write({"step": 1, "train/loss_nats": 2.5, "loss/dropped_mass": 0.1, "train/tokens": 7})
    assert read_jsonl(writer.path) == [
        {"step": 1, "train/loss_nats": 2.5, "loss/dropped_mass": 0.1, "train/tokens": 7, "time": ANY}
    ]
    writer.close()
    writer.close()


def test_nan_and_infinity_become_null_in_strict_json(tmp_path):
    with closing(JsonlWriter(tmp_path / "metrics.jsonl")) as writer:
        writer.write({"step": 1, "train/loss_nats": math.nan, "valid/perplexity": math.inf, "speed/mfu": None})
    record = json.loads(writer.path.read_text(), parse_constant=pytest.fail)
    assert record == {"step": 1, "train/loss_nats": None, "valid/perplexity": None, "speed/mfu": None, "time": ANY}


@pytest.mark.parametrize("record", [{"step": 1, "train/los": 1.0}, {"train/loss_nats": 1.0}])
def test_an_unknown_name_or_a_missing_step_is_a_bug_and_says_so(tmp_path, record):
    with closing(JsonlWriter(tmp_path / "metrics.jsonl")) as writer, pytest.raises(ValueError, match=r"train/los|step"):
        writer.write(record)
    assert writer.path.read_text() == ""


@pytest.mark.parametrize("torn", [b'{"step": 3, "train/lo', b"\0" * 40])
def test_a_torn_last_line_is_dropped_and_the_next_record_is_whole(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2)
    with path.open("ab") as file:
        file.write(torn)
    assert steps_in(path) == [1, 2]
    write(path, 3)
    assert steps_in(path) == [1, 2, 3]


def test_every_possible_cut_of_the_file_leaves_a_prefix_of_its_records(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2, 3)
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        write(path, 9)
        assert steps_in(path) == [*range(1, whole[:cut].count(b"}") + 1), 9]


def test_truncating_after_a_step_leaves_no_step_twice_when_the_run_repeats_them(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2, 3, 4, 5)
    with closing(JsonlWriter(path)) as writer:
        writer.truncate_after(3)
        writer.write({"step": 4})
    assert steps_in(path) == [1, 2, 3, 4]
    with closing(JsonlWriter(path)) as writer:
        writer.truncate_after(0)
    assert steps_in(path) == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_the_last_validation_is_dropped_where_it_is_made_again(tmp_path):
    with closing(JsonlWriter(tmp_path / "metrics.jsonl")) as writer:
        for record in ({"step": 1, "valid/loss_nats": 2.0}, {"step": 2}, {"step": 2, "valid/loss_nats": 1.0}):
            writer.write(record)
        writer.truncate_after(2)
        assert steps_in(writer.path) == [1, 2, 2]
        writer.truncate_after(2, keep_validation=False)
    assert steps_in(writer.path) == [1, 2]


def test_a_corrupt_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(DataError, match="line 2"):
        read_jsonl(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_jsonl(tmp_path / "absent.jsonl")


def test_a_full_disk_is_a_storage_error_and_leaves_whole_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with closing(JsonlWriter(path)) as writer:
        writer.write({"step": 1})
        file = writer._file
        others = {name: getattr(file, name) for name in ("tell", "truncate", "close")}
        writer._file = SimpleNamespace(write=lambda data: file.write(data[:5]), **others)
        with pytest.raises(StorageError, match="no space"):
            writer.write({"step": 2})
        writer._file.write = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
        with pytest.raises(StorageError, match="No space left"):
            writer.write({"step": 2})
    assert steps_in(path) == [1]
    assert path.read_text().count("\n") == 1
