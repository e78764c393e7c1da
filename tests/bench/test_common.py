"""What a benchmark's row says of a loss that failed, and that its files stay whole."""

import os
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from benchmarks.common import ROWS, Keys, Record, attempt, bars, last_rows
from linrnn.core.errors import DataError, OutOfMemoryError, UnsupportedError


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UnsupportedError("needs a GPU", "use one"), "unsupported"),
        (OutOfMemoryError("the step does not fit", "use less"), "out_of_memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"), "out_of_memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), "out_of_memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."), "out_of_memory"),
        (RuntimeError("shapes differ"), "failed"),
    ],
)
def test_a_failure_has_one_status_in_all_benchmarks(error, status):
    def fail() -> None:
        raise error

    row = SimpleNamespace()
    assert not attempt(row, torch.device("cpu"), fail)
    assert row.status == status
    assert row.reason
    assert "\n" not in row.reason


@dataclass
class Row:
    name: str
    ms: int = 0


@pytest.mark.parametrize("line", ['{"name": "a", "valu\n', "3", '{"shape": "a"}'])
def test_a_damaged_line_is_refused(line, tmp_path):
    (tmp_path / "rows.jsonl").write_text(line)
    with pytest.raises(DataError, match="has a line that is none"):
        last_rows(tmp_path, Row, str)


@pytest.mark.parametrize(("missing", "kept"), [(1, "ab"), (4, "a")])
def test_a_row_that_was_cut_off_swallows_no_later_row(missing, kept, tmp_path):
    """A full disk or a kill cuts it off. A row that lacks its line end alone is whole."""
    record = Record(Keys(device="cpu", output_dir=str(tmp_path)), "bench")
    record.add(Row("a"), Row("b"))
    os.truncate(tmp_path / ROWS, (tmp_path / ROWS).stat().st_size - missing)
    record.add(Row("c"))
    assert [row.name for row in last_rows(tmp_path, Row, key=lambda row: row.name)] == [*kept, "c"]


def test_the_last_row_of_a_key_counts_and_fields_of_older_rows_are_left_out(tmp_path):
    lines = ['{"name": "a", "watts": 3}', '{"name": "b"}', '{"name": "a", "ms": 2}']
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    assert last_rows(tmp_path, Row, key=lambda row: row.name) == [Row("a", 2), Row("b")]


def test_a_picture_leaves_room_for_a_model_that_no_loss_ran():
    bars({"ms a step": (".0f", {"llama": {"standard": 3.0}, "gemma2": {}})}, "Steps")
