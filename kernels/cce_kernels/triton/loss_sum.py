"""The sum or the mean of the row losses in one launch; row_math.reduce_loss takes five for the mean. And its gradient.

One program adds the rows up in one order. So two calls give the same bits.

Cost: reads 12 N bytes (16 N with weights), in one program: about 20 µs for 131,072 rows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..row_math import IGNORED, weighted
from ..runtime.devices import kernels_on
from ..runtime.launch import quick
from ..runtime.tiles import power_of_2

BLOCK = 8192  # rows that the program reads at a time


@quick
@triton.jit(do_not_specialize=["N"])
def loss_sum_kernel(
    rows_ptr,  # (N,) fp32, the row losses
    columns_ptr,  # (N,) int64, each row's target column (row_math.py)
    weights_ptr,  # (N,) fp32 or None: what each row's loss is multiplied by
    loss_ptr,  # () fp32, written
    counted_ptr,  # () int64, or fp32 with weights: the mean's divisor, written; or None: the sum
    N,
    IGNORED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum of the row losses, or their mean over the rows that are not ignored (0 if all are ignored).

    A weighted mean is divided by the sum of the weights; it is 0 where that sum is 0.
    """
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    counted = tl.zeros((BLOCK,), dtype=tl.int32)
    weighed = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, N, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        losses = tl.load(rows_ptr + rows, mask=rows < N, other=0.0)
        if weights_ptr is not None:
            column = tl.load(columns_ptr + rows, mask=rows < N, other=IGNORED)
            weight = tl.load(weights_ptr + rows, mask=column != IGNORED, other=0.0)
            weighed += weight
            losses *= weight
        elif counted_ptr is not None:
            column = tl.load(columns_ptr + rows, mask=rows < N, other=IGNORED)
            counted += (column != IGNORED).to(tl.int32)
        total += losses
    loss = tl.sum(total, axis=0)
    if counted_ptr is not None and weights_ptr is not None:
        divisor = tl.sum(weighed, axis=0)
        divisor = tl.where(divisor == 0, float("inf"), divisor)
        loss = tl.div_rn(loss, divisor)
        tl.store(counted_ptr, divisor)
    elif counted_ptr is not None:
        divisor = tl.maximum(tl.sum(counted, axis=0), 1)
        loss = tl.div_rn(loss, divisor.to(tl.float32))
        tl.store(counted_ptr, divisor.to(tl.int64))
    tl.store(loss_ptr, loss)


def reduce_loss(
    rows: Tensor, columns: Tensor, reduction: str, weights: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The same as `row_math.reduce_loss`."""
    if reduction == "none":
        return weighted(rows, columns, weights), None
    loss = rows.new_empty(())
    counted = (columns if weights is None else rows).new_empty(()) if reduction == "mean" else None
    block = min(BLOCK, max(1024, power_of_2(rows.shape[0])))
    loss_sum_kernel[(1,)](rows, columns, weights, loss, counted, rows.shape[0], IGNORED, block, num_warps=16)
    return loss, counted


@quick
@triton.jit
def mean_gradient_kernel(
    grad_ptr,  # () fp32, dL/d(mean)
    counted_ptr,  # () int64 or fp32, the mean's divisor
    scale_ptr,  # () fp32, written: dL/d(each row's weighted loss)
):
    """One quotient, rounded as torch rounds it."""
    tl.store(scale_ptr, tl.div_rn(tl.load(grad_ptr), tl.load(counted_ptr).to(tl.float32)))


def mean_gradient(grad_loss: Tensor, counted: Tensor) -> Tensor:
    """The same as `row_math.mean_gradient`, in a launch that a program can repeat (runtime/program.py)."""
    scale = grad_loss.new_empty(())
    with kernels_on(grad_loss):
        mean_gradient_kernel[(1,)](grad_loss, counted, scale)
    return scale
