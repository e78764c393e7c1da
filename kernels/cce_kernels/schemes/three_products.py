"""Three products: gradients from stored exponentials, one chunk of token rows at a time.

    dE_i = a_i / S_i Σ_{v ≠ t} w_iv C_v + (a_i p_it − b_i) C_t        dC_v = Σ_{i: t_i ≠ v} w_iv (a_i / S_i) e_i
                                                                              + Σ_{i: t_i = v} (a_i p_it − b_i) e_i

triton/logits.py defines w and S. For each chunk of rows, `exponentials` stores w (rows × V, 16 bits) and the rows'
sums. Both gradients are then plain products of w (triton/matmul.py). The factor a_i / S_i goes into the rows of dE and
of e, so nothing is recomputed and no pass over w is needed. The target's entry is left out of w: p − 1 cancels there,
and most of the gradient lies there. The last products add it in fp32.

One chunk needs no sums: the backward pass writes both gradients once. Of several chunks the forward pass multiplies
every one but the last, whose w waits for dL/dloss. Until then the sums of dC keep their rounding errors
(accumulator.py). Each row of w C is complete after its own chunk.

Cost: 3 N D V multiply-adds. Each chunk but the first reads dC and its rounding error, and each but the last writes
both. Memory: 2 V bytes a row of a chunk, and planner.stored_bytes.
Ignored rows cost nothing in a call of some size: the rows that count come first (targets/live_rows.py). Label smoothing
without a softcap adds terms of rank one (smoothing.py). A bias takes one pass over w (targets/bias.py).
Serves what `planner._storable` says. Rows with upstream gradients of their own, or log-sum-exps with gradients, take
one chunk, whose products come after these gradients are known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..accumulator import Accumulator
from ..options import Options
from ..planner import splits_beside
from ..row_math import Dtypes, Rows, empty_metrics
from ..runtime.tiles import cdiv, multiprocessors, transposed_tiles
from ..saved import GradientSums, Held
from ..several_targets import Several
from ..triton.logits import exponentials, target_logits
from ..triton.matmul import RankOne, TargetTerms, product
from ..triton.row_coefficients import row_factors
from ..triton.row_stats import Gradient, finish_rows
from ..triton.smoothing import above_mean_logit, column_sum, smoothed_share
from ..triton.targets.bias import finish_bias_gradient
from ..triton.targets.live_rows import ALL, Live, live_rows
from ..triton.targets.order import order_by_target
from .last_chunk import LastChunk, finish_one, finish_several, lends_to_e, store_hidden
from .stored_rows import rows_like, rows_of, scaled_rows


def forward(
    e: Tensor, c: Tensor, columns: Tensor, rows: int, dtypes: Dtypes, with_metrics: bool, o: Options,
    settle: Callable[[slice, Rows, Gradient], None] | None = None, arrive: Callable[[slice], None] | None = None,
    z_target: Tensor | None = None, with_lse: bool = False, weights: Tensor | None = None, bias: Tensor | None = None,
    skip: bool = False, several: Several | None = None,
) -> tuple[Rows, Held, GradientSums]:  # fmt: skip
    """The rows' statistics for the loss, and what `backward` takes.

    Args:
        e: (N, D) and c: (V, D), bf16 and `aligned`.
        columns: (N,) int64, each row's target column (row_math.py).
        rows: token rows per chunk.
        dtypes: None for a gradient that is not wanted.
        settle: called with each chunk's statistics before its products; may change them in place.
        arrive: called before a chunk of e is read; makes its rows readable.
        z_target: (N,) fp32, the targets' logits, if they are known already.
        with_lse: whether the log-sum-exps may get gradients. The rows then take one chunk.
        weights: (N,) fp32, what each row's loss is multiplied by, or None. The gradients hold them; `Rows` does not.
        bias: (V,) contiguous or None.
        skip: whether to leave out the products of ignored rows (triton/targets/live_rows.py). Their log-sum-exps are
            then undefined. Needs z_target; without settle, arrive, with_lse and bias.
        several: the targets of each row, if it may have several; `columns` are the first of them.
    """
    n_rows = e.shape[0]
    if z_target is None and arrive is None:
        z_target = target_logits(e, c, bias, columns, o)
    targets = 1 if several is None else several.columns.shape[1]
    early, gathered = _early(e, c, rows, dtypes[0], skip), None
    if early.rows_live is not None and early.counts is not None:
        live_rows(columns, rows, early.rows_live, early.counts)
        gathered = rows_like(e, min(rows, n_rows), early.grad_e)
    for first in range(0, n_rows, rows):
        chunk = slice(first, min(first + rows, n_rows))
        height = chunk.stop - first
        live = _live(early.rows_live, early.counts, chunk, rows)
        own = slice(0, n_rows) if skip else chunk  # where the numbers of this chunk's rows lie
        if arrive is not None:
            arrive(chunk)
        e_i, columns_i = rows_of(own, e), rows_of(own, columns)
        z_i = target_logits(e_i, c, bias, columns_i, o) if z_target is None else rows_of(own, z_target)
        w_i = _corner(early.w, height, c.shape[0])
        row_sums = exponentials(e_i, c, bias, columns_i, z_i, w_i, with_metrics, o, live=live, gathered=gathered)
        if first == 0:  # after the first launches, so that the device computes while the host allocates
            held, sums = empty_state(e, c, rows, dtypes, o, early, with_lse, skip, targets)
            lse, nll = (e.new_empty(n_rows, dtype=torch.float32) for _ in range(2))
            metrics = empty_metrics(lse, with_metrics)
        largest = torch.empty_like(z_i) if with_metrics and settle is not None else None
        metrics_i = metrics if skip else empty_metrics(z_i, with_metrics)
        part = Rows(rows_of(own, lse), rows_of(own, nll), None, metrics_i, largest)
        weights_i = None if weights is None else rows_of(own, weights)
        factor, coefficient = rows_of(own, held.factor), rows_of(own, held.coefficient)
        gradient = Gradient(w_i, factor, coefficient, held.of_lse, weights_i)
        finish_rows(e_i, c, bias, columns_i, z_i, row_sums, part, o, gradient, live)
        if settle is not None:
            settle(chunk, part, gradient)
        if not skip and metrics is not None and metrics_i is not None:
            metrics[:, chunk] = metrics_i
        if chunk.stop < n_rows:
            _add_products(w_i, e_i, c, held, sums, chunk, live, gathered)
    if held.keys is not None:  # sorted last, because only the backward pass needs the order
        by_target: tuple[Any, Any, Any] = held.keys, held.order, held.bounds
        every = columns if several is None else several.behind(columns).flatten()
        order_by_target(every, *by_target, _tile_entries(e))
    z_above_mean = None
    if held.c_sum is not None:
        assert z_target is not None
        z_above_mean = above_mean_logit(z_target, e, held.c_sum.copy_(column_sum(c)), bias, c.shape[0], o)
    return Rows(lse, nll, z_above_mean, metrics), held, sums


def _tile_entries(e: Tensor) -> int:
    """Vocabulary entries of a tile of dC."""
    return transposed_tiles(e, e.shape[1], e.shape[0]).rows


def _live(rows_live: Tensor | None, counts: Tensor | None, chunk: slice, rows: int) -> Live:
    """The order of the rows of a chunk, of `rows` positions at most."""
    if rows_live is None or counts is None:
        return ALL
    return Live(rows_of(chunk, rows_live), counts[chunk.start // rows], counts[-1], chunk.start)


def backward(
    e: Tensor, c: Tensor, columns: Tensor, scale: Tensor, rows: int, held: Held, sums: GradientSums,
    main_grad_c: Tensor | None, o: Options, finished: Callable[[slice], None] | None = None,
    grad_lse: Tensor | None = None, weights: Tensor | None = None, several: Several | None = None,
) -> None:  # fmt: skip
    """Finish the gradients of e, c and bias in place, in `sums`.

    main_grad_c, if given, gets dC.

    Args:
        e, c, columns, rows: as for `forward`.
        scale: () fp32, dL/dloss; or (N,), dL/d(row loss), with one chunk.
        held, sums: from `forward`; sums are overwritten.
        o: as for `forward`.
        finished: called with a range of rows once their gradient of e is complete. The first call covers all chunks
            but the last, and comes before the last chunk's products.
        weights, several: as for `forward`.
        grad_lse: (N,), dL/dLSE, or None. Only with one chunk, and `with_lse` in the forward pass.
    """
    factor, coefficient, n_rows = held.factor, held.coefficient, e.shape[0]
    first = (cdiv(n_rows, rows) - 1) * rows  # first row of the last chunk
    end: Tensor | None = scale  # what the last launch multiplies by
    if scale.dim() or grad_lse is not None:
        assert first == 0
        factor, coefficient = row_factors(scale, grad_lse, factor, coefficient, held.of_lse)
        end = None
    share = smooth_c = None
    if held.c_sum is not None:
        grad_loss = scale if end is None else torch.ones_like(scale)
        share = smoothed_share(grad_loss, columns, weights, c.shape[0], o)
        smooth_c = None if sums.grad_c is None else RankOne(None, column_sum(e, share))
    by_target: tuple[Any, Any, Any] = held.keys, held.order, held.bounds
    if several is not None:
        added = several.gradient(scale if end is None else torch.ones_like(scale), o) * o.logit_scale
        added[:, 0] += coefficient
        columns, coefficient = several.behind(columns), added
    last = LastChunk(
        e, c, columns, _corner(held.w, n_rows - first, c.shape[0]), factor, coefficient, end, share, held.c_sum,
        smooth_c, None if held.keys is None else TargetTerms._make((*by_target, coefficient, e)), main_grad_c,
        _live(held.live, held.counts, slice(first, n_rows), rows),
    )  # fmt: skip
    if sums.grad_bias is not None:
        _add_to_bias(sums.grad_bias, last.w, rows_of(slice(first, n_rows), factor), first)
        everywhere = None if share is None else share.sum()
        finish_bias_gradient(sums.grad_bias, *by_target, _tile_entries(e), coefficient, everywhere, end, o)
    if first:
        finish_several(last, slice(first, n_rows), sums, finished)
    else:
        finish_one(last, sums.grad_e, sums.grad_c)
        if finished is not None and sums.grad_e is not None:
            finished(slice(0, n_rows))


class _Early(NamedTuple):
    """The tensors of `Held` that the first kernels write.

    grad_e: memory for dE, if it holds copies of e's rows until dE is written; else None.
    """

    w: Tensor
    rows_live: Tensor | None
    counts: Tensor | None
    grad_e: Tensor | None


def _early(e: Tensor, c: Tensor, rows: int, dtype_e: torch.dtype | None, skip: bool) -> _Early:
    n_rows = e.shape[0]
    w = e.new_empty(min(rows, n_rows), cdiv(c.shape[0], 16) * 16)  # TMA reads rows that start at 16 bytes
    if not skip:
        return _Early(w, None, None, None)
    lends = dtype_e is not None and rows >= n_rows and lends_to_e(e)
    return _Early(
        w, e.new_empty(n_rows, dtype=torch.int64), e.new_empty(cdiv(n_rows, rows) + 1, dtype=torch.int32),
        e.new_empty(e.shape, dtype=dtype_e) if lends else None,
    )  # fmt: skip


def empty_state(
    e: Tensor, c: Tensor, rows: int, dtypes: Dtypes, o: Options,
    early: _Early | None = None, with_lse: bool = False, skip: bool = False, targets: int = 1,
) -> tuple[Held, GradientSums]:  # fmt: skip
    """What `forward` hands to `backward`, without values. early: tensors that exist already. targets: of a row."""
    early = early or _early(e, c, rows, dtypes[0], skip)
    (n_rows, dim), vocab = e.shape, c.shape[0]
    dtype_e, dtype_c, dtype_bias = dtypes
    height = min(rows, n_rows)
    first = (cdiv(n_rows, rows) - 1) * rows  # of the last chunk
    accumulate = o.accumulate if first else "bf16"  # one chunk: nothing is summed
    row_numbers = [e.new_empty(n_rows, dtype=torch.float32) for _ in range(2)]
    of_lse = e.new_empty(2, n_rows, dtype=torch.float32) if with_lse else None
    c_sum = e.new_empty(dim, dtype=torch.float32) if o.label_smoothing else None
    parts = sum_e = sum_c = keys = order = bounds = None
    if dtype_e is not None:
        splits = splits_beside(height, dim, multiprocessors(e), n_rows) if first else 1
        if splits > 1:
            parts = e.new_empty(splits, n_rows, dim, dtype=torch.float32)
        lost_rows = (n_rows if skip else first) if parts is None else 0
        sum_e = Accumulator(e, (n_rows, dim), dtype_e, accumulate, lost_rows, early.grad_e)
    if dtype_c is not None or dtype_bias is not None:
        keys, order = (e.new_empty(n_rows * targets, dtype=dtype) for dtype in (torch.int32, torch.int64))
        bounds = keys.new_empty(cdiv(vocab, _tile_entries(e)) + 1)
    if dtype_c is not None:
        sum_c = Accumulator(e, (vocab, dim), dtype_c, accumulate)
    sum_bias = None if dtype_bias is None else e.new_empty(vocab, dtype=torch.float32)
    sums = [part for total in (sum_e, sum_c) for part in ((None, None) if total is None else (total.value, total.lost))]
    orders = keys, order, bounds, early.rows_live, early.counts
    return Held._make((early.w, *row_numbers, of_lse, c_sum, *orders)), GradientSums._make((parts, *sums, sum_bias))


def _corner(x: Tensor, rows: int, cols: int) -> Tensor:
    """The first rows and columns of x."""
    return x if x.shape[0] == rows and x.shape[1] == cols else x[:rows, :cols]


def _add_to_bias(total: Tensor, w: Tensor, factor: Tensor, first: int) -> None:
    """Add Σ factor_i w_iv of the chunk of rows that begins with `first` to total (V,)."""
    part = column_sum(w, factor)
    if first == 0:
        total.copy_(part)
    else:
        total += part


def _add_products(
    w: Tensor, e: Tensor, c: Tensor, held: Held, sums: GradientSums, chunk: slice, live: Live, home: Tensor | None
) -> None:
    """Multiply a chunk of rows, not the last: store w C, and add wᵀ (scaled e) to dC, without the targets' entries.

    The same for the bias: add the columns' sums of w times its factors. e: the chunk's rows; with live rows all rows,
    and `home` is memory for the chunk's.
    """
    if sums.grad_bias is not None:
        _add_to_bias(sums.grad_bias, w, held.factor[chunk], chunk.start)
    rows = chunk if live.rows is None else slice(0, len(e))  # of all rows
    scaled = None if sums.grad_c is None else scaled_rows(e, held.factor[rows], home, live)
    if sums.grad_e is not None:
        store_hidden(w, c, sums.parts, sums.grad_e, sums.lost_e, rows, live)
    if scaled is not None and sums.grad_c is not None:
        product(
            w, scaled, sums.grad_c, sums.lost_c, transpose_a=True, read=chunk.start > 0,
            beside=sums.grad_e is not None, live=live,
        )  # fmt: skip
