"""Scaled exponentials: the forward pass and, if asked for, the matrix that the backward products multiply.

    w_iv = 2^(z_iv log2 e − k_i)    z = softcap(scale · E Cᵀ + bias)    S_i = Σ_v w_iv    LSE_i = ln 2 (log2 S_i + k_i)

The offset k_i = z_i,target log2 e + 60 is known before the product: no running maximum, no second look at the
logits for p_iv = w_iv / S_i. bf16 has the exponents of fp32, so w keeps its relative precision at any size. S_i
lies within [2^-60, 2^60] while the row's loss is below 83 nats; rows beyond that are seen on the device and
done again, slowly (finish.py). For fp32 operands the offset is z_i,target alone, subtracted first: the 60 would cost
bits that count there, and 42 nats are enough.

`target_logits_kernel` takes the target's logit from the tensor cores, as the sums do: a logit from plain
multiply-adds differs from them by the tensor cores' rounding, 2e-5 of the loss.

`exponentials_kernel` cuts the work into units of BLOCK_N rows × one split of the vocabulary, shared out among
persistent programs. The loop over a unit's tiles and the summed dimension is one loop, so that the next tile's
operands arrive while the exponentials of this one are taken. Each row's sum stays in registers; one partial per row
and split is stored. No locks, no atomics: deterministic.

Cost: N D V multiply-adds on the tensor cores; writes 4 bytes × N × splits (at most 32) and, if asked for, w.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import hopper
from .columns import columns_of
from .epilogues import exponentials_of, figures_of, is_unlisted
from .launch import quick
from .options import Options
from .rows import IGNORED, OUTSIDE
from .schemes import most_splits
from .tiles import (
    GROUP,
    Tiles,
    cdiv,
    descriptor,
    grouped,
    logits_tiles,
    multiprocessors,
    softcapped,
    tiles_for,
)

MIN_SPLITS = 8  # fewer, and the row tiles at work at one time would not fit L2 together
ROWS = 64  # of a program of target_logits_kernel


@quick
@triton.jit(do_not_specialize=["targets_stride", "N", "V", "D", "ignore_index"])
def target_logits_kernel(
    e_ptr,  # (N, D), rows e_stride apart
    c_ptr,  # (V, D), rows c_stride apart
    bias_ptr,  # (V,) or None
    targets_ptr,  # (N,) int64, targets_stride apart: what the columns are written from, or None where they are there
    columns_ptr,  # (N,) int64; where negative, column 0 stands in
    z_ptr,  # (N,) fp32, written
    e_stride,
    c_stride,
    targets_stride,
    N,
    V,
    D,
    ignore_index,
    logit_scale,
    softcap,
    IGNORED: tl.constexpr,
    OUTSIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """z_i of the target: the diagonal of a product with the targets' rows of C."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if targets_ptr is None:
        column = tl.load(columns_ptr + rows, mask=rows < N, other=0)
    else:
        column = columns_of(targets_ptr, rows, targets_stride, N, V, ignore_index, IGNORED, OUTSIDE)
        tl.store(columns_ptr + rows, column, mask=rows < N)
    column = tl.where(column < 0, 0, column)
    acc = tl.zeros((BLOCK_N, BLOCK_N), dtype=tl.float32)
    for d in range(0, D, BLOCK_D):
        dims = d + tl.arange(0, BLOCK_D)
        mask = (rows < N)[:, None] & (dims < D)[None, :]
        e = tl.load(e_ptr + rows.to(tl.int64)[:, None] * e_stride + dims[None, :], mask=mask, other=0.0)
        c = tl.load(c_ptr + column[:, None] * c_stride + dims[None, :], mask=(dims < D)[None, :], other=0.0)
        acc = tl.dot(e, c.T, acc, input_precision="ieee")
    index = tl.arange(0, BLOCK_N)
    z = tl.sum(tl.where(index[:, None] == index[None, :], acc, 0.0), axis=1) * logit_scale
    if bias_ptr is not None:
        z += tl.load(bias_ptr + column).to(tl.float32)
    if HAS_SOFTCAP:
        z = softcapped(z, softcap)
    tl.store(z_ptr + rows, z, mask=rows < N)


