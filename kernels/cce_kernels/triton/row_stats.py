"""Row statistics for the loss (LSE, −log p, metrics) from the partial sums of logits.py; and the whole forward pass.

    loss_i = ln(1 + R_i / w_target)    LSE_i = z_target + loss_i    p_target − 1 = −R_i / (R_i + w_target)

R_i is the sum without the target (logits.py), so loss and gradient keep their relative precision down to 0. Both are 0
where the vocabulary has one entry. A row without a target has all entries in R_i. A skipped row (epilogues.py) has no
sum.

The kernel computes a row again if its sum left the range of the offset (logits.py). It then uses a running maximum,
which takes two more products for a tile of rows. This happens only where the device finds such a row.

Cost: reads N × splits numbers, writes a few N.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..options import Options
from ..row_math import Rows, empty_metrics
from ..runtime.launch import quick
from ..runtime.tiles import cdiv, inner_of
from .epilogues import HEADROOM, LOG2E, SKIPPED, finish_logits, log1p, softcap_slope
from .logits import Sums, exponentials, target_logits
from .smoothing import above_mean_logit, column_sum
from .targets.live_rows import ALL, Live

LN2 = tl.constexpr(0.6931471805599453)
LARGEST_SUM = tl.constexpr(2.0**60)  # 2^120 times the target's w, so that their ratios are normal numbers
ROWS = 64  # rows of a program
SPLITS = 64  # splits whose partial sums a program reads at a time: it waits for memory once for all of them


@quick
@triton.jit(do_not_specialize=["metrics_stride", "N", "D", "splits"])
def rows_kernel(
    e_ptr,  # (N, D), rows e_stride apart
    c_ptr,  # (V, D), rows c_stride apart
    w_ptr,  # (N, V) or None, rows w_stride apart: the exponentials; rewritten where a row overflowed
    bias_ptr,  # (V,) or None
    columns_ptr,  # (N,) int64, each row's target column: -1 where ignored, -2 where outside the vocabulary
    weights_ptr,  # (N,) fp32 or None: what each row's loss is multiplied by; not in nll
    z_target_ptr,  # (N,) fp32, the target's logit
    live_ptr,  # (N,) int64 or None: the row at each position of w and the sums (targets/live_rows.py)
    sum_ptr,  # (splits, N) fp32, sums of w without the target
    partial_ptr,  # (2, splits, N) fp32 or None: partial metrics (`Sums.metrics`)
    metrics_ptr,  # (2, N) fp32 or None: whether the target's logit is the largest (1 or 0); entropy; written
    largest_ptr,  # (N,) fp32 or None: the largest logit except the target's; written
    lse_ptr,  # (N,) fp32, written
    lost_ptr,  # (N,) fp32 or None: what lse lost by rounding, written
    nll_ptr,  # (N,) fp32: −log p of the target, 0 where ignored, NaN where outside the vocabulary; written
    factor_ptr,  # (N,) fp32 or None: factor from w to dL/d(e · c), written
    coefficient_ptr,  # (N,) fp32 or None: dL/d(e · c) of the target, written
    of_lse_ptr,  # (2, N) fp32 or None: `Gradient.of_lse`, written
    e_stride, c_stride, w_stride,
    metrics_stride,  # from the row of metrics_ptr to the next: the rows of all chunks
    N, V, D, splits, logit_scale, softcap, z_loss, label_smoothing,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Each row's LSE, −log p, metrics and gradient factors from the partial sums.

    A row whose sum overflowed is computed again: first its LSE with a running maximum, then w with the LSE as offset.
    """
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = rows < N
    out = rows  # where numbers of a row are read and written
    if live_ptr is not None:
        out = tl.load(live_ptr + rows, mask=inside, other=0)
    column = tl.load(columns_ptr + out, mask=inside, other=-1)
    z_target = tl.load(z_target_ptr + out, mask=inside, other=0.0)
    others = tl.zeros((BLOCK_N,), dtype=tl.float32)
    highest = tl.zeros((BLOCK_N,), dtype=tl.float32)  # the largest w except the target's
    wz_sum = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for first in range(0, splits, SPLITS):
        split = first + tl.arange(0, SPLITS)
        places = split.to(tl.int64)[:, None] * N + rows[None, :]
        mask = (split < splits)[:, None] & inside[None, :]
        others += tl.sum(tl.load(sum_ptr + places, mask=mask, other=0.0), axis=0)
        if metrics_ptr is not None:
            highest = tl.maximum(highest, tl.max(tl.load(partial_ptr + places, mask=mask, other=0.0), axis=0))
            places += splits.to(tl.int64) * N
            wz_sum += tl.sum(tl.load(partial_ptr + places, mask=mask, other=0.0), axis=0)
    # The target's own w, rounded in the same way as the sum's.
    skipped = (column == -1) & (z_target == SKIPPED)
    others = tl.where(skipped, 0.0, others)  # no kernel has written the sums of positions that do not count
    w_target = tl.exp2(z_target * LOG2E - (z_target * LOG2E + HEADROOM))
    headroom = HEADROOM
    if e_ptr.dtype.element_ty == tl.float32:
        w_target = tl.full((BLOCK_N,), 1.0, dtype=tl.float32)
        headroom = 0.0
    w_target = tl.where(skipped, 1.0, w_target)
    apart = column >= 0
    total = others + tl.where(apart | skipped, w_target, 0.0)
    p_target = w_target / total
    rest = others / total  # 1 − p where the row has a target
    nll = tl.where(apart, log1p(others / w_target), -tl.log(p_target))
    lse = z_target + nll
    lost = nll - (lse - z_target)
    entropy = nll - wz_sum * LN2 / total
    largest = z_target + (tl.log2(highest) + headroom) * LN2
    is_largest = w_target > highest
    overflowed = inside & ~((total > 0) & (total < LARGEST_SUM) & (tl.abs(z_target) < float("inf")))
    overflowed = overflowed & ~skipped
    if tl.max(overflowed.to(tl.int32), axis=0) > 0:
        highest = tl.full((BLOCK_N,), float("-inf"), dtype=tl.float32)
        other = tl.full((BLOCK_N,), float("-inf"), dtype=tl.float32)  # the largest logit except the target's
        exp_sum = tl.zeros((BLOCK_N,), dtype=tl.float32)
        z_sum = tl.zeros((BLOCK_N,), dtype=tl.float32)  # weighted with the exponentials
        for col in range(0, V, BLOCK_V):
            cols = col + tl.arange(0, BLOCK_V)
            z = _logits(
                e_ptr, c_ptr, bias_ptr, out, inside, cols, e_stride, c_stride, V, D, logit_scale, softcap,
                BLOCK_N, BLOCK_V, BLOCK_D, HAS_SOFTCAP,
            )  # fmt: skip
            z = tl.where((cols < V)[None, :], z, float("-inf"))
            new_highest = tl.maximum(highest, tl.max(z, axis=1))
            other = tl.maximum(other, tl.max(tl.where(cols[None, :] == column[:, None], float("-inf"), z), axis=1))
            # A bias of −inf can mask a whole tile. Its exponentials are 0; an anchor of 0 avoids inf − inf.
            anchor = tl.where(new_highest == float("-inf"), 0.0, new_highest)
            decay = tl.exp2((highest - anchor) * LOG2E)
            exps = tl.exp2((z - anchor[:, None]) * LOG2E)
            exp_sum = exp_sum * decay + tl.sum(exps, axis=1)
            z_sum = z_sum * decay + tl.sum(tl.where(exps > 0, exps * z, 0.0), axis=1)
            highest = new_highest
        online = highest + tl.log2(exp_sum) * LN2
        entropy = tl.where(overflowed, online - z_sum / exp_sum, entropy)
        largest = tl.where(overflowed, other, largest)
        is_largest = tl.where(overflowed, z_target > other, is_largest)
        if w_ptr is not None:
            online_anchor = tl.where(online == float("-inf"), 0.0, online)  # a bias of −inf can mask the whole row
            for col in range(0, V, BLOCK_V):
                cols = col + tl.arange(0, BLOCK_V)
                z = _logits(
                    e_ptr, c_ptr, bias_ptr, out, inside, cols, e_stride, c_stride, V, D, logit_scale, softcap,
                    BLOCK_N, BLOCK_V, BLOCK_D, HAS_SOFTCAP,
                )  # fmt: skip
                w = tl.exp2((z - online_anchor[:, None]) * LOG2E)
                if HAS_SOFTCAP:
                    w *= softcap_slope(z, softcap)
                w = tl.where(cols[None, :] == column[:, None], 0.0, w)
                w_ptrs = w_ptr + rows.to(tl.int64)[:, None] * w_stride + cols[None, :]
                tl.store(w_ptrs, w.to(w_ptr.dtype.element_ty), mask=overflowed[:, None] & (cols < V)[None, :])
        lse = tl.where(overflowed, online, lse)
        lost = tl.where(overflowed, tl.log2(exp_sum) * LN2 - (online - highest), lost)
        nll = tl.where(overflowed, online - z_target, nll)  # not −log p, because p may underflow
        p_target = tl.where(overflowed, tl.exp2((z_target - online) * LOG2E), p_target)
        rest = tl.where(overflowed, 1 - p_target, rest)
        total = tl.where(overflowed, 1.0, total)
    tl.store(lse_ptr + out, lse, mask=inside)
    if lost_ptr is not None:
        tl.store(lost_ptr + out, tl.where(lost == lost, lost, 0.0), mask=inside)
    if metrics_ptr is not None:
        tl.store(metrics_ptr + out, (is_largest & apart).to(tl.float32), mask=inside)
        tl.store(metrics_ptr + metrics_stride + out, tl.where(skipped, 0.0, entropy), mask=inside)
    if largest_ptr is not None:
        tl.store(largest_ptr + out, largest, mask=inside)

    counts = tl.where(column >= 0, 1.0, tl.where(column == -1, 0.0, float("nan")))
    tl.store(nll_ptr + out, tl.where(counts == 0, 0.0, nll * counts), mask=inside)

    if factor_ptr is not None:
        b = counts * logit_scale
        if weights_ptr is not None:
            b *= tl.load(weights_ptr + out, mask=inside & (column != -1), other=0.0)
        of_lse = tl.where(z_loss == 0, 0.0, b * (2 * z_loss * lse))  # the LSE of a masked row is −inf
        a = b + of_lse
        slope = 1.0
        if HAS_SOFTCAP:
            slope = softcap_slope(z_target, softcap)
        of_target = of_lse * p_target - b * (rest - label_smoothing)
        tl.store(factor_ptr + out, a / total, mask=inside)
        tl.store(coefficient_ptr + out, tl.where(apart, of_target * slope, 0.0), mask=inside)
        if of_lse_ptr is not None:
            tl.store(of_lse_ptr + out, logit_scale / total, mask=inside)
            tl.store(of_lse_ptr + N + out, tl.where(apart, logit_scale * p_target * slope, 0.0), mask=inside)


