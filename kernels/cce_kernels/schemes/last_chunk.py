"""The last chunk of three products: its products finish both gradients, in the backward pass.

Cost and memory: three_products.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..planner import fits_vocab, splits_alone, splits_beside
from ..runtime.tiles import cdiv, in_eights, multiprocessors, power_of_2
from ..saved import GradientSums
from ..triton.matmul import RankOne, RowTerms, TargetTerms, product
from ..triton.targets.live_rows import Live
from .stored_rows import hidden_kernel, rows_of, scaled_rows


class LastChunk(NamedTuple):
    """What the last chunk's products take: arguments of three_products.backward, and tensors of its state."""

    e: Tensor
    c: Tensor
    columns: Tensor  # (N,) or, of several targets a row, (N, K)
    w: Tensor  # (rows of the chunk, V)
    factor: Tensor  # (N,) fp32
    coefficient: Tensor  # like columns, fp32
    end: Tensor | None  # () fp32, what the finished gradients are multiplied by
    share: Tensor | None  # (N,) fp32, `smoothed_share`, for label smoothing
    c_sum: Tensor | None  # (D,) fp32, for label smoothing
    smooth_c: RankOne | None
    targets_c: TargetTerms | None
    main_grad_c: Tensor | None
    live: Live  # the order of w's rows

    def smooth_e(self, part: slice) -> RankOne | None:
        """What label smoothing adds to dE of the rows `part`."""
        return None if self.share is None or self.c_sum is None else RankOne(rows_of(part, self.share), self.c_sum)


def lends_to_e(e: Tensor) -> bool:
    """Whether one chunk lends dE's memory to rows of e (N, D) until dE is written."""
    return splits_alone(len(e), e.shape[1], multiprocessors(e)) == 1


def finish_one(x: LastChunk, grad_e: Tensor | None, grad_c: Tensor | None) -> None:
    """Both gradients of one chunk: one after the other, or side by side (planner.splits_alone)."""
    (n_rows, dim), programs, every = x.e.shape, multiprocessors(x.e), slice(0, len(x.e))
    alone = 1 if grad_e is None else splits_alone(n_rows, dim, programs)
    if grad_e is None or alone == 1:  # e times its factors lies in dE's memory, which is written last
        if grad_c is not None:
            _multiply_c(x, scaled_rows(x.e, x.factor, grad_e, x.live), grad_c)
        if grad_e is not None:
            _multiply_e(x, None, grad_e)
        return
    parts, splits = None, alone or splits_beside(n_rows, dim, programs, n_rows)
    if splits > 1:  # alone, they lie in dC's memory, which is written last
        lends = alone and grad_c is not None and fits_vocab(n_rows, len(x.c), grad_c.dtype, splits)
        parts = _memory(x.e, (splits, *x.e.shape), torch.float32, grad_c if lends else None)
    # Side by side it comes before dE's product, because dC's product runs beside that.
    scaled = None if alone or grad_c is None else scaled_rows(x.e, x.factor, None, x.live)
    _multiply_e(x, parts, grad_e)
    if alone and parts is not None:
        _finish_e(x, parts, None, grad_e, every)
    if grad_c is not None:
        scaled = scaled_rows(x.e, x.factor, None, x.live) if scaled is None else scaled
        _multiply_c(x, scaled, grad_c, beside=not alone)
    if not alone and parts is not None:
        _finish_e(x, parts, None, grad_e, every)


def _multiply_e(x: LastChunk, parts: Tensor | None, grad_e: Tensor) -> None:
    """w C of one chunk into its parts, if given; else finished into dE."""
    if parts is not None:
        product(x.w, x.c, parts, live=x.live)
        return
    terms, smooth = RowTerms(x.factor, x.coefficient, x.columns, x.c), x.smooth_e(slice(0, len(x.e)))
    product(x.w, x.c, grad_e, scale=x.end, row_terms=terms, rank_one=smooth, live=x.live)


