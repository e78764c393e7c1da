"""Matrix products that add to a gradient: out (+)= A B, with compensated sums over several launches.

    total = [times] A B [+ out + lost]        out = round(scale · total)        lost = total − out, if it is kept

`out` holds the sum in the gradient's dtype, and `lost` its rounding error in 8 bits (accumulator.py). The last launch
applies the scale and drops `lost`. If the output has too few tiles to occupy every multiprocessor, the summed dimension
can be cut into `splits`, each with an fp32 output of its own. One program owns each output tile: no locks or atomics.
fp32 products sum 512 terms first, and then those sums, because an error grows with the terms that join one by one.

Two products that do not depend on each other run side by side (programmatic dependent launch). The last tiles of the
first leave multiprocessors idle, and the second begins there. Before Hopper one product runs after the other.

Cost: M K COLS multiply-adds on the tensor cores; writes the output; each launch of a sum reads and writes out and lost.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime.launch import Descriptor, quick
from ..runtime.tiles import (
    GROUP,
    by_eights,
    cdiv,
    grouped,
    in_eights,
    launches_overlap,
    power_of_2,
    tiles_for,
    transposed_tiles,
)
from .kahan import read_sum, write_sum
from .targets.gradient import targets_of_rows
from .targets.live_rows import ALL, Live

try:  # programmatic dependent launch: a kernel may begin before the previous one ends
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    AVAILABLE = True
except ImportError:  # launches then run one after another: slower, with the same results
    AVAILABLE = False

    @triton.jit
    def gdc_launch_dependents():
        pass

    @triton.jit
    def gdc_wait():
        pass


SERIES_FP32 = 16  # steps, of 32 terms each
MOST_PLACES = 64  # tokens of a tile's targets that are added at a time


class RowTerms(NamedTuple):
    """What finishes dE: out_i = factor_i (A B)_i + coefficient_i C[columns_i], a sum over K targets of the row."""

    factor: Tensor  # (M,) fp32
    coefficient: Tensor  # (M,) or (M, K) fp32
    columns: Tensor  # like coefficient, int64, negative for none
    c: Tensor  # (V, COLS)


class TargetTerms(NamedTuple):
    """What the targets add to dC: out_v += Σ coefficient_i e_i over the tokens i whose target is v, each of K."""

    keys: Tensor  # (N K,) int32, ascending: the tokens' targets, negative for none
    order: Tensor  # (N K,) int64: the coefficients' places in that order
    bounds: Tensor  # (row tiles + 1,) int32: where in `keys` the targets of each tile of output rows begin
    coefficient: Tensor  # (N,) or (N, K) fp32
    e: Tensor  # (N, COLS) bf16


class RankOne(NamedTuple):
    """A matrix that is added to a product: out_ij += left_i right_j (smoothing.py)."""

    left: Tensor | None  # (M,) fp32; None for ones
    right: Tensor  # (COLS,) fp32


_NO_ROW_TERMS, _NO_TARGET_TERMS = (None,) * 4, (None,) * 5


@quick
@triton.jit(do_not_specialize=["M", "K", "splits", "split_rows", "steps_per_split"])
def product_kernel(
    a_desc,  # A (M, K), or (K, M) with TRANSPOSE_A
    b_desc,  # B (K, COLS)
    out_ptr,  # (splits, split_rows, COLS), the sum
    lost_ptr,  # (splits, split_rows, COLS) int8 or None: the sum's rounding error
    into_ptr,  # (splits, split_rows, COLS) fp32 or None: the finished sum is added here instead of stored in out
    scale_ptr,  # () fp32 or None: what the whole sum is multiplied by
    times_ptr,  # () fp32 or None: what A B is multiplied by
    active_ptr,  # () int32 or None: where 0, there is nothing to do
    factor_ptr,  # this pointer and the next three are RowTerms, or all None
    row_coefficient_ptr, columns_ptr, c_ptr,
    keys_ptr,  # this pointer and the next four are TargetTerms, or all None
    order_ptr, bounds_ptr, coefficient_ptr, e_ptr,
    live_ptr,  # (M,) int64 or None: the row of out of each row of A B (targets/live_rows.py)
    count_ptr,  # () int32 or None: how many positions count, of the M rows; or of the K with TRANSPOSE_A
    left_ptr,  # this pointer and the next are RankOne, or None
    right_ptr,
    c_stride,  # from one row of c to the next
    e_stride,  # from one row of e to the next
    M, COLS, K, splits, split_rows, steps_per_split,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, TRANSPOSE_A: tl.constexpr,
    PLACES: tl.constexpr,  # tokens of a tile's targets that are added at a time
    READ: tl.constexpr,  # whether to add what out and lost hold
    KEEP: tl.constexpr,  # whether to write lost
    OVERLAP: tl.constexpr,  # whether the next launch may begin before this one ends
    SERIES: tl.constexpr,  # steps whose sum is complete before it joins the tile's sum; 0 for all steps
    EIGHTS: tl.constexpr,  # see runtime/tiles.by_eights
    TARGETS: tl.constexpr,  # of a token, in RowTerms and TargetTerms
):  # fmt: skip
    """out (+)= A B; see this file's docstring."""
    COLS = by_eights(COLS, EIGHTS)
    if OVERLAP:
        gdc_launch_dependents()
    row_tiles, col_tiles = tl.cdiv(M, BLOCK_M), tl.cdiv(COLS, BLOCK_N)
    HALF: tl.constexpr = BLOCK_N // 2
    units = row_tiles * col_tiles * splits
    if active_ptr is not None:
        units *= tl.load(active_ptr)
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        split = unit // (row_tiles * col_tiles)
        row_tile, col_tile = grouped(unit % (row_tiles * col_tiles), row_tiles, col_tiles, GROUP)
        row = row_tile * BLOCK_M
        col = col_tile * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        first = split * steps_per_split
        steps = tl.cdiv(K, BLOCK_K)
        if count_ptr is not None:
            if TRANSPOSE_A:
                steps = tl.cdiv(tl.load(count_ptr), BLOCK_K)
            elif row >= tl.load(count_ptr):
                steps = 0
        end = tl.minimum(first + steps_per_split, steps)
        if SERIES == 0:
            for step in range(first, end):
                k = step * BLOCK_K
                a = a_desc.load([k, row]).T if TRANSPOSE_A else a_desc.load([row, k])
                acc = tl.dot(a, b_desc.load([k, col]), acc, input_precision="ieee")
        else:
            for begin in range(first, end, SERIES):
                part = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
                for step in range(begin, tl.minimum(begin + SERIES, end)):
                    k = step * BLOCK_K
                    a = a_desc.load([k, row]).T if TRANSPOSE_A else a_desc.load([row, k])
                    part = tl.dot(a, b_desc.load([k, col]), part, input_precision="ieee")
                acc += part

        rows = row + tl.arange(0, BLOCK_M)
        if keys_ptr is not None:
            acc = _add_targets(
                acc, rows, col + tl.arange(0, BLOCK_N), row_tile, keys_ptr, order_ptr, bounds_ptr, coefficient_ptr,
                e_ptr, e_stride, COLS, PLACES, TARGETS,
            )  # fmt: skip
        inside = rows < M
        if live_ptr is not None:
            rows = tl.load(live_ptr + rows, mask=inside, other=0)
        offsets = (split.to(tl.int64) * split_rows + rows.to(tl.int64))[:, None] * COLS
        # Half a tile at a time takes fewer registers, and less shared memory to reorder the values for the stores.
        halves = tl.split(acc.reshape((BLOCK_M, 2, HALF)).permute(0, 2, 1))
        for_rows = (factor_ptr, row_coefficient_ptr, columns_ptr, c_ptr, c_stride, left_ptr, right_ptr)
        for half in tl.static_range(2):
            _store(
                halves[half], offsets, rows, inside, col + half * HALF, out_ptr, lost_ptr, into_ptr, scale_ptr,
                times_ptr, COLS, for_rows, HALF, READ, KEEP, TARGETS,
            )  # fmt: skip
    if OVERLAP and tl.program_id(0) == tl.num_programs(0) - 1:
        gdc_wait()  # this launch must not end before the one beside it: later launches wait for this one alone


