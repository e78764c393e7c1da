"""Each row's gradient coefficients in one or two launches, which replace a dozen small operations of torch.

row_math.row_coefficients says what a and b are. Stored exponentials (schemes/three_products.py) come with factors for
an upstream gradient of 1; `row_factors` makes those for each row's own.

Cost: reads and writes a few N numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..options import Options
from ..row_math import IGNORED
from ..runtime.launch import quick
from ..runtime.tiles import cdiv

BLOCK = 1024
PEAK_BLOCK = 8192  # rows that peak_kernel's one program reads at a time


@quick
@triton.jit(do_not_specialize=["grad_stride", "lse_stride", "N"])
def row_coefficients_kernel(
    grad_ptr,  # (N,), grad_stride apart: dL/d(row loss)
    grad_lse_ptr,  # (N,), lse_stride apart, or None: dL/dLSE
    lse_ptr,  # (N,) fp32
    lost_ptr,  # (N,) fp32 or None: what lse lost by rounding
    columns_ptr,  # (N,) int64, each row's target column (row_math.py)
    a_ptr,  # (N,) fp32, written
    b_ptr,  # (N,) fp32, written
    grad_stride, lse_stride, N, z_loss,
    IGNORED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a and b."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < N
    column = tl.load(columns_ptr + rows, mask=inside, other=IGNORED)
    grad = tl.load(grad_ptr + rows.to(tl.int64) * grad_stride, mask=inside, other=0.0).to(tl.float32)
    b = tl.where(column >= 0, grad, tl.where(column == IGNORED, 0.0, float("nan")))
    a = b
    if z_loss != 0:
        a *= 1 + 2 * z_loss * tl.load(lse_ptr + rows, mask=inside, other=0.0)
    if grad_lse_ptr is not None:
        a += tl.load(grad_lse_ptr + rows.to(tl.int64) * lse_stride, mask=inside, other=0.0).to(tl.float32)
    if lost_ptr is not None:
        a *= tl.exp(-tl.load(lost_ptr + rows, mask=inside, other=0.0))
    tl.store(a_ptr + rows, a, mask=inside)
    tl.store(b_ptr + rows, b, mask=inside)


@quick
@triton.jit(do_not_specialize=["N"])
def peak_kernel(
    a_ptr,  # (N,) fp32
    b_ptr,  # (N,) fp32
    peak_ptr,  # () fp32, written
    a_of_peak_ptr,  # (N,) fp32, a / peak, written
    b_of_peak_ptr,  # (N,) fp32, b / peak, written
    N,
    BLOCK: tl.constexpr,
):
    """The largest |a| or |b| of all rows, and both divided by it, in one program.

    NaN is no candidate, so that one bad row does not make every row's gradient NaN.
    """
    largest = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, N, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        a = tl.load(a_ptr + rows, mask=rows < N, other=0.0)
        b = tl.load(b_ptr + rows, mask=rows < N, other=0.0)
        largest = tl.maximum(largest, tl.where(a == a, tl.abs(a), 0.0))
        largest = tl.maximum(largest, tl.where(b == b, tl.abs(b), 0.0))
    peak = tl.max(largest, axis=0)
    peak = tl.where(peak == 0, 1.0, peak)
    tl.store(peak_ptr, peak)
    for first in range(0, N, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        a = tl.load(a_ptr + rows, mask=rows < N, other=0.0)
        b = tl.load(b_ptr + rows, mask=rows < N, other=0.0)
        tl.store(a_of_peak_ptr + rows, tl.div_rn(a, peak), mask=rows < N)
        tl.store(b_of_peak_ptr + rows, tl.div_rn(b, peak), mask=rows < N)


@quick
@triton.jit(do_not_specialize=["grad_stride", "lse_stride", "N"])
def row_factors_kernel(
    grad_ptr,  # (N,), grad_stride apart: dL/d(row loss)
    grad_lse_ptr,  # (N,), lse_stride apart, or None: dL/dLSE
    factor_ptr,  # (N,) fp32, this pointer and the next two: `row_stats.Gradient`
    coefficient_ptr,
    of_lse_ptr,  # (2, N) fp32; read if grad_lse_ptr is given
    factor_out_ptr,  # (N,) fp32, written
    coefficient_out_ptr,  # (N,) fp32, written
    grad_stride, lse_stride, N,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write dL/d(row loss) · (factor, coefficient) + dL/dLSE · of_lse."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < N
    factor = tl.load(factor_ptr + rows, mask=inside, other=0.0)
    coefficient = tl.load(coefficient_ptr + rows, mask=inside, other=0.0)
    counts = (factor != 0) | (coefficient != 0)  # an ignored row's upstream gradient may be NaN
    grad = tl.load(grad_ptr + rows.to(tl.int64) * grad_stride, mask=inside & counts, other=0.0).to(tl.float32)
    factor *= grad
    coefficient *= grad
    if grad_lse_ptr is not None:
        grad_lse = tl.load(grad_lse_ptr + rows.to(tl.int64) * lse_stride, mask=inside, other=0.0).to(tl.float32)
        factor += grad_lse * tl.load(of_lse_ptr + rows, mask=inside, other=0.0)
        coefficient += grad_lse * tl.load(of_lse_ptr + N + rows, mask=inside, other=0.0)
    tl.store(factor_out_ptr + rows, factor, mask=inside)
    tl.store(coefficient_out_ptr + rows, coefficient, mask=inside)


@dataclass(frozen=True)
class Peak:
    """The largest row coefficient, () fp32, and the coefficients (N,) divided by it."""

    value: Tensor
    a: Tensor
    b: Tensor

    @classmethod
    def of(cls, a: Tensor, b: Tensor) -> Peak:
        of_a = torch.empty_like(a)
        peak = cls(a.new_empty(()), of_a, of_a if b is a else torch.empty_like(b))
        peak_kernel[(1,)](a, b, peak.value, peak.a, peak.b, a.shape[0], PEAK_BLOCK, num_warps=16)
        return peak

    def with_entropy(self, entropy: Tensor) -> tuple[Peak, Tensor]:
        """The peak also of the entropies' gradients, entropy[0] of (2, N); and `entropy` with these divided by it.

        NaN is no candidate. Every row's gradient could be 0 without the entropies', so `value` may grow from 1.
        """
        largest = entropy[0].abs().nan_to_num(nan=0.0).amax()
        whole = self.a.abs().nan_to_num(nan=0.0).amax() + self.b.abs().nan_to_num(nan=0.0).amax() > 0
        value = torch.where(whole, torch.maximum(self.value, largest), torch.where(largest > 0, largest, 1.0))
        times = self.value / value
        return Peak(value, self.a * times, self.b * times), torch.stack((entropy[0] / value, entropy[1]))


def row_coefficients(
    grad_loss: Tensor, grad_lse: Tensor | None, lse: Tensor, columns: Tensor, o: Options, lost: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same as `row_math.row_coefficients`."""
    n_rows = columns.shape[0]
    a, b = torch.empty_like(lse), torch.empty_like(lse)
    row_coefficients_kernel[(cdiv(n_rows, BLOCK),)](
        grad_loss, grad_lse, lse, lost, columns, a, b, grad_loss.stride(0) if grad_loss.dim() else 0,
        0 if grad_lse is None else grad_lse.stride(0), n_rows, float(o.z_loss), IGNORED, BLOCK, num_warps=4,
    )  # fmt: skip
    return a, b


def row_factors(
    grad_loss: Tensor, grad_lse: Tensor | None, factor: Tensor, coefficient: Tensor, of_lse: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The factors and the coefficients, each (N,) fp32, of stored exponentials, for each row's own upstream gradients.

    grad_loss, grad_lse: as for `row_coefficients`. factor, coefficient, of_lse: of `row_stats.Gradient`.
    """
    n_rows = factor.shape[0]
    out = torch.empty_like(factor), torch.empty_like(factor)
    row_factors_kernel[(cdiv(n_rows, BLOCK),)](
        grad_loss, grad_lse, factor, coefficient, of_lse, *out, grad_loss.stride(0) if grad_loss.dim() else 0,
        0 if grad_lse is None else grad_lse.stride(0), n_rows, BLOCK, num_warps=4,
    )  # fmt: skip
    return out
