"""Rows of a vocabulary in shards: from what every rank has found of a chunk's rows to loss and gradient factors.

    LSE_i = log Σ_r exp(LSE_i^r)        −log p_i = −log p_i^o + softplus(log Σ_{r ≠ o} exp(LSE_i^r) − LSE_i^o)

o is the rank that holds row i's target (api.py). One launch, since the products wait for it.

Cost: ranks × rows × 2 numbers read (4 with metrics), 4 a row written.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..kernels.epilogues import LOG2E, log1p
from ..kernels.row_stats import LN2, ROWS, Gradient
from ..options import Options
from ..row_math import Rows
from ..runtime.launch import quick
from ..runtime.tiles import cdiv


@quick
@triton.jit(do_not_specialize=["N", "rank"])
def settle_kernel(
    every_ptr,  # (WORLD, PARTS, N) fp32: LSE, −log p; with metrics Σ p z and the largest logit but the target's
    ends_ptr,  # (WORLD,) int64: where each rank's columns end
    columns_ptr,  # (N,) int64, in the whole vocabulary, -1 where ignored, -2 where outside of it
    lse_ptr,  # (N,) fp32: of the shard; then of the whole
    nll_ptr,  # (N,) fp32: of the row's target in the shard or what stands in for it; then of its target in the whole
    metrics_ptr,  # (2, N) fp32 or None, written
    factor_ptr,  # (N,) fp32: of a softmax over the shard; then of the whole one
    coefficient_ptr,  # (N,) fp32, written: gradient of the logit that the shard holds apart
    N,
    rank,
    logit_scale,
    softcap,
    z_loss,
    WORLD: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = rows < N
    column = tl.load(columns_ptr + rows, mask=inside, other=-1)
    highest = tl.full((BLOCK_N,), float("-inf"), dtype=tl.float32)
    owner = tl.zeros((BLOCK_N,), dtype=tl.int32)
    for r in range(WORLD):
        lse_r = tl.load(every_ptr + r * PARTS * N + rows, mask=inside, other=0.0)
        highest = tl.maximum(highest, lse_r)
        if r < WORLD - 1:
            owner += (column >= tl.load(ends_ptr + r)).to(tl.int32)
    anchor = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.zeros((BLOCK_N,), dtype=tl.float32)
    others = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for r in range(WORLD):
        part = tl.exp2((tl.load(every_ptr + r * PARTS * N + rows, mask=inside, other=0.0) - anchor) * LOG2E)
        total += part
        others += tl.where(owner == r, 0.0, part)
    lse = highest + tl.log2(total) * LN2
    of_owner = every_ptr + owner * PARTS * N + rows
    lse_owner = tl.load(of_owner, mask=inside, other=0.0)
    nll_owner = tl.load(of_owner + N, mask=inside, other=0.0)
    # softplus(log others − LSE of the owner), which may lie far below the others
    above = anchor + tl.log2(others) * LN2 - lse_owner
    nll = nll_owner + tl.maximum(above, 0.0) + log1p(tl.exp2(-tl.abs(above) * LOG2E))
    if metrics_ptr is not None:
        largest = tl.full((BLOCK_N,), float("-inf"), dtype=tl.float32)
        mean = tl.zeros((BLOCK_N,), dtype=tl.float32)
        for r in range(WORLD):
            of_rank = every_ptr + r * PARTS * N + rows
            share = tl.exp2((tl.load(of_rank, mask=inside, other=0.0) - lse) * LOG2E)
            mean_r = tl.load(of_rank + 2 * N, mask=inside, other=0.0)
            mean += tl.where(share > 0, share * mean_r, 0.0)  # −inf where a bias masks all of a shard
            largest = tl.maximum(largest, tl.load(of_rank + 3 * N, mask=inside, other=0.0))
        tl.store(metrics_ptr + rows, (lse_owner - nll_owner > largest).to(tl.float32), mask=inside)
        tl.store(metrics_ptr + N + rows, lse - mean, mask=inside)

    lse_here = tl.load(lse_ptr + rows, mask=inside, other=0.0)
    z = lse_here - tl.load(nll_ptr + rows, mask=inside, other=0.0)
    counts = tl.where(column >= 0, 1.0, tl.where(column == -1, 0.0, float("nan")))
    is_here = (column >= 0) & (owner == rank)
    a = counts * (1 + 2 * z_loss * lse)
    p = tl.exp2(tl.where(is_here, -nll, z - lse) * LOG2E)
    slope = 1.0
    if HAS_SOFTCAP:
        slope = 1 - (z / softcap) * (z / softcap)
    factor = tl.load(factor_ptr + rows, mask=inside, other=0.0) * a * tl.exp2((lse_here - lse) * LOG2E)
    tl.store(factor_ptr + rows, factor, mask=inside)
    coefficient = logit_scale * (a * p - tl.where(is_here, counts, 0.0)) * slope
    tl.store(coefficient_ptr + rows, coefficient, mask=inside)
    tl.store(lse_ptr + rows, lse, mask=inside)
    tl.store(nll_ptr + rows, tl.where(counts == 0, 0.0, nll * counts), mask=inside)


def settle(every: Tensor, ends: Tensor, rank: int, columns: Tensor, rows: Rows, gradient: Gradient, o: Options) -> None:
    """Turn rows and gradient of a chunk in the rank's shard alone into those of the whole vocabulary, in place.

    Args:
        every: (W, 2, N) or with metrics (W, 4, N) fp32, from all ranks.
        ends: (W,) int64, sums of the shards' columns.
    """
    world, parts, n_rows = every.shape
    settle_kernel[(cdiv(n_rows, ROWS),)](
        every, ends, columns, rows.lse, rows.nll, rows.metrics, gradient.factor, gradient.coefficient, n_rows, rank,
        float(o.logit_scale), float(o.softcap or 0), float(o.z_loss), world, parts, ROWS, o.softcap is not None,
    )  # fmt: skip
