"""Marks of the tests that run the Triton kernels on CPU tensors, in Triton's interpreter."""

import numpy as np
import pytest

try:
    import triton
except ImportError:
    triton = None

BROKEN = triton is not None and triton.__version__ < "3.7" and np.lib.NumpyVersion(np.__version__) >= "2.4.0"
MARKS = [
    pytest.mark.interpreter,
    pytest.mark.skipif(triton is None, reason="Triton is not installed"),
    pytest.mark.skipif(BROKEN, reason="Triton 3.6's interpreter fails with numpy 2.4"),
]
