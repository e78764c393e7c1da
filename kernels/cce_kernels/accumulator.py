"""A gradient that is summed over chunks, in one of three precisions (`accumulate`).

bf16    the value in the gradient's own dtype, rounded at every chunk
kahan   compensated summation: the value in the gradient's own dtype, and its rounding error (`lost`) in 8 bits. The sum
        keeps 8 more bits of mantissa than the dtype has (16 for bf16). Additions run in fp32 registers. The result has
        one visible rounding, at the end.
fp32    an fp32 tensor, rounded once at the end

An fp32 gradient is summed in fp32 in all three cases. `lost` is int8 in units of 1 / 256 of the value's last place.
This file holds the arithmetic in torch, triton/kahan.py in Triton.
"""

from __future__ import annotations

import torch
from torch import Tensor


def compensated(dtype: torch.dtype, accumulate: str) -> bool:
    """Whether the sum keeps its rounding error beside the value."""
    return accumulate == "kahan" and dtype != torch.float32


def scratch_bytes(dtype: torch.dtype | None, accumulate: str) -> int:
    """Bytes per entry beyond the gradient itself; dtype is the gradient's, or None if it is not wanted."""
    if dtype is None or dtype == torch.float32:
        return 0
    return {"kahan": 1, "fp32": 4, "bf16": 0}[accumulate]


EXPONENT_BITS = 0x7F800000  # of fp32; used because not every device has frexp


class Accumulator:
    """A sum of gradient parts of one shape: `value`, and its rounding error `lost` (None unless compensated).

    Args:
        like: a tensor of the device to use.
        shape, dtype: of the gradient.
        accumulate: "bf16", "kahan" or "fp32".
        lost_rows: number of leading rows that are summed over chunks; None for all. Later rows have one part only.
        value: memory for the sum; used only if it has the right dtype.
    """

    def __init__(
        self, like: Tensor, shape: tuple[int, ...], dtype: torch.dtype, accumulate: str, lost_rows: int | None = None,
        value: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.dtype = dtype
        summed_in = torch.float32 if accumulate == "fp32" else dtype
        if value is None or value.dtype != summed_in:
            value = like.new_empty(shape, dtype=summed_in)
        self.value = value
        lost_shape = shape if lost_rows is None else (lost_rows, *shape[1:])
        keeps = compensated(dtype, accumulate) and lost_rows != 0
        self.lost = like.new_empty(lost_shape, dtype=torch.int8) if keeps else None
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
    """The unit of `lost` in fp32: 1 / 256 of the value's last place."""
    info = torch.finfo(value.dtype)
    size = value.float().abs().clamp(min=info.tiny)
    power = (size.view(torch.int32) & EXPONENT_BITS).view(torch.float32)  # 2^n <= |value| < 2^(n + 1)
    return power * (info.eps / 256)
