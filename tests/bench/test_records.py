"""What a benchmark's row says of a loss that failed."""

import pytest
import torch

from linrnn.bench.records import status_and_reason
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
def test_a_failure_has_one_status_in_all_benchmarks(error: Exception, status: str) -> None:
    found, reason = status_and_reason(error)
    assert found == status
    assert reason
    assert "\n" not in reason
