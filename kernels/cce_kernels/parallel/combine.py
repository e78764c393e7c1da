"""Combines every rank's row statistics of a chunk into those of the whole vocabulary, with the gradient factors.

    LSE_i = log Σ_r exp(LSE_i^r)        −log p_i = −log p_i^o + softplus(log Σ_{r ≠ o} exp(LSE_i^r) − LSE_i^o)

o is the owner, the rank that holds row i's target (api.py). It takes one launch, because the products wait for it.

Cost: reads ranks × rows × 2 numbers (4 with metrics), writes 4 a row.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..options import Options
from ..row_math import Rows
from ..runtime.launch import quick
from ..runtime.tiles import cdiv
from ..triton.epilogues import LOG2E, log1p, softcap_slope
from ..triton.row_stats import LN2, ROWS, Gradient


@quick
@triton.jit(do_not_specialize=["N", "rank"])
def settle_kernel(
    every_ptr,  # (WORLD, PARTS, N) fp32: every rank's LSE and −log p; with metrics entropy and largest other logit
    ends_ptr,  # (WORLD,) int64: the end of each rank's columns
    columns_ptr,  # (N,) int64, target column in the whole vocabulary: -1 where ignored, -2 where outside
    weights_ptr,  # (N,) fp32 or None: what each row's loss is multiplied by; not in nll
    lse_ptr,  # (N,) fp32: LSE over the shard; the whole vocabulary's is written
    nll_ptr,  # (N,) fp32: −log p over the shard of the target or its stand-in; the whole vocabulary's is written
    metrics_ptr,  # (2, N) fp32 or None: accuracy (1 or 0) and entropy, written
    factor_ptr,  # (N,) fp32: `Gradient.factor` for the shard's softmax; the whole vocabulary's is written
    coefficient_ptr,  # (N,) fp32, dL/d(e · c) of the target or its stand-in in this shard, written
    of_lse_ptr,  # (2, N) fp32 or None: `Gradient.of_lse` for the shard's softmax; the whole vocabulary's is written
    N, rank, logit_scale, softcap, z_loss,
    WORLD: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Loss, metrics and gradient factors of a chunk's rows over the whole vocabulary; see this file's docstring."""
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
    # softplus(log others − LSE of the owner), for any sign of the difference
    above = anchor + tl.log2(others) * LN2 - lse_owner
    nll = nll_owner + tl.maximum(above, 0.0) + log1p(tl.exp2(-tl.abs(above) * LOG2E))
    if metrics_ptr is not None:
        largest = tl.full((BLOCK_N,), float("-inf"), dtype=tl.float32)
        entropy = tl.zeros((BLOCK_N,), dtype=tl.float32)
        for r in range(WORLD):
            of_rank = every_ptr + r * PARTS * N + rows
            log_share = tl.load(of_rank, mask=inside, other=0.0) - lse
            share = tl.exp2(log_share * LOG2E)
            entropy_r = tl.load(of_rank + 2 * N, mask=inside, other=0.0)
            entropy += tl.where(share > 0, share * (entropy_r - log_share), 0.0)  # a bias of −inf can mask a shard
            largest = tl.maximum(largest, tl.load(of_rank + 3 * N, mask=inside, other=0.0))
        tl.store(metrics_ptr + rows, (lse_owner - nll_owner > largest).to(tl.float32), mask=inside)
        tl.store(metrics_ptr + N + rows, entropy, mask=inside)

    lse_here = tl.load(lse_ptr + rows, mask=inside, other=0.0)
    z = lse_here - tl.load(nll_ptr + rows, mask=inside, other=0.0)
    z = tl.where(lse_here == float("-inf"), float("-inf"), z)  # a bias of −inf masks the whole shard
    counts = tl.where(column >= 0, 1.0, tl.where(column == -1, 0.0, float("nan")))
    is_here = (column >= 0) & (owner == rank)
    b = counts
    if weights_ptr is not None:
        b *= tl.load(weights_ptr + rows, mask=inside & (column != -1), other=0.0)
    a = b * (1 + 2 * z_loss * lse)
    p = tl.exp2(tl.where(is_here, -nll, z - lse) * LOG2E)
    slope = 1.0
    if HAS_SOFTCAP:
        slope = softcap_slope(z, softcap)
    share = tl.exp2((lse_here - lse) * LOG2E)
    factor = tl.load(factor_ptr + rows, mask=inside, other=0.0) * a * share
    tl.store(factor_ptr + rows, factor, mask=inside)
    coefficient = logit_scale * (a * p - tl.where(is_here, b, 0.0)) * slope
    tl.store(coefficient_ptr + rows, coefficient, mask=inside)
    if of_lse_ptr is not None:
        tl.store(of_lse_ptr + rows, tl.load(of_lse_ptr + rows, mask=inside, other=0.0) * share, mask=inside)
        tl.store(of_lse_ptr + N + rows, logit_scale * p * slope, mask=inside)
    tl.store(lse_ptr + rows, lse, mask=inside)
    tl.store(nll_ptr + rows, tl.where(counts == 0, 0.0, nll * counts), mask=inside)


def settle(every: Tensor, ends: Tensor, rank: int, columns: Tensor, rows: Rows, gradient: Gradient, o: Options) -> None:
    """Turn a chunk's rows and gradient factors of one shard into those of the whole vocabulary, in place.

    every, ends, columns: as for `settle_kernel`.
    """
    world, parts, n_rows = every.shape
    settle_kernel[(cdiv(n_rows, ROWS),)](
        every, ends, columns, gradient.weights, rows.lse, rows.nll, rows.metrics,
        gradient.factor, gradient.coefficient, gradient.of_lse,
        n_rows, rank, float(o.logit_scale), float(o.softcap or 0), float(o.z_loss), world, parts, ROWS,
        o.softcap is not None,
    )  # fmt: skip
