"""The filter's ranks and draws in Triton; rule.py takes some hundred small operations of torch for the same.

    rank: order of Σ_d c_vd mean_d, mean_d = bf16(mean of e_id over the rows with a target); products and sums in fp64
    mixed(x) = two rounds of (x ^ x >> 16) · ROUND, and a last shift        all in 32 bits
    seed = mixed(Σ_i mixed(target_i) ^ i · ODD)
    drawn = group · size + mixed(s ^ group · ODD) mod size
    s = mixed(seed + 1 + block) for columns, mixed(seed) for rows

Cost: seven launches and one sort of V numbers; reads e and c once; fp64 runs on the ordinary units.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..options import Options
from ..runtime.launch import quick
from ..runtime.tiles import cdiv
from .rule import COLUMN_GROUP, HASH_ODD, HASH_ROUND, LIKELY_GROUP, ROW_GROUP, Sample, block_rows, fp32_logit_scale

_ODD, _ROUND = tl.constexpr(HASH_ODD - 2**32), tl.constexpr(HASH_ROUND)  # as signed 32-bit numbers
BLOCK = 1024


@triton.jit
def _mixed(x):
    """The hash of int32 numbers, uint32."""
    x = x.to(tl.uint32, bitcast=True)
    for _ in tl.static_range(2):
        x = ((x ^ (x >> 16)).to(tl.int32, bitcast=True) * _ROUND).to(tl.uint32, bitcast=True)
    return x ^ (x >> 16)


@triton.jit
def _draw(salt, group, SIZE: tl.constexpr):
    """The number drawn from a group of SIZE, from 0 to SIZE − 1; salt uint32, group int32."""
    return (_mixed(salt.to(tl.int32, bitcast=True) ^ (group * _ODD)) % SIZE).to(tl.int32)


@quick
@triton.jit(do_not_specialize=["N"])
def mean_kernel(
    e_ptr,  # (N, D), rows e_stride apart
    target_ptr,  # (N,) int64, negative for none
    mean_ptr,  # (D,) bf16, written
    e_stride, N, D,
    ROWS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """The mean of the rows with a target. A program takes DIMS dimensions: 32 bytes of a 16-bit row."""
    dims = tl.program_id(0) * DIMS + tl.arange(0, DIMS)
    total = tl.zeros((ROWS, DIMS), dtype=tl.float64)
    count = tl.zeros((ROWS,), dtype=tl.int32)
    for first in range(0, N, ROWS):
        rows = first + tl.arange(0, ROWS)
        counts = tl.load(target_ptr + rows, mask=rows < N, other=-1) >= 0
        count += counts.to(tl.int32)
        mask = counts[:, None] & (dims < D)[None, :]
        e = tl.load(e_ptr + rows.to(tl.int64)[:, None] * e_stride + dims[None, :], mask=mask, other=0.0)
        total += e.to(tl.float64)
    mean = tl.sum(total, axis=0) / tl.maximum(tl.sum(count, axis=0), 1).to(tl.float64)
    tl.store(mean_ptr + dims, mean.to(tl.float32).to(tl.bfloat16), mask=dims < D)


@quick
@triton.jit(do_not_specialize=["V"])
def mean_logits_kernel(
    c_ptr,  # (V, D), rows c_stride apart
    mean_ptr,  # (D,) bf16
    bias_ptr,  # (V,) or None
    z_ptr,  # (V,) fp32, written
    c_stride, V, D, logit_scale,
    ENTRIES: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """z_v = logit_scale · Σ_d c_vd mean_d + bias_v; 0 instead of NaN."""
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    total = tl.zeros((ENTRIES, DIMS), dtype=tl.float64)
    for d in range(0, D, DIMS):
        dims = d + tl.arange(0, DIMS)
        mask = (entry < V)[:, None] & (dims < D)[None, :]
        c = tl.load(c_ptr + entry.to(tl.int64)[:, None] * c_stride + dims[None, :], mask=mask, other=0.0)
        mean = tl.load(mean_ptr + dims, mask=dims < D, other=0.0)
        total += c.to(tl.float64) * mean.to(tl.float64)[None, :]
    z = tl.sum(total, axis=1) * logit_scale
    if bias_ptr is not None:
        z += tl.load(bias_ptr + entry, mask=entry < V, other=0.0).to(tl.float64)
    tl.store(z_ptr + entry, tl.where(z == z, z, 0.0).to(tl.float32), mask=entry < V)


@quick
@triton.jit(do_not_specialize=["V", "n_head", "n_likely"])
def rank_kernel(
    order_ptr,  # (V,) int64: columns, the most likely first
    rank_ptr,  # (V,) int32, written
    likely_ptr,  # (n_likely,) int64, written
    listable_ptr,  # (V,) int16: 0 written for the columns of the head
    V, n_head, n_likely,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write each column's rank, the likely columns, and which columns lists leave out."""
    rank = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    entry = tl.load(order_ptr + rank, mask=rank < V, other=0)
    tl.store(rank_ptr + entry, rank, mask=rank < V)
    tl.store(likely_ptr + rank, entry, mask=rank < n_likely)
    tl.store(listable_ptr + entry, 0, mask=rank < n_head)


