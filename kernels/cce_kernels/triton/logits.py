"""Scaled exponentials of the logits: their sums for the loss and, if asked for, the matrix w for the backward pass.

    w_iv = 2^(z_iv log2 e − k_i), 0 at the target    z = softcap(scale · E Cᵀ + bias)    R_i = Σ_v w_iv
    S_i = R_i + w_it    loss_i = ln(1 + R_i / w_it)    LSE_i = z_it + loss_i    p_iv = w_iv / S_i

t is row i's target. The offset k_i = z_it log2 e + 60 is known before the product, so no running maximum is needed.

Why the target is left out of R: if the model is sure of a token, R_i alone determines the loss. A sum with the target's
exponential in it would keep no digit of R_i.

Range: bf16 has the exponents of fp32, so w keeps its relative precision at any size. S_i lies within [2^-60, 2^60]
while the row's loss is below 83 nats. The device detects rows beyond that range and computes them again, slowly
(row_stats.py). For fp32 operands the offset is z_it alone, subtracted before the scaling. Adding 60 would cost bits
that fp32 results need, and a loss up to 42 nats is range enough.

`target_logits_kernel` takes the target's logit from the tensor cores, because the sums come from them, too. A logit
from plain multiply-adds would differ by the tensor cores' rounding, 2e-5 of the loss.

`exponentials_kernel` is persistent. A unit of work is BLOCK_N rows × one split of the vocabulary. One loop runs over
both the unit's tiles and the summed dimension, so that the next tile's operands arrive while this tile's exponentials
are computed. A row's sum stays in registers, and each split stores one partial sum a row. The result needs no locks or
atomics and is deterministic.

Cost: N D V multiply-adds on the tensor cores; writes 4 bytes × N × splits (`exponentials` bounds them) and, if
asked for, w.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..options import Options
from ..planner import most_splits
from ..row_math import IGNORED, OUTSIDE
from ..runtime.launch import Descriptor, quick
from ..runtime.tiles import GROUP, by_eights, cdiv, grouped, hopper_tiles, in_eights, logits_tiles, multiprocessors
from . import hopper
from .epilogues import SKIPPED, exponentials_of, softcapped
from .targets.live_rows import ALL, Live, gather

MIN_SPLITS = 8  # with fewer splits the row tiles in use at one time would not fit L2 together
MOST_PARTIALS = 2**20  # partial sums of a statistic, one for each row and split
UNIT_COST = 64  # what the begin and end of a unit of work cost: this many dimensions of a tile
# target_logits_kernel: rows of a program, and what part of D it multiplies in one step, by bytes of a number. Few rows
# and long steps, because a program waits for memory once a step.
ROWS, INNER = 16, {2: 256, 4: 32}


@triton.jit
def columns_of(
    targets_ptr, rows, stride, N, V, ignore_index, IGNORED: tl.constexpr, OUTSIDE: tl.constexpr
):  # fmt: skip
    """The target columns of `rows` from the targets (N,), stride apart: a column, IGNORED or OUTSIDE."""
    target = tl.load(targets_ptr + rows.to(tl.int64) * stride, mask=rows < N, other=0)
    column = tl.where((target >= 0) & (target < V), target, OUTSIDE)
    return tl.where(target == ignore_index, IGNORED, column)


@quick
@triton.jit(do_not_specialize=["targets_stride", "N", "V", "ignore_index"])
def target_logits_kernel(
    e_ptr,  # (N, D), rows e_stride apart
    c_ptr,  # (V, D), rows c_stride apart
    bias_ptr,  # (V,) or None
    targets_ptr,  # (N,) int64, targets_stride apart, or None: target columns are read from columns_ptr
    columns_ptr,  # (N,) int64, each row's target column; written if targets_ptr is given
    z_ptr,  # (N,) fp32, the target's logit, written; SKIPPED for ignored rows if SKIP
    e_stride, c_stride, targets_stride, N, V, D, ignore_index, logit_scale, softcap,
    IGNORED: tl.constexpr, OUTSIDE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, SKIP: tl.constexpr,
    EIGHTS: tl.constexpr,  # see runtime/tiles.by_eights
    TARGETS: tl.constexpr,  # of a row of e: rows, targets, columns and z count N = TARGETS x rows of e
):  # fmt: skip
    """The target's logit of each row: the diagonal of the product of E with the targets' rows of C.

    A row without a target takes another column's logit.
    """
    D, e_stride, c_stride = by_eights(D, EIGHTS), by_eights(e_stride, EIGHTS), by_eights(c_stride, EIGHTS)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = rows < N
    if targets_ptr is None:
        column = tl.load(columns_ptr + rows, mask=inside, other=0)
    else:
        column = columns_of(targets_ptr, rows, targets_stride, N, V, ignore_index, IGNORED, OUTSIDE)
        tl.store(columns_ptr + rows, column, mask=inside)
    ignored = column == IGNORED
    column = tl.where(column < 0, rows % V, column)  # differs by row: one column may be padding with tiny logits
    acc = tl.zeros((BLOCK_N, BLOCK_N), dtype=tl.float32)
    for d in range(0, D, BLOCK_D):
        dims = d + tl.arange(0, BLOCK_D)
        mask = inside[:, None] & (dims < D)[None, :]
        e = tl.load(e_ptr + (rows // TARGETS).to(tl.int64)[:, None] * e_stride + dims[None, :], mask=mask, other=0.0)
        c = tl.load(c_ptr + column[:, None] * c_stride + dims[None, :], mask=(dims < D)[None, :], other=0.0)
        acc = tl.dot(e, c.T, acc, input_precision="ieee")
    index = tl.arange(0, BLOCK_N)
    z = tl.sum(tl.where(index[:, None] == index[None, :], acc, 0.0), axis=1) * logit_scale
    if bias_ptr is not None:
        z += tl.load(bias_ptr + column).to(tl.float32)
    if HAS_SOFTCAP:
        z = softcapped(z, softcap)
    if SKIP:
        z = tl.where(ignored, SKIPPED, z)
    tl.store(z_ptr + rows, z, mask=inside)


@quick
@triton.jit(do_not_specialize=["N", "D", "splits", "tiles_per_split"])
def exponentials_kernel(
    e_desc,  # (N, D)
    c_desc,  # (V, D)
    w_desc,  # (N, V) or None: w · slope of the softcap, written
    bias_ptr,  # (V,) or None
    columns_ptr,  # (N,) int64 or None: each row's target column (negative for none), left out of w and its sum
    z_target_ptr,  # (N,) fp32, the target's logit
    live_ptr,  # (N,) int64 or None: the row at each position of e, w and the sums (targets/live_rows.py)
    count_ptr,  # () int32, given with live_ptr: how many positions count; the others are not computed
    sum_ptr,  # (splits, N) fp32, the sum of w over a split, written
    z_sum_ptr,  # (splits, N) fp32 or None: the sum of z over a split, written
    metrics_ptr,  # (2, splits, N) fp32 or None: the largest w; the sum of w (z − z_target) log2 e; written
    N, V, D, splits, tiles_per_split, logit_scale, softcap,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    EVEN_V: tl.constexpr,  # BLOCK_V divides V
):  # fmt: skip
    """Sums of w over each split of the vocabulary and, if asked for, w itself."""
    count = N
    if live_ptr is not None:
        count = tl.load(count_ptr)
    row_tiles = tl.cdiv(count, BLOCK_N)
    depth = tl.cdiv(D, BLOCK_D)
    HALF: tl.constexpr = BLOCK_V // 2
    PRECISE: tl.constexpr = e_desc.dtype == tl.float32
    APART: tl.constexpr = columns_ptr is not None
    for unit in range(tl.program_id(0), row_tiles * splits, tl.num_programs(0)):
        row_tile, split = grouped(unit, row_tiles, splits, GROUP)
        row = row_tile * BLOCK_N
        rows = row + tl.arange(0, BLOCK_N)
        of_rows = rows
        if live_ptr is not None:
            of_rows = tl.load(live_ptr + rows, mask=rows < N, other=0)
        column = rows
        if APART:
            column = tl.load(columns_ptr + of_rows, mask=rows < N, other=-1).to(tl.int32)
        z_target = tl.load(z_target_ptr + of_rows, mask=rows < N, other=0.0)
        total = tl.zeros((BLOCK_N,), dtype=tl.float32)
        z_total = tl.zeros((BLOCK_N,), dtype=tl.float32)
        highest = tl.zeros((BLOCK_N,), dtype=tl.float32)
        wz_total = tl.zeros((BLOCK_N,), dtype=tl.float32)
        first = split * tiles_per_split * BLOCK_V
        end = tl.minimum(first + tiles_per_split * BLOCK_V, V)
        acc = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)
        for step in range(tl.cdiv(end - first, BLOCK_V) * depth):
            col = first + step // depth * BLOCK_V
            d = step % depth * BLOCK_D
            acc = tl.dot(e_desc.load([row, d]), c_desc.load([col, d]).T, acc, input_precision="ieee")
            if step % depth == depth - 1:  # half a tile at a time takes fewer registers, and stages less for the store
                halves = tl.split(acc.reshape((BLOCK_N, 2, HALF)).permute(0, 2, 1))
                for half in tl.static_range(2):
                    cols = col + tl.arange(0, HALF) + half * HALF
                    w, total, z_total, highest, wz_total = exponentials_of(
                        halves[half], cols, column, z_target, bias_ptr, V, logit_scale, softcap, total, z_total,
                        highest, wz_total, APART, HAS_SOFTCAP, EVEN_V, PRECISE, z_sum_ptr is not None,
                        metrics_ptr is not None,
                    )  # fmt: skip
                    if w_desc is not None:
                        w_desc.store([row, col + half * HALF], w.to(w_desc.dtype))
                acc = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)
        partial = split.to(tl.int64) * N + rows
        tl.store(sum_ptr + partial, total, mask=rows < N)
        if z_sum_ptr is not None:
            tl.store(z_sum_ptr + partial, z_total, mask=rows < N)
        if metrics_ptr is not None:
            tl.store(metrics_ptr + partial, highest, mask=rows < N)
            tl.store(metrics_ptr + splits.to(tl.int64) * N + partial, wz_total, mask=rows < N)


def target_logits(e: Tensor, c: Tensor, bias: Tensor | None, columns: Tensor, o: Options) -> Tensor:
    """Each row's logits at its columns, (N,) or (N, K), fp32. A negative column gets another one's logit."""
    return _target_logits(e, c, bias, None, 0, columns, False, o)


def find_targets(
    e: Tensor, c: Tensor, bias: Tensor | None, targets: Tensor, ignore_index: int, o: Options, skip: bool = False
) -> tuple[Tensor, Tensor]:
    """Each row's target column (N,) int64 (see row_math.py) and its logit (N,) fp32, in one launch.

    skip: mark the logits of ignored rows as SKIPPED (epilogues.py), because their LSE is not wanted.
    """
    columns = targets.new_empty(targets.shape)
    return columns, _target_logits(e, c, bias, targets, ignore_index, columns, skip, o)


def _target_logits(
    e: Tensor, c: Tensor, bias: Tensor | None, targets: Tensor | None, ignore_index: int, columns: Tensor, skip: bool,
    o: Options,
) -> Tensor:  # fmt: skip
    dim, n_rows = e.shape[1], e.shape[0] if targets is not None else columns.numel()
    z = e.new_empty(e.shape[:1] if targets is not None else columns.shape, dtype=torch.float32)
    target_logits_kernel[(cdiv(n_rows, ROWS),)](
        e, c, bias, targets, columns, z, e.stride(0), c.stride(0), 0 if targets is None else targets.stride(0),
        n_rows, c.shape[0], dim, ignore_index, float(o.logit_scale), float(o.softcap or 0),
        IGNORED, OUTSIDE, ROWS, INNER[e.itemsize], o.softcap is not None, skip,
        in_eights(dim, e.stride(0), c.stride(0)), n_rows // e.shape[0],
        num_warps=4, num_stages=4,
    )  # fmt: skip
    return z


@dataclass(frozen=True)
class Sums:
    """Partial sums over the vocabulary, fp32, one for each split."""

    w: Tensor  # (splits, N) sums of w
    z: Tensor | None  # (splits, N) sums of the logits, for label smoothing with a softcap
    # (2, splits, N) the largest w and the sum of w (z − z_target) log2 e, both without the target's, if wanted
    metrics: Tensor | None


def exponentials(
    e: Tensor, c: Tensor, bias: Tensor | None, columns: Tensor | None, z_target: Tensor, w: Tensor | None,
    with_metrics: bool, o: Options, unread: Tensor | None = None, live: Live = ALL, gathered: Tensor | None = None,
) -> Sums:  # fmt: skip
    """The sums of w; writes w (N, V) unless it is None. Leaves out the targets' w, unless `columns` is None.

    Args:
        e, c, bias, columns: as for `row_stats.forward`.
        z_target: (N,) fp32, what the exponentials are relative to.
        unread: () int32 or None; where 1, nothing reads w, and it need not be written.
        live: the rows of w and the sums.
        gathered: given with live rows, like e; memory for the chunk's rows of e in the order of live.
    """
    (n_rows, dim), vocab = e.shape, c.shape[0]
    with_z = o.label_smoothing > 0 and o.softcap is not None  # else smoothing.py knows the mean
    on_hopper = hopper.fits(e) and bias is None and o.softcap is None and not with_z
    if live.rows is not None and gathered is not None:
        n_rows, gathered = live.rows.shape[0], gathered[: live.rows.shape[0]]
        gather(e, live, gathered, not on_hopper)
        e = e[live.first : live.first + n_rows] if on_hopper else gathered
    tiles = hopper_tiles(dim) if on_hopper else logits_tiles(e)
    programs = multiprocessors(e) * tiles.resident
    row_tiles = cdiv(n_rows, tiles.rows)
    most = max(most_splits(row_tiles, programs), MOST_PARTIALS // n_rows)
    splits, tiles_per_split = split_columns(row_tiles, cdiv(vocab, tiles.cols), programs, most, dim)
    sums = e.new_empty((splits, n_rows), dtype=torch.float32)
    metrics = e.new_empty((2, splits, n_rows), dtype=torch.float32) if with_metrics else None
    if on_hopper:
        half, described = tiles.rows // 2, hopper.kernels.Descriptor
        hopper.kernels.hopper_exponentials_kernel[(programs,)](
            described(e, half, tiles.inner), None if gathered is None else described(gathered, half, tiles.inner),
            described(c, tiles.cols, tiles.inner), None if w is None else described(w, half, tiles.cols // 2), columns,
            z_target, live.rows, live.count, live.some, sums, metrics,
            unread, n_rows, vocab, dim, splits, tiles_per_split, float(o.logit_scale), tiles.num_stages, GROUP,
            vocab % tiles.cols == 0, num_warps=tiles.num_warps, maxnreg=hopper.REGISTERS,
        )  # fmt: skip
        return Sums(sums, None, metrics)
    z_sums = torch.empty_like(sums) if with_z else None
    exponentials_kernel[(programs,)](
        Descriptor(e, tiles.rows, tiles.inner),
        Descriptor(c, tiles.cols, tiles.inner),
        None if w is None else Descriptor(w, tiles.rows, tiles.cols // 2),
        bias, columns, z_target, live.rows, live.count, sums,
        z_sums, metrics, n_rows, vocab, dim, splits, tiles_per_split,
        float(o.logit_scale), float(o.softcap or 0),
        tiles.rows, tiles.cols, tiles.inner, GROUP, o.softcap is not None, vocab % tiles.cols == 0,
        **tiles.launch,
    )  # fmt: skip
    return Sums(sums, z_sums, metrics)


@lru_cache
def split_columns(row_tiles: int, col_tiles: int, programs: int, most: int, dim: int) -> tuple[int, int]:
    """(splits, column tiles per split), at most `most` splits, for which the busiest program is done soonest.

    No split is empty.
    """

    def longest(tiles_per_split: int) -> float:
        units = row_tiles * cdiv(col_tiles, tiles_per_split)
        return cdiv(units, programs) * (tiles_per_split + UNIT_COST / dim)

    least = cdiv(col_tiles, most)
    tiles_per_split = min(range(least, max(least, col_tiles // MIN_SPLITS) + 1), key=longest)
    return cdiv(col_tiles, tiles_per_split), tiles_per_split
