"""The three ways to hold a gradient that is summed over chunks.

bf16    value in the gradient's own dtype, rounded at every chunk
kahan   value in the gradient's dtype and what its rounding lost beside it, in 8 bits: compensated summation that
        keeps 8 bits of mantissa more than the dtype has (16 for bf16), added in fp32 registers. What can be seen of
        it is one rounding to the value's dtype, at the end.
fp32    an fp32 tensor, rounded once at the end

An fp32 gradient is summed as it is: all three mean the same there. What was lost is an int8 in units of the value's
last place / 256 (here in torch; kahan.py has the same in Triton).
"""

from __future__ import annotations

import torch
from torch import Tensor


def value_dtype(dtype: torch.dtype, accumulate: str) -> torch.dtype:
    """What a gradient of `dtype` is summed in."""
    return torch.float32 if accumulate == "fp32" else dtype


def compensated(dtype: torch.dtype, accumulate: str) -> bool:
    """Whether what rounding lost is kept beside the value."""
    return accumulate == "kahan" and dtype != torch.float32


def scratch_bytes(dtype: torch.dtype | None, accumulate: str) -> int:
    """Bytes held per entry beyond the gradient itself, of `dtype` (None: not wanted)."""
    if dtype is None or dtype == torch.float32:
        return 0
    return {"kahan": 1, "fp32": 4, "bf16": 0}[accumulate]


EXPONENT_BITS = 0x7F800000  # of fp32; not every device has frexp


class Accumulator:
    """A sum of gradient parts of one shape: `value` and `lost` (None if nothing is kept beside it).

    Args:
        shape, dtype: of the gradient.
        lost_rows: how many leading rows are summed over chunks; None: all. The others come complete.
        value: memory for the sum, if it is of the right dtype; None: new.
    """

    def __init__(
        self, like: Tensor, shape: tuple[int, ...], dtype: torch.dtype, accumulate: str, lost_rows: int | None = None,
        value: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.dtype = dtype
        summed_in = value_dtype(dtype, accumulate)
        if value is None or value.dtype != summed_in:
            value = like.new_empty(shape, dtype=summed_in)
        self.value = value
        lost_shape = shape if lost_rows is None else (lost_rows, *shape[1:])
        self.lost = like.new_empty(lost_shape, dtype=torch.int8) if compensated(dtype, accumulate) else None
        self.empty = True

    def add(self, part: Tensor) -> None:
        """Add an fp32 part, in torch."""
        total = part if self.empty else part.add_(self.value)
        if self.lost is None:
            self.value.copy_(total)
        else:
            if not self.empty:
                total += self.lost * _unit(self.value)
            self.value.copy_(total)
            self.lost.copy_(total.sub_(self.value).div_(_unit(self.value)).round_().clamp_(-128, 127))
        self.empty = False

    def result(self) -> Tensor:
        """The sum in the gradient's dtype."""
        return self.value.to(self.dtype)


def _unit(value: Tensor) -> Tensor:
    """The unit of `lost`, fp32: 1 / 256 of the value's last place."""
    info = torch.finfo(value.dtype)
    size = value.float().abs().clamp(min=info.tiny)
    power = (size.view(torch.int32) & EXPONENT_BITS).view(torch.float32)  # 2^n <= |value| < 2^(n + 1)
    return power * (info.eps / 256)