@quick
@triton.jit(do_not_specialize=["N", "D", "splits", "tiles_per_split"])
def exponentials_kernel(
    e_desc,  # (N, D)
    c_desc,  # (V, D)
    w_desc,  # (N, V) or None: w · slope of the softcap, written
    bias_ptr,  # (V,) or None
    columns_ptr,  # (N,) int64, -1 where ignored, -2 where outside the vocabulary
    z_target_ptr,  # (N,) fp32
    sum_ptr,  # (splits, N) fp32: of w, written
    z_sum_ptr,  # (splits, N) fp32 or None: of z, written
    metrics_ptr,  # (2, splits, N) fp32 or None: largest z but the target's, sum of w (z − z_target), written
    figures_ptr,  # (N, ⌈V / HALF⌉) int64 or None: of each half tile's row of w, see Blocks, written
    unlisted_ptr,  # bits or None: columns whose w is written as 0, see Blocks
    N,
    V,
    D,
    splits,
    tiles_per_split,
    logit_scale,
    softcap,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    EVEN_V: tl.constexpr,  # BLOCK_V divides V
):
    row_tiles = tl.cdiv(N, BLOCK_N)
    depth = tl.cdiv(D, BLOCK_D)
    HALF: tl.constexpr = BLOCK_V // 2
    PRECISE: tl.constexpr = e_desc.dtype == tl.float32
    for unit in range(tl.program_id(0), row_tiles * splits, tl.num_programs(0)):
        row_tile, split = grouped(unit, row_tiles, splits, GROUP)
        row = row_tile * BLOCK_N
        rows = row + tl.arange(0, BLOCK_N)
        column = tl.load(columns_ptr + rows, mask=rows < N, other=-1).to(tl.int32)
        z_target = tl.load(z_target_ptr + rows, mask=rows < N, other=0.0)
        total = tl.zeros((BLOCK_N,), dtype=tl.float32)
        z_total = tl.zeros((BLOCK_N,), dtype=tl.float32)
        largest = tl.full((BLOCK_N,), float("-inf"), dtype=tl.float32)
        wz_total = tl.zeros((BLOCK_N,), dtype=tl.float32)
        first = split * tiles_per_split * BLOCK_V
        end = tl.minimum(first + tiles_per_split * BLOCK_V, V)
        acc = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)
        for step in range(tl.cdiv(end - first, BLOCK_V) * depth):
            col = first + step // depth * BLOCK_V
            d = step % depth * BLOCK_D
            acc = tl.dot(e_desc.load([row, d]), c_desc.load([col, d]).T, acc, input_precision="ieee")
            if step % depth == depth - 1:  # half a tile at a time: fewer registers, less to stage for the store
                left, right = tl.split(acc.reshape((BLOCK_N, 2, HALF)).permute(0, 2, 1))
                cols = col + tl.arange(0, HALF)
                w, total, z_total, largest, wz_total = exponentials_of(
                    left, cols, column, z_target, bias_ptr, V, logit_scale, softcap, total, z_total, largest, wz_total,
                    HAS_SOFTCAP, EVEN_V, PRECISE, z_sum_ptr is not None, metrics_ptr is not None,
                )  # fmt: skip
                if unlisted_ptr is not None:
                    w = tl.where(is_unlisted(unlisted_ptr, cols, V)[None, :] != 0, 0.0, w)
                if figures_ptr is not None:
                    figures_ptrs = figures_ptr + rows.to(tl.int64) * tl.cdiv(V, HALF) + col // HALF
                    tl.store(figures_ptrs, figures_of(w), mask=rows < N)
                if w_desc is not None:
                    w_desc.store([row, col], w.to(w_desc.dtype))
                w, total, z_total, largest, wz_total = exponentials_of(
                    right, cols + HALF, column, z_target, bias_ptr, V, logit_scale, softcap, total, z_total, largest,
                    wz_total, HAS_SOFTCAP, EVEN_V, PRECISE, z_sum_ptr is not None, metrics_ptr is not None,
                )  # fmt: skip
                if unlisted_ptr is not None:
                    w = tl.where(is_unlisted(unlisted_ptr, cols + HALF, V)[None, :] != 0, 0.0, w)
                if figures_ptr is not None:  # noqa: SIM102 (known to the compiler, unlike the next)
                    if col + HALF < V:
                        tl.store(figures_ptrs + 1, figures_of(w), mask=rows < N)
                if w_desc is not None:
                    w_desc.store([row, col + HALF], w.to(w_desc.dtype))
                acc = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)
        partial = split.to(tl.int64) * N + rows
        tl.store(sum_ptr + partial, total, mask=rows < N)
        if z_sum_ptr is not None:
            tl.store(z_sum_ptr + partial, z_total, mask=rows < N)
        if metrics_ptr is not None:
            tl.store(metrics_ptr + partial, largest, mask=rows < N)
            tl.store(metrics_ptr + splits.to(tl.int64) * N + partial, wz_total, mask=rows < N)


def target_logits(e: Tensor, c: Tensor, bias: Tensor | None, columns: Tensor, o: Options) -> Tensor:
    """z (N,) fp32 of each row's target; rows without one get column 0's."""
    return _target_logits(e, c, bias, None, 0, columns, o)


def find_targets(
    e: Tensor, c: Tensor, bias: Tensor | None, targets: Tensor, ignore_index: int, o: Options
) -> tuple[Tensor, Tensor]:
    """Each row's target column (N,) int64 (see rows.py) and its logit (N,) fp32, in one launch."""
    columns = targets.new_empty(targets.shape)
    return columns, _target_logits(e, c, bias, targets, ignore_index, columns, o)


