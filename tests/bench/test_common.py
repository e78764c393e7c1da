"""What a benchmark's row says of a loss that failed, and rows that were cut off."""

import os
from dataclasses import dataclass

import pytest
import torch

from benchmarks.common import append_rows, last_rows, status_and_reason
from linrnn.core.errors import OutOfMemoryError, UnsupportedError


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
    found, reason = status_and_reason(error)
    assert found == status
    assert reason
    assert "\n" not in reason


@dataclass
class _Row:
    number: int


@pytest.mark.parametrize(("missing", "kept"), [(1, [1, 2]), (4, [1]), (14, [1])])
def test_a_row_that_was_cut_off_swallows_no_later_row(missing, kept, tmp_path):
    """A full disk or a kill cuts it off. A row that lacks its line end alone is whole."""
    append_rows(tmp_path, [_Row(1), _Row(2)])
    file = tmp_path / "rows.jsonl"
    os.truncate(file, file.stat().st_size - missing)

    def numbers() -> list[int]:
        return [row.number for row in last_rows(tmp_path, _Row, lambda row: row.number)]

    assert numbers() == kept
    append_rows(tmp_path, [_Row(3)])
    assert numbers() == [*kept, 3]