@triton.jit
def _add_targets(
    acc, rows, cols, row_tile, keys_ptr, order_ptr, bounds_ptr, coefficient_ptr, e_ptr, e_stride, COLS,
    PLACES: tl.constexpr, TARGETS: tl.constexpr,
):  # fmt: skip
    """acc + the targets' terms of a tile: products of e with a matrix that holds each token's coefficient in its
    target's row, as the sum of two numbers of 16 bits."""
    end = tl.load(bounds_ptr + row_tile + 1)
    for first in range(tl.load(bounds_ptr + row_tile), end, PLACES):
        places = first + tl.arange(0, PLACES)
        live = places < end
        key = tl.load(keys_ptr + places, mask=live, other=-1)
        token = tl.load(order_ptr + places, mask=live, other=0)
        coefficient = tl.load(coefficient_ptr + token, mask=live, other=0.0)
        e_mask = live[:, None] & (cols < COLS)[None, :]
        e = tl.load(e_ptr + (token // TARGETS)[:, None] * e_stride + cols[None, :], mask=e_mask, other=0.0)
        high = coefficient.to(e.dtype)
        low = (coefficient - high.to(tl.float32)).to(e.dtype)
        here = key[None, :] == rows[:, None]
        acc = tl.dot(tl.where(here, high[None, :], 0.0), e, acc)
        acc = tl.dot(tl.where(here, low[None, :], 0.0), e, acc)
    return acc


@triton.jit
def _store(
    total, offsets, rows, inside, col, out_ptr, lost_ptr, into_ptr, scale_ptr, times_ptr, COLS, for_rows,
    WIDTH: tl.constexpr, READ: tl.constexpr, KEEP: tl.constexpr, TARGETS: tl.constexpr,
):  # fmt: skip
    """Add half a tile of products to out, lost or into."""
    cols = col + tl.arange(0, WIDTH)
    offsets = offsets + cols[None, :]
    mask = inside[:, None] & (cols < COLS)[None, :]
    lost_ptrs = None if lost_ptr is None else lost_ptr + offsets
    if times_ptr is not None:
        total *= tl.load(times_ptr)
    if for_rows[0] is not None:
        factor_ptr, coefficient_ptr, columns_ptr, c_ptr, c_stride, _left_ptr, _right_ptr = for_rows
        factor = tl.load(factor_ptr + rows, mask=inside, other=0.0)
        of_targets = targets_of_rows(rows, inside, cols, COLS, columns_ptr, coefficient_ptr, c_ptr, c_stride, TARGETS)
        total = total * factor[:, None] + of_targets
    if for_rows[6] is not None:
        added = tl.load(for_rows[6] + cols, mask=cols < COLS, other=0.0)[None, :]
        if for_rows[5] is not None:
            added = tl.load(for_rows[5] + rows, mask=inside, other=0.0)[:, None] * added
        total += added
    if READ:
        total += read_sum(out_ptr + offsets, lost_ptrs, mask)
    if scale_ptr is not None:
        total *= tl.load(scale_ptr)
    if into_ptr is not None:
        total += tl.load(into_ptr + offsets, mask=mask, other=0.0)
        tl.store(into_ptr + offsets, total, mask=mask)
    elif KEEP:
        write_sum(total, out_ptr + offsets, lost_ptrs, mask)
    else:
        write_sum(total, out_ptr + offsets, None, mask)


def _places(tile_rows: int, vocab: int, tokens: int) -> int:
    """Tokens that a tile adds at a time: as many as have their target there if all entries are as frequent.

    The frequent entries of a natural text share a few tiles, which then take many steps.
    """
    return min(MOST_PLACES, max(16, power_of_2(tokens * tile_rows // vocab)))


def product(
    a: Tensor, b: Tensor, out: Tensor, lost: Tensor | None = None, *, transpose_a: bool = False, read: bool = False,
    scale: Tensor | None = None, times: Tensor | None = None, into: Tensor | None = None, beside: bool = False,
    active: Tensor | None = None, live: Live = ALL, row_terms: RowTerms | None = None,
    target_terms: TargetTerms | None = None, rank_one: RankOne | None = None,
) -> None:  # fmt: skip
    """out (rows, COLS) or (splits, rows, COLS) = [out + lost +] [times] A B, with A = aᵀ if transpose_a.

    Args:
        a, b: 2-d, of one dtype and `aligned`.
        lost: like out, int8: the sum's rounding error. Written unless a `scale` ends the sum.
        read: whether out and lost already hold part of the sum.
        scale: () fp32, multiplies the whole sum. Given at the sum's last launch only.
        times: () fp32, multiplies A B alone.
        into: like out, fp32: the finished sum is added to it instead of stored in out.
        beside: whether this product may run beside the one launched just before it, on which it must not depend.
        active: () int32; where 0, the kernel does nothing. None: it always computes.
        live: the positions of a's rows. Those that do not count are left out of the product: of the sums if
            transpose_a, else their rows of A B are 0. Then rows of A B go to out's rows `live.rows`.
        row_terms: finish each row of a product that is not a sum over launches.
        target_terms, rank_one: are added to a product whose summed dimension is not split.
    """
    assert row_terms is None or not read
    assert (target_terms is None and rank_one is None) or out.dim() == 2
    depth, n_rows = a.shape if transpose_a else a.shape[::-1]
    cols, splits = b.shape[1], out.shape[0] if out.dim() == 3 else 1
    tiles = transposed_tiles(a, cols, depth) if transpose_a else tiles_for(a, cols)
    overlap = AVAILABLE and launches_overlap(a)
    terms: Any = row_terms or target_terms
    targets = 1 if terms is None or terms.coefficient.dim() == 1 else terms.coefficient.shape[1]
    units = cdiv(n_rows, tiles.rows) * cdiv(cols, tiles.cols) * splits
    product_kernel[(units,)](
        Descriptor(a, *((tiles.inner, tiles.rows) if transpose_a else (tiles.rows, tiles.inner))),
        Descriptor(b, tiles.inner, tiles.cols),
        out, lost, into, scale, times, active,
        *(row_terms or _NO_ROW_TERMS), *(target_terms or _NO_TARGET_TERMS), 
        None if transpose_a else live.rows, live.count,
        *(rank_one or (None, None)),
        0 if row_terms is None else row_terms.c.stride(0), 0 if target_terms is None else target_terms.e.stride(0),
        n_rows, cols, depth,
        splits, out.stride(0) // cols if splits > 1 else 0, cdiv(cdiv(depth, tiles.inner), splits),
        tiles.rows, tiles.cols, tiles.inner, GROUP, transpose_a,
        MOST_PLACES if target_terms is None else _places(tiles.rows, n_rows, depth * targets), read,
        lost is not None and scale is None, overlap, SERIES_FP32 if a.dtype == torch.float32 else 0,
        in_eights(cols), targets,
        **tiles.launch, **({"launch_pdl": True} if beside and overlap else {}),
    )  # fmt: skip