@triton.jit
def _logits(
    e_ptr, c_ptr, bias_ptr, rows, inside, cols, e_stride, c_stride, V, D, logit_scale, softcap,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """The logits of rows `rows` and columns `cols`, fp32. inside: which rows exist."""
    e_ptrs = e_ptr + rows.to(tl.int64)[:, None] * e_stride
    c_ptrs = c_ptr + cols.to(tl.int64)[:, None] * c_stride
    acc = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)
    for d in range(0, D, BLOCK_D):
        dims = d + tl.arange(0, BLOCK_D)
        e = tl.load(e_ptrs + dims[None, :], mask=inside[:, None] & (dims < D)[None, :], other=0.0)
        c = tl.load(c_ptrs + dims[None, :], mask=(cols < V)[:, None] & (dims < D)[None, :], other=0.0)
        acc = tl.dot(e, c.T, acc, input_precision="ieee")
    return finish_logits(acc, cols, bias_ptr, V, logit_scale, softcap, HAS_SOFTCAP)


@dataclass(frozen=True)
class Gradient:
    """Tensors for the gradients of a loss that sums the row losses; `finish_rows` writes all but w and weights."""

    w: Tensor  # (N, V) exponentials (logits.py), 0 at the targets; rewritten where a row overflowed
    factor: Tensor  # (N,) fp32, the factor from a row of w to dL/d(e · c)
    coefficient: Tensor  # (N,) fp32, dL/d(e · c) of the row's target
    of_lse: Tensor | None = None  # (2, N) fp32, the same two numbers of a sum of the log-sum-exps
    weights: Tensor | None = None  # (N,) fp32, what each row's loss is multiplied by; read


