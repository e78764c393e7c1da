"""The three ways to hold a gradient that is summed over vocabulary chunks.

bf16    value in the gradient's own dtype, rounded at every chunk
kahan   value in the gradient's dtype and what its rounding lost in a second tensor of that dtype; both are
        added in fp32 registers, so that the sum keeps the mantissa bits of two (16 of bf16's 8): exact to the
        last rounding
fp32    an fp32 tensor, rounded once at the end

An fp32 gradient is summed as it is: all three mean the same there.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Accumulator:
    """A sum of gradient parts of one shape. `value`, `lost` are what a kernel reads and writes; see the
    module."""

    def __init__(self, like: Tensor, dtype: torch.dtype, accumulate: str) -> None:
        self.dtype = dtype
        wide = accumulate == "fp32" and dtype != torch.float32
        kahan = accumulate == "kahan" and dtype != torch.float32
        self.value = torch.empty(like.shape, dtype=torch.float32 if wide else dtype, device=like.device)
        self.lost = torch.empty_like(self.value) if kahan else None
        self.empty = True

    @staticmethod
    def scratch_bytes_per_entry(dtype: torch.dtype, accumulate: str) -> int:
        """Bytes held per entry beyond the gradient itself."""
        return 0 if dtype == torch.float32 else {"kahan": dtype.itemsize, "fp32": 4, "bf16": 0}[accumulate]

    def add(self, part: Tensor) -> None:
        """Add an fp32 part, in torch (the Triton product kernel does the same in its epilogue)."""
        total = part if self.empty else part.add_(self.value)
        if self.lost is not None:
            total = total if self.empty else total.add_(self.lost)
        self.value.copy_(total)
        if self.lost is not None:
            self.lost.copy_(total.sub_(self.value))
        self.empty = False

    def result(self) -> Tensor:
        """The sum in the gradient's dtype."""
        return self.value.to(self.dtype)
