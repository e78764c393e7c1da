"""The softcap of the logits and its derivative, in Triton.

    z = softcap · tanh(x / softcap)        slope = dz / dx = 1 − (z / softcap)²

backends/in_torch.py has both in torch.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softcapped(x, softcap):
    """The softcap of fp32 logits x."""
    return softcap * _tanh(x / softcap)


@triton.jit
def softcap_slope(z, softcap):
    """The softcap's derivative, from the capped logits z."""
    return 1 - (z / softcap) * (z / softcap)


@triton.jit
def _tanh(x):
    """tanh in fp32 to about one rounding. Near 0 the quotient of exponentials cancels, so a series takes its place."""
    size = tl.abs(x)
    decay = tl.exp(-2 * size)
    quotient = (1 - decay) / (1 + decay)
    square = x * x
    series = x * (1 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315))))
    return tl.where(size < 0.2, series, tl.where(x < 0, -quotient, quotient))
