"""The filter's statistics in one launch; rule.filter_figures takes some thirty operations of torch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..runtime.launch import quick

BLOCK = 8192
DIGIT = 8  # bits of the percentile's 32 that one pass determines


@quick
@triton.jit(do_not_specialize=["N", "V"])
def figures_kernel(
    kept_ptr,  # (N,) fp32, each row's number of entries kept
    dropped_ptr,  # (N,) fp32, each row's softmax mass dropped
    exact_ptr,  # () bool or int32, whether the call is exact; None: it is
    counts_ptr,  # (N,) fp32, not 0 for rows that count
    values_ptr,  # (5,) fp32, the figures of FilterStats.NAMES, written
    N,
    V,
    BLOCK: tl.constexpr,
    DIGIT: tl.constexpr,
):
    """One program: sums and maximum in a first pass, then the percentile by a radix selection, upper bits first.

    Non-negative floats have the order of their bits, with NaN last.
    """
    exact = tl.full((), 1, dtype=tl.int32)
    if exact_ptr is not None:
        exact = tl.load(exact_ptr).to(tl.int32)
    n_rows = tl.zeros((BLOCK,), dtype=tl.int32)
    kept = tl.zeros((BLOCK,), dtype=tl.float64)
    mass = tl.zeros((BLOCK,), dtype=tl.float64)
    largest = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(0, N, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        counts = tl.load(counts_ptr + rows, mask=rows < N, other=0.0) != 0
        m = _mass(dropped_ptr, counts_ptr, rows, N, exact)
        k = tl.load(kept_ptr + rows, mask=rows < N, other=0.0)
        k = tl.where(exact != 0, V, k)
        n_rows += counts.to(tl.int32)
        kept += tl.where(counts, k, 0.0).to(tl.float64)
        mass += m.to(tl.float64)
        largest = tl.maximum(largest, m.to(tl.int32, bitcast=True))
    counted = tl.maximum(tl.sum(n_rows, axis=0), 1)
    tl.store(values_ptr, (tl.sum(kept, axis=0) / V / counted).to(tl.float32))
    tl.store(values_ptr + 1, (tl.sum(mass, axis=0) / counted).to(tl.float32))
    tl.store(values_ptr + 3, tl.max(largest, axis=0).to(tl.float32, bitcast=True))
    tl.store(values_ptr + 4, exact.to(tl.float32))

    left = (counted - 1) // 100 + 1  # the percentile is the left-th largest
    known = tl.zeros((), dtype=tl.int32)  # the percentile's upper bits found so far
    digits = tl.arange(0, 1 << DIGIT)
    for i in range(32 // DIGIT):  # not unrolled, which would compile four times as long
        shift = 32 - DIGIT * (i + 1)
        numbers = tl.zeros((1 << DIGIT,), dtype=tl.int32)
        for first in range(0, N, BLOCK):
            rows = first + tl.arange(0, BLOCK)
            bits = _mass(dropped_ptr, counts_ptr, rows, N, exact).to(tl.int32, bitcast=True)
            upper = bits >> shift
            among = (rows < N) & ((upper >> DIGIT) == known)
            numbers += tl.histogram(upper & ((1 << DIGIT) - 1), 1 << DIGIT, mask=among)
        as_large = tl.cumsum(numbers, axis=0, reverse=True)
        digit = tl.max(tl.where(as_large >= left, digits, 0), axis=0)
        left -= tl.sum(tl.where(digits > digit, numbers, 0), axis=0)
        known = (known << DIGIT) | digit
    tl.store(values_ptr + 2, known.to(tl.float32, bitcast=True))


@triton.jit
def _mass(dropped_ptr, counts_ptr, rows, N, exact):
    """The mass that each row dropped; 0 for rows that do not count. NaN stays NaN, with a positive sign bit."""
    counts = tl.load(counts_ptr + rows, mask=rows < N, other=0.0) != 0
    dropped = tl.load(dropped_ptr + rows, mask=rows < N, other=0.0)
    return tl.where(counts & (exact == 0) & ~(dropped <= 0), tl.abs(dropped), 0.0)


def filter_figures(
    values: Tensor, kept: Tensor, dropped: Tensor, exact: Tensor | None, counts: Tensor, vocab: int
) -> None:
    """The same as `rule.filter_figures`."""
    figures_kernel[(1,)](kept, dropped, exact, counts, values, kept.shape[0], vocab, BLOCK, DIGIT, num_warps=16)