def _multiply_c(x: LastChunk, scaled: Tensor, grad_c: Tensor, beside: bool = False) -> None:
    """dC of one chunk, finished. scaled: (N, D), e times its factors. beside: as for `product`."""
    product(
        x.w, scaled, grad_c, transpose_a=True, scale=x.end, into=x.main_grad_c, beside=beside, live=x.live,
        target_terms=x.targets_c, rank_one=x.smooth_c,
    )  # fmt: skip


def finish_several(x: LastChunk, last: slice, sums: GradientSums, finished: Callable[[slice], None] | None) -> None:
    """Add the last chunk, the rows `last`, to the sums of both gradients, and finish them."""
    parts_e, grad_e, lost_e, grad_c, lost_c, _ = sums

    def finish_e(part: slice) -> None:
        assert grad_e is not None
        parts = grad_e[None, part] if parts_e is None else parts_e[:, part]
        _finish_e(x, parts, None if lost_e is None else lost_e[part], grad_e, part)
        if finished is not None:
            finished(part)

    # The product can finish the last chunk's rows if they are no parts, and lie together in dE.
    finishes = parts_e is None and x.live.rows is None
    own = last if x.live.rows is None else slice(0, len(x.e))  # rows of the last chunk's tensors
    scaled = None if grad_c is None else scaled_rows(x.e[own], x.factor[own], None, x.live)
    if grad_e is not None:
        if finished is not None:
            finish_e(slice(0, last.start))
        if finishes:
            terms = RowTerms(x.factor[last], x.coefficient[last], x.columns[last], x.c)
            product(x.w, x.c, grad_e[last], scale=x.end, row_terms=terms, rank_one=x.smooth_e(last))
        else:
            store_hidden(x.w, x.c, parts_e, grad_e, lost_e, own, x.live)
    if grad_c is not None:
        assert scaled is not None
        product(
            x.w, scaled, grad_c, lost_c, transpose_a=True, read=True, scale=x.end, into=x.main_grad_c,
            beside=grad_e is not None, live=x.live, target_terms=x.targets_c, rank_one=x.smooth_c,
        )  # fmt: skip
    if grad_e is not None:
        begin, end = 0 if finished is None else last.start, last.start if finishes else last.stop
        if begin < end:
            finish_e(slice(begin, end))
        if finishes and finished is not None:
            finished(last)


def store_hidden(
    w: Tensor, c: Tensor, parts: Tensor | None, grad_e: Tensor, lost: Tensor | None, rows: slice, live: Live,
) -> None:  # fmt: skip
    """Store w C of a chunk: in its parts, or in dE with its rounding error. With live rows, `rows` are all rows."""
    if parts is not None:
        product(w, c, parts[:, rows], live=live)
    else:
        product(w, c, grad_e[rows], None if lost is None else lost[rows], live=live)


def _finish_e(x: LastChunk, parts: Tensor, lost: Tensor | None, grad_e: Tensor, part: slice) -> None:
    """grad_e of the rows `part` from their parts of w C (splits, rows, D) and its rounding error."""
    n_rows, dim = parts.shape[1:]
    block_d = min(256, power_of_2(dim))
    left, right = x.smooth_e(part) or (None, None)
    hidden_kernel[(cdiv(n_rows, 16), cdiv(dim, block_d))](
        parts, lost, x.c, rows_of(part, x.columns), rows_of(part, x.factor), rows_of(part, x.coefficient), left, right,
        x.end, rows_of(part, grad_e), x.c.stride(0), parts.stride(0), n_rows, dim, parts.shape[0], 16, block_d,
        in_eights(dim, x.c.stride(0), parts.stride(0)), x.columns.numel() // len(x.columns),
    )  # fmt: skip


def _memory(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype, lent: Tensor | None) -> Tensor:
    """Memory of that shape and dtype: the beginning of `lent` (contiguous), or memory of its own."""
    if lent is None:
        return like.new_empty(shape, dtype=dtype)
    return lent.view(-1)[: math.prod(shape) * dtype.itemsize // lent.itemsize].view(dtype).view(shape)
