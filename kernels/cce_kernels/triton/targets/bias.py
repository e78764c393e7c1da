"""The bias's gradient from stored exponentials: sums over the rows, without the targets' entries, and then those.

    dbias_v = (Σ_{i: t_i ≠ v} factor_i w_iv + Σ_{i: t_i = v} coefficient_i + everywhere) / logit_scale

smoothing.column_sum computes the first sum. The second runs over rows sorted by target, so each entry has one owner.

Cost: reads w once for the first sum, and a few numbers of each row and entry for the rest.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...options import Options
from ...runtime.launch import quick
from ...runtime.tiles import cdiv

PLACES = 64  # rows, sorted by target, that are added at a time


@quick
@triton.jit(do_not_specialize=["V"])
def bias_gradient_kernel(
    sum_ptr,  # (V,) fp32, Σ factor_i w_iv; the gradient is written
    keys_ptr,  # (N,) int32, ascending: the rows' target columns, negative for none
    order_ptr,  # (N,) int64: the rows in the order of keys_ptr
    bounds_ptr,  # (tiles + 1,) int32: where in keys_ptr the targets of each tile begin
    coefficient_ptr,  # (N,) fp32
    everywhere_ptr,  # () fp32 or None: is added to every entry
    scale_ptr,  # () fp32 or None: dL/dloss
    V,
    per_logit,  # 1 / logit_scale
    TILE: tl.constexpr,  # tokens of the vocabulary in a tile
    PLACES: tl.constexpr,
):
    """dbias of a tile of entries."""
    tile = tl.program_id(0)
    entries = tile * TILE + tl.arange(0, TILE)
    total = tl.load(sum_ptr + entries, mask=entries < V, other=0.0)
    end = tl.load(bounds_ptr + tile + 1)
    for first in range(tl.load(bounds_ptr + tile), end, PLACES):
        places = first + tl.arange(0, PLACES)
        live = places < end
        key = tl.load(keys_ptr + places, mask=live, other=-1)
        row = tl.load(order_ptr + places, mask=live, other=0)
        coefficient = tl.load(coefficient_ptr + row, mask=live, other=0.0)
        total += tl.sum(tl.where(key[None, :] == entries[:, None], coefficient[None, :], 0.0), axis=1)
    if everywhere_ptr is not None:
        total += tl.load(everywhere_ptr)
    total *= per_logit
    if scale_ptr is not None:
        total *= tl.load(scale_ptr)
    tl.store(sum_ptr + entries, total, mask=entries < V)


def finish_bias_gradient(
    total: Tensor, keys: Tensor, order: Tensor, bounds: Tensor, tile: int, coefficient: Tensor,
    everywhere: Tensor | None, scale: Tensor | None, o: Options,
) -> None:  # fmt: skip
    """Turn `total` (V,) fp32, the sums without the targets' entries, into dbias, in place; see the kernel."""
    vocab = total.shape[0]
    bias_gradient_kernel[(cdiv(vocab, tile),)](
        total, keys, order, bounds, coefficient, everywhere, scale, vocab, 1.0 / o.logit_scale, tile, PLACES
    )