@quick
@triton.jit(do_not_specialize=["N"])
def seed_kernel(
    target_ptr,  # (N,) int64
    seed_ptr,  # () int32, written
    N,
    BLOCK: tl.constexpr,
):
    """The seed, in one program."""
    total = tl.zeros((BLOCK,), dtype=tl.int64)
    for first in range(0, N, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        target = tl.load(target_ptr + rows, mask=rows < N, other=0).to(tl.int32)
        total += tl.where(rows < N, _mixed(target).to(tl.int32, bitcast=True) ^ (rows * _ODD), 0).to(tl.int64)
    tl.store(seed_ptr, _mixed(tl.sum(total, axis=0).to(tl.int32)).to(tl.int32, bitcast=True))


@quick
@triton.jit(do_not_specialize=["V", "groups", "drawn", "n_head", "n_likely"])
def columns_drawn_kernel(
    seed_ptr,  # () int32
    rank_ptr,  # (V,) int32 or None
    likely_ptr,  # (n_likely,) int64 or None
    columns_ptr,  # (blocks of rows, drawn) int64, written
    times_ptr,  # (blocks of rows, drawn) fp32, written
    V,
    groups,  # groups of all columns; the other drawn − groups are groups of likely columns
    drawn, n_head, n_likely,
    COLUMN_GROUP: tl.constexpr, LIKELY_GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw a column from each group, for each block of rows; see `Sample`."""
    block = tl.program_id(0)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    salt = _mixed(tl.load(seed_ptr) + 1 + block)
    column = k * COLUMN_GROUP + _draw(salt, k, COLUMN_GROUP)
    there = column < V
    column = tl.minimum(column, V - 1).to(tl.int64)
    times = tl.full((BLOCK,), COLUMN_GROUP, dtype=tl.float32)
    if rank_ptr is not None:
        there &= tl.load(rank_ptr + column, mask=k < groups, other=0) >= n_likely
        is_likely = k >= groups
        place = n_head + (k - groups) * LIKELY_GROUP + _draw(salt, k - groups, LIKELY_GROUP)
        other = tl.load(likely_ptr + tl.minimum(place, n_likely - 1), mask=is_likely & (k < drawn), other=0)
        column = tl.where(is_likely, other, column)
        there = tl.where(is_likely, place < n_likely, there)
        times = tl.where(is_likely, LIKELY_GROUP, times)
    to = block.to(tl.int64) * drawn + k
    tl.store(columns_ptr + to, column, mask=k < drawn)
    tl.store(times_ptr + to, tl.where(there, times, 0.0), mask=k < drawn)


@quick
@triton.jit(do_not_specialize=["N", "groups", "n_head", "n_likely", "block_rows"])
def places_kernel(
    seed_ptr,  # () int32
    target_ptr,  # (N,) int64, negative for none
    rank_ptr,  # (V,) int32 or None
    place_ptr,  # (N,) int64, written
    N, groups, n_head, n_likely, block_rows,
    COLUMN_GROUP: tl.constexpr, LIKELY_GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The index of each row's target among the columns drawn for its block, or -1."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(target_ptr + rows, mask=rows < N, other=-1).to(tl.int32)
    salt = _mixed(tl.load(seed_ptr) + 1 + rows // block_rows)
    group = target // COLUMN_GROUP
    is_drawn = group * COLUMN_GROUP + _draw(salt, group, COLUMN_GROUP) == target
    if rank_ptr is not None:
        rank = tl.load(rank_ptr + target, mask=target >= 0, other=0)
        of_likely = (rank - n_head) // LIKELY_GROUP
        place = n_head + of_likely * LIKELY_GROUP + _draw(salt, of_likely, LIKELY_GROUP)
        is_likely = (rank >= n_head) & (rank < n_likely)
        group = tl.where(is_likely, groups + of_likely, group)
        is_drawn = tl.where(is_likely, place == rank, is_drawn)
    tl.store(place_ptr + rows, tl.where(is_drawn & (target >= 0), group, -1), mask=rows < N)


@quick
@triton.jit(do_not_specialize=["N"])
def rows_drawn_kernel(
    seed_ptr,  # () int32
    rows_ptr,  # (⌈N / ROW_GROUP⌉,) int64, written
    times_ptr,  # (⌈N / ROW_GROUP⌉,) fp32, written
    N,
    ROW_GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Draw a row from each group of rows; see `Sample`."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = k * ROW_GROUP + _draw(_mixed(tl.load(seed_ptr)), k, ROW_GROUP)
    inside = k < tl.cdiv(N, ROW_GROUP)
    tl.store(rows_ptr + k, tl.minimum(row, N - 1), mask=inside)
    tl.store(times_ptr + k, tl.where(row < N, ROW_GROUP * 1.0, 0.0), mask=inside)


def mean_logits(e: Tensor, c: Tensor, bias: Tensor | None, targets: Tensor, o: Options) -> Tensor | None:
    """The same as `rule.mean_logits`; e (N, D) and c (V, D) with contiguous rows."""
    if not o.filter_unbiased:
        return None
    (n_rows, dim), vocab = e.shape, c.shape[0]
    mean = e.new_empty(dim, dtype=torch.bfloat16)
    mean_kernel[(cdiv(dim, 16),)](e, targets, mean, e.stride(0), n_rows, dim, 1024, 16, num_warps=16)
    z = e.new_empty(vocab, dtype=torch.float32)
    mean_logits_kernel[(cdiv(vocab, 16),)](
        c, mean, bias, z, c.stride(0), vocab, dim, fp32_logit_scale(o), 16, 256, num_warps=4
    )
    return z


def rank_entries(mean_z: Tensor, rank: Tensor, likely: Tensor, n_head: int, listable: Tensor) -> None:
    """Write rank (V,) and likely (n_likely,) as `rule.by_likelihood` of mean_z (V,) has them, and clear `listable`."""
    vocab = rank.shape[0]
    order = torch.argsort(mean_z, descending=True, stable=True)
    rank_kernel[(cdiv(vocab, BLOCK),)](
        order, rank, likely, listable, vocab, n_head, likely.shape[0], BLOCK, num_warps=4
    )


def draw(targets: Tensor, dim: int, vocab: int, rank: Tensor | None, likely: Tensor | None, n_head: int) -> Sample:
    """The same as `Rule.sample`, for a rule with this rank, likely and n_head, and the seed of targets (N,) int64."""
    sample = Sample.empty(targets, dim, vocab)
    seed = targets.new_empty((), dtype=torch.int32)
    n_rows, (blocks, drawn) = targets.shape[0], sample.columns.shape
    groups, n_likely = cdiv(vocab, COLUMN_GROUP), 0 if likely is None else likely.shape[0]
    seed_kernel[(1,)](targets, seed, n_rows, BLOCK, num_warps=8)
    columns_drawn_kernel[(blocks, cdiv(drawn, BLOCK))](
        seed, rank, likely, sample.columns, sample.times, vocab, groups, drawn, n_head, n_likely, COLUMN_GROUP,
        LIKELY_GROUP, BLOCK, num_warps=4,
    )  # fmt: skip
    places_kernel[(cdiv(n_rows, BLOCK),)](
        seed, targets, rank, sample.place, n_rows, groups, n_head, n_likely, block_rows(dim), COLUMN_GROUP,
        LIKELY_GROUP, BLOCK, num_warps=4,
    )  # fmt: skip
    rows_drawn_kernel[(cdiv(len(sample.rows), BLOCK),)](
        seed, sample.rows, sample.row_times, n_rows, ROW_GROUP, BLOCK, num_warps=4
    )
    return sample