def finish_rows(
    e: Tensor, c: Tensor, bias: Tensor | None, columns: Tensor, z_target: Tensor, sums: Sums, rows: Rows, o: Options,
    gradient: Gradient | None = None, live: Live = ALL,
) -> None:  # fmt: skip
    """Write `rows`, but for z_above_mean, from the partial sums, and the tensors of `gradient` if it is given.

    live: the rows of w and the sums.
    """
    (n_rows, dim), vocab = e.shape if live.rows is None else (live.rows.shape[0], e.shape[1]), c.shape[0]
    w = factor = coefficient = of_lse = weights = None
    if gradient is not None:
        w, factor, coefficient, of_lse = gradient.w, gradient.factor, gradient.coefficient, gradient.of_lse
        weights = gradient.weights
    rows_kernel[(cdiv(n_rows, ROWS),)](
        e, c, w, bias, columns, weights, z_target, live.rows, sums.w, sums.metrics,
        rows.metrics, rows.largest, rows.lse, rows.lost, rows.nll,
        factor, coefficient, of_lse, e.stride(0), c.stride(0), 0 if w is None else w.stride(0),
        0 if rows.metrics is None else rows.metrics.stride(0), n_rows, vocab, dim,
        sums.w.shape[0],
        float(o.logit_scale), float(o.softcap or 0), float(o.z_loss), float(o.label_smoothing), ROWS, ROWS,
        inner_of(e.dtype), SPLITS, o.softcap is not None, num_warps=8,
    )  # fmt: skip


def forward(
    e: Tensor, c: Tensor, bias: Tensor | None, columns: Tensor, with_metrics: bool, o: Options,
    z_target: Tensor | None = None,
) -> Rows:  # fmt: skip
    """The row statistics that the loss needs. e (N, D) and c (V, D) are of one dtype and `aligned`.

    columns: (N,) int64 (row_math.py). z_target: (N,) fp32, the targets' logits, if they are known already.
    """
    if z_target is None:
        z_target = target_logits(e, c, bias, columns, o)
    sums = exponentials(e, c, bias, columns, z_target, None, with_metrics, o)
    z_above_mean = None
    if sums.z is not None:
        z_above_mean = z_target - sums.z.sum(dim=0) / c.shape[0]
    elif o.label_smoothing:
        z_above_mean = above_mean_logit(z_target, e, column_sum(c), bias, c.shape[0], o)
    metrics = empty_metrics(z_target, with_metrics)
    largest = torch.empty_like(z_target) if with_metrics else None
    lse, nll, lost = (torch.empty_like(z_target) for _ in range(3))
    rows = Rows(lse, nll, z_above_mean, metrics, largest, lost)
    finish_rows(e, c, bias, columns, z_target, sums, rows, o)
    return rows
