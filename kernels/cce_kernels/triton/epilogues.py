"""Epilogues: arithmetic on a tile of products e cᵀ, shared by the kernels in Triton and in Gluon.

The softcap: z = softcap · tanh(x / softcap), and its slope dz / dx = 1 − (z / softcap)².
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
HEADROOM = tl.constexpr(60.0)  # makes the target's w 2^-60 (logits.py)
# The target's logit, and later the LSE, of an ignored row whose LSE is not wanted. It makes the row's exponentials and
# probabilities exactly 0. Products with the row's coefficients, which are 0, then stay finite.
SKIPPED = tl.constexpr(2.0**60)


@triton.jit
def softcapped(x, softcap):
    """The softcap of fp32 logits x."""
    return softcap * _tanh(x / softcap)


@triton.jit
def softcap_slope(z, softcap):
    """The softcap's derivative, from the capped logits z."""
    return 1 - (z / softcap) * (z / softcap)


@triton.jit
def _tanh(x):
    """tanh in fp32 to about one rounding. Near 0 the quotient of exponentials cancels, so a series takes its place."""
    size = tl.abs(x)
    decay = tl.exp(-2 * size)
    quotient = (1 - decay) / (1 + decay)
    square = x * x
    series = x * (1 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315))))
    return tl.where(size < 0.2, series, tl.where(x < 0, -quotient, quotient))


@triton.jit
def log1p(x):
    """ln(1 + x) in fp32 for x >= 0. For small x 1 + x would keep few digits of x, so a series takes its place."""
    ratio = x / (2 + x)
    square = ratio * ratio
    series = 2 * ratio * (1 + square * (1 / 3 + square * (1 / 5 + square * (1 / 7 + square * (1 / 9)))))
    return tl.where(x < 0.5, series, tl.log(1 + x))


@triton.jit
def finish_logits(acc, cols, bias_ptr, V, logit_scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """The logits softcap · tanh((logit_scale · acc + bias) / softcap) of the columns `cols`, fp32."""
    z = acc * logit_scale
    if bias_ptr is not None:
        z += tl.load(bias_ptr + cols, mask=cols < V, other=0.0).to(tl.float32)[None, :]
    if HAS_SOFTCAP:
        z = softcapped(z, softcap)
    return z


@triton.jit
def exponentials_of(
    acc, cols, column, z_target, bias_ptr, V, logit_scale, softcap, total, z_total, highest, wz_total,
    APART: tl.constexpr, HAS_SOFTCAP: tl.constexpr, EVEN_V: tl.constexpr, PRECISE: tl.constexpr,
    WITH_Z: tl.constexpr, WITH_METRICS: tl.constexpr,
):  # fmt: skip
    """w times the softcap's slope, and the rows' running sums with this tile added (logits.py).

    total: sum of w. z_total: sum of the logits, with WITH_Z. highest, wz_total: the largest w, and the sum of
    w (z − z_target) log2 e, with WITH_METRICS. APART leaves the targets out of w, its sum and the metrics.
    """
    offset = z_target * LOG2E + HEADROOM
    z = finish_logits(acc, cols, bias_ptr, V, logit_scale, softcap, HAS_SOFTCAP)
    if PRECISE:  # for fp32 operands; the target's w is 1
        x = (z - z_target[:, None]) * LOG2E
    elif HAS_SOFTCAP or bias_ptr is not None:
        x = z * LOG2E - offset[:, None]
    else:  # only one multiply-add an entry
        x = acc * (logit_scale * LOG2E) - offset[:, None]
    w = tl.exp2(x)
    if not EVEN_V:
        w = tl.where((cols < V)[None, :], w, 0.0)
    if APART:
        w = tl.where(cols[None, :] == column[:, None], 0.0, w)
    total += tl.sum(w, axis=1)
    if WITH_Z:
        z_total += tl.sum(tl.where((cols < V)[None, :], z, 0.0), axis=1)
    if WITH_METRICS:
        above = x if PRECISE else x + HEADROOM
        if bias_ptr is not None:  # a bias of −inf gives 0 · inf
            above = tl.where(w > 0, above, 0.0)
        highest = tl.maximum(highest, tl.max(w, axis=1))
        wz_total += tl.sum(w * above, axis=1)
    if HAS_SOFTCAP:
        w *= softcap_slope(z, softcap)
    return w, total, z_total, highest, wz_total


@triton.jit
def gradient_of(
    acc, cols, column, lse, a, b, bias_ptr, W, logit_scale, softcap, on_target, elsewhere,
    HAS_SOFTCAP: tl.constexpr, PRECISE: tl.constexpr, of_entropy=None, entropy=None,
):  # fmt: skip
    """dz, p, and whether an entry is its row's target, for a tile (logit_gradient.py).

    of_entropy, entropy: the rows' dL/dH and H, if the entropy has a gradient.
    """
    z = finish_logits(acc, cols, bias_ptr, W, logit_scale, softcap, HAS_SOFTCAP)
    if PRECISE or HAS_SOFTCAP or bias_ptr is not None:
        p = tl.exp2((z - lse[:, None]) * LOG2E)
    else:  # only one multiply-add an entry
        p = tl.exp2(acc * (logit_scale * LOG2E) - (lse * LOG2E)[:, None])
    is_target = cols[None, :] == column[:, None]
    dz = a[:, None] * p - b[:, None] * (tl.where(is_target, on_target, 0.0) + elsewhere)
    if of_entropy is not None:
        dz -= of_entropy[:, None] * tl.where(p > 0, p * (z - lse[:, None] + entropy[:, None]), 0.0)
    if HAS_SOFTCAP:
        dz *= softcap_slope(z, softcap)
    return dz, p, is_target


@triton.jit
def tail_of(dz, p, is_target, cols, W, eps, times_ptr):
    """dz of the tail, times the columns' `times` if given; 0 elsewhere. The tail has p < eps, without the target."""
    dz = tl.where((p < eps) & (is_target == 0), dz, 0.0)
    if times_ptr is not None:
        dz *= tl.load(times_ptr + cols, mask=cols < W, other=0.0)[None, :]
    return dz
