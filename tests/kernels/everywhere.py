"""Tests of one file on CPU tensors, blockwise, then by the kernels in Triton's interpreter, and on a GPU.

The interpreter is switched on when Triton is first imported: a process of its own runs the file once more.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

HERE = os.environ.get("TRITON_INTERPRET") == "1"
not_in_interpreter = pytest.mark.skipif(HERE, reason="the interpreter is on: this file's tests run in place")
_ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=_ON_GPU)])


def run_in_interpreter(file: str) -> None:
    """The file's tests for CPU tensors, with TRITON_INTERPRET=1; fails where one of them does."""
    triton = pytest.importorskip("triton")
    if triton.__version__ < "3.7" and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("Triton 3.6's interpreter fails with numpy 2.4")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", "-m", "not gpu", file]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
