"""Compensated sums in Triton: a value in 16 bits and its rounding error (`lost`) in 8 bits. See accumulator.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def read_sum(value_ptrs, lost_ptrs, mask):
    """The sum so far in fp32: value plus rounding error. lost_ptrs may be None."""
    value = tl.load(value_ptrs, mask=mask, other=0.0)
    total = value.to(tl.float32)
    if lost_ptrs is not None:
        total += tl.load(lost_ptrs, mask=mask, other=0).to(tl.float32) * _unit(total, value.dtype)
    return total


@triton.jit
def write_sum(total, value_ptrs, lost_ptrs, mask):
    """Store a sum rounded, and its rounding error unless lost_ptrs is None."""
    rounded = total.to(value_ptrs.dtype.element_ty)
    tl.store(value_ptrs, rounded, mask=mask)
    if lost_ptrs is not None:
        value = rounded.to(tl.float32)
        lost = tl.floor((total - value) / _unit(value, rounded.dtype) + 0.5)
        tl.store(lost_ptrs, tl.clamp(lost, -128.0, 127.0).to(tl.int8), mask=mask)


@triton.jit
def _unit(value, dtype: tl.constexpr):
    """The unit of the rounding error, fp32: 1 / 256 of the last place of a bf16 or fp16 `value`, given in fp32."""
    power = (value.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)  # 2^exponent
    if dtype == tl.float16:
        unit = tl.maximum(power, 2.0**-14) * 2.0**-18  # 10 bits of mantissa and 8 more
    else:
        unit = tl.maximum(power, 2.0**-110) * 2.0**-15  # 7 bits of mantissa and 8 more; stays above fp32's denormals
    return unit
