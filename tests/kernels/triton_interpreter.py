"""Marks of the tests that run the Triton kernels on CPU tensors, in Triton's interpreter."""

import numpy as np
import pytest

triton = pytest.importorskip("triton")

BROKEN = triton.__version__ < "3.7" and np.lib.NumpyVersion(np.__version__) >= "2.4.0"
MARKS = [
    pytest.mark.interpreter,
    pytest.mark.skipif(BROKEN, reason="Triton 3.6's interpreter fails with numpy 2.4"),
]