def _target_logits(
    e: Tensor, c: Tensor, bias: Tensor | None, targets: Tensor | None, ignore_index: int, columns: Tensor, o: Options
) -> Tensor:
    n_rows, dim = e.shape
    z = e.new_empty(n_rows, dtype=torch.float32)
    target_logits_kernel[(cdiv(n_rows, ROWS),)](
        e, c, bias, targets, columns, z, e.stride(0), c.stride(0), 0 if targets is None else targets.stride(0),
        n_rows, c.shape[0], dim, ignore_index, float(o.logit_scale), float(o.softcap or 0),
        IGNORED, OUTSIDE, ROWS, tiles_for(e.dtype).inner, o.softcap is not None, num_warps=4,
    )  # fmt: skip
    return z


@dataclass(frozen=True)
class Sums:
    """Partial sums over the vocabulary, fp32, one a split: of w (splits, N); of z, with label smoothing; the metrics'
    parts (2, splits, N), if asked for."""

    w: Tensor
    z: Tensor | None
    metrics: Tensor | None


@dataclass(frozen=True)
class Blocks:
    """What says of a part of a row of w whether it is worth a look.

    figures: (N, ⌈V / width⌉) int64, written: of each row and block of `width` columns the largest w and the sum, fp32,
    in the upper and the lower half. unlisted: (8 ⌈V / 256⌉,) int32 or None: a bit a column, set for those whose w is
    written as 0 and counts in the row's sum alone. Column v has bit 2 (v / 8 mod 16) + v mod 2 of the number
    4 (v / 128) + v / 2 mod 4: one lane of the tensor cores' layout has its bits together.
    """

    figures: Tensor
    unlisted: Tensor | None
    width: int

    @classmethod
    def empty(cls, e: Tensor, rows: int, vocab: int, unlisted: Tensor | None, with_metrics: bool, o: Options) -> Blocks:
        """For exponentials of `rows` rows of e at a time, without bias."""
        width = _tiles(e, None, with_metrics, o)[0].cols // 2
        return cls(e.new_empty((rows, cdiv(vocab, width)), dtype=torch.int64), unlisted, width)

    def rows(self, height: int) -> Blocks:
        """Of the first `height` rows."""
        return replace(self, figures=self.figures[:height])


def _tiles(e: Tensor, bias: Tensor | None, with_metrics: bool, o: Options) -> tuple[Tiles, bool]:
    """Tiles of the exponentials, and whether Hopper's own kernel makes them."""
    on_hopper = bias is None and o.softcap is None and not o.label_smoothing and not with_metrics and hopper.fits(e)
    return (hopper.logits_tiles(e.shape[1]) if on_hopper else logits_tiles(e.dtype, e.shape[1])), on_hopper


def exponentials(
    e: Tensor,
    c: Tensor,
    bias: Tensor | None,
    columns: Tensor,
    z_target: Tensor,
    w: Tensor | None,
    with_metrics: bool,
    o: Options,
    unread: Tensor | None = None,
    blocks: Blocks | None = None,
) -> Sums:
    """The sums; writes w (N, V) unless it is None, and what `blocks` says. Where `unread` () int32 is 1 nobody will
    read w: it may be left."""
    (n_rows, dim), vocab = e.shape, c.shape[0]
    with_z = o.label_smoothing > 0
    tiles, on_hopper = _tiles(e, bias, with_metrics, o)
    figures, unlisted = (None, None) if blocks is None else (blocks.figures, blocks.unlisted)
    programs = multiprocessors(e) * tiles.resident
    splits, tiles_per_split = split_columns(cdiv(n_rows, tiles.rows), cdiv(vocab, tiles.cols), programs)
    sums = e.new_empty((splits, n_rows), dtype=torch.float32)
    if on_hopper:
        pointers = (z_target, sums, unread, figures, unlisted)
        hopper.exponentials(programs, e, c, w, pointers, splits, tiles_per_split, float(o.logit_scale))
        return Sums(sums, None, None)
    z_sums = torch.empty_like(sums) if with_z else None
    metrics = e.new_empty((2, splits, n_rows), dtype=torch.float32) if with_metrics else None
    exponentials_kernel[(programs,)](
        descriptor(e, tiles.rows, tiles.inner),
        descriptor(c, tiles.cols, tiles.inner),
        None if w is None else descriptor(w, tiles.rows, tiles.cols // 2),
        bias, columns, z_target, sums, z_sums, metrics, figures, unlisted, n_rows, vocab, dim, splits, tiles_per_split,
        float(o.logit_scale), float(o.softcap or 0),
        tiles.rows, tiles.cols, tiles.inner, GROUP, o.softcap is not None, vocab % tiles.cols == 0,
        **tiles.launch,
    )  # fmt: skip
    return Sums(sums, z_sums, metrics)


@lru_cache
def split_columns(row_tiles: int, col_tiles: int, programs: int) -> tuple[int, int]:
    """(splits, column tiles per split) with the shortest longest program; no split is empty."""

    def longest(tiles_per_split: int) -> int:
        units = row_tiles * cdiv(col_tiles, tiles_per_split)
        return cdiv(units, programs) * tiles_per_split

    most = max(1, col_tiles // MIN_SPLITS)
    least = cdiv(col_tiles, most_splits(row_tiles, programs))
    tiles_per_split = min(range(least, max(least, most) + 1), key=longest)
    return cdiv(col_tiles, tiles_per_split), tiles_per_split
