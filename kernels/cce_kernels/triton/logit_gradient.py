"""dL/dz of a chunk of recomputed logits, for the four-product scheme and the filter's samples.

    dz_iv = (a_i p_iv − b_i ((1 − s) [v = target_i] + s / V)) · slope        p_iv = exp(z_iv − LSE_i)

`gradient_kernel` computes the logits in fp32 registers, as the forward pass does, so that they match its LSE. It writes
dz rounded once to the operands' dtype. dz is divided by the largest row coefficient (`Peak`), and the products multiply
by it again. Otherwise the small gradients of a mean over many tokens would underflow in fp16.

The gradient h_i of a row's entropy H_i adds −h_i p_iv (log p_iv + H_i).

A filter (filter/rule.py) applies to each entry before it is written.

Cost: N D W multiply-adds on the tensor cores; writes dz.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..filter.rule import Rule
from ..options import Options
from ..planner import most_splits
from ..runtime.launch import Descriptor, quick
from ..runtime.tiles import GROUP, cdiv, gradient_tiles, grouped, hopper_tiles, multiprocessors
from . import hopper
from .epilogues import gradient_of, tail_of
from .logits import split_columns


@quick
@triton.jit(do_not_specialize=["N", "W", "D", "first", "n_head", "splits", "tiles_per_split"])
def gradient_kernel(
    e_desc,  # (N, D)
    c_desc,  # (W, D), the chunk's rows of C
    dz_desc,  # (N, W), written
    bias_ptr,  # (W,) or None: the chunk's bias
    columns_ptr,  # (N,) int64, each row's target column in the whole vocabulary, negative for none
    lse_ptr,  # (N,) fp32
    a_ptr,  # (N,) fp32, divided by the peak
    b_ptr,  # (N,) fp32, divided by the peak
    entropy_ptr,  # (2, N) fp32 or None: the gradients of the rows' entropies, divided by the peak; the entropies
    dbias_ptr,  # (row tiles, W) fp32 or None: each row tile's part of dbias, written
    eps_ptr,  # () fp32 or None: the filter's threshold
    rank_ptr,  # (W,) int32 or None: ranks by likelihood; columns with a rank below n_head are kept
    times_ptr,  # (W,) fp32 or None: with TAIL, what each column is multiplied by
    kept_ptr,  # (splits, N) fp32 or None: number of entries kept, added to
    dropped_ptr,  # (splits, N) fp32 or None: softmax mass dropped, added to
    active_ptr,  # () int32 or None: where 0, there is nothing to do
    N, W, D,
    first,  # the chunk's first column
    n_head, splits, tiles_per_split, logit_scale, softcap,
    on_target,  # 1 − s
    elsewhere,  # s / V
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    TAIL: tl.constexpr,  # write the entries that the filter does not keep, instead of those that it keeps
):  # fmt: skip
    """dz of a chunk. Units of work and the loop over them are those of exponentials_kernel (logits.py)."""
    row_tiles, col_tiles, depth = tl.cdiv(N, BLOCK_N), tl.cdiv(W, BLOCK_V), tl.cdiv(D, BLOCK_D)
    HALF: tl.constexpr = BLOCK_V // 2
    PRECISE: tl.constexpr = e_desc.dtype == tl.float32
    units = row_tiles * splits
    if active_ptr is not None:
        units *= tl.load(active_ptr)
    eps = 0.0
    if eps_ptr is not None:
        eps = tl.load(eps_ptr)
    some_filtered = TAIL | (eps > 0)
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        row_tile, split = grouped(unit, row_tiles, splits, GROUP)
        row = row_tile * BLOCK_N
        rows = row + tl.arange(0, BLOCK_N)
        inside = rows < N
        column = tl.load(columns_ptr + rows, mask=inside, other=-1).to(tl.int32) - first
        lse = tl.load(lse_ptr + rows, mask=inside, other=float("inf"))  # makes p = 0 beyond N
        a = tl.load(a_ptr + rows, mask=inside, other=0.0)
        b = tl.load(b_ptr + rows, mask=inside, other=0.0)
        of_entropy = None
        entropy = None
        if entropy_ptr is not None:
            of_entropy = tl.load(entropy_ptr + rows, mask=inside, other=0.0)
            entropy = tl.load(entropy_ptr + N + rows, mask=inside, other=0.0)
        kept = tl.zeros((BLOCK_N,), dtype=tl.float32)
        dropped = tl.zeros((BLOCK_N,), dtype=tl.float32)
        first_tile = split * tiles_per_split
        tiles = tl.minimum(tiles_per_split, col_tiles - first_tile)
        acc = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)
        for step in range(tiles * depth):
            col = (first_tile + step // depth) * BLOCK_V
            d = step % depth * BLOCK_D
            acc = tl.dot(e_desc.load([row, d]), c_desc.load([col, d]).T, acc, input_precision="ieee")
            if step % depth == depth - 1:  # half a tile at a time takes fewer registers, and stages less for the store
                halves = tl.split(acc.reshape((BLOCK_N, 2, HALF)).permute(0, 2, 1))
                for half in tl.static_range(2):
                    cols = col + tl.arange(0, HALF) + half * HALF
                    dz, p, is_target = gradient_of(
                        halves[half], cols, column, lse, a, b, bias_ptr, W, logit_scale, softcap, on_target, elsewhere,
                        HAS_SOFTCAP, PRECISE, of_entropy, entropy,
                    )  # fmt: skip
                    if eps_ptr is not None:  # noqa: SIM102 (known when the kernel is compiled, unlike some_filtered)
                        if some_filtered:
                            dz, kept, dropped = _filter(
                                dz, p, is_target, cols, W, eps, rank_ptr, times_ptr, n_head, kept, dropped, TAIL
                            )
                    dz_desc.store([row, col + half * HALF], dz.to(dz_desc.dtype))
                    if dbias_ptr is not None:
                        tl.store(dbias_ptr + row_tile.to(tl.int64) * W + cols, tl.sum(dz, axis=0), mask=cols < W)
                acc = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)
        if kept_ptr is not None:
            partial = split.to(tl.int64) * N + rows
            tl.store(kept_ptr + partial, kept + tl.load(kept_ptr + partial, mask=inside, other=0.0), mask=inside)
            dropped += tl.load(dropped_ptr + partial, mask=inside, other=0.0)
            tl.store(dropped_ptr + partial, dropped, mask=inside)


@triton.jit
def _filter(dz, p, is_target, cols, W, eps, rank_ptr, times_ptr, n_head, kept, dropped, TAIL: tl.constexpr):
    """dz of half a tile after the filter, and the rows' kept entries and dropped mass with this half added."""
    if TAIL:
        dz = tail_of(dz, p, is_target, cols, W, eps, times_ptr)
    else:
        always = is_target
        if rank_ptr is not None:
            always |= (tl.load(rank_ptr + cols, mask=cols < W, other=0) < n_head)[None, :]
        entry = (cols < W)[None, :]
        stays = ((p >= eps) | always) & entry
        kept += tl.sum(tl.where(stays, 1.0, 0.0), axis=1)
        dropped += tl.sum(tl.where(stays | (entry == 0), 0.0, p), axis=1)
        dz = tl.where(stays, dz, 0.0)
    return dz, kept, dropped


@dataclass(frozen=True)
class Filter:
    """A filter of one chunk. dz holds the entries that the rule keeps; without `kept` and `dropped` the tail."""

    rule: Rule
    kept: Tensor | None = None  # (splits, N) fp32 from `parts`, added to: entries kept
    dropped: Tensor | None = None  # the same: softmax mass dropped
    times: Tensor | None = None  # (W,) fp32: what each column of the tail is multiplied by; 0 for columns of the head


def parts(e: Tensor) -> Tensor:
    """Zeros (2, splits, N), fp32, for `Filter.kept` and `Filter.dropped`."""
    row_tiles = cdiv(e.shape[0], gradient_tiles(e).rows)
    splits = most_splits(row_tiles, multiprocessors(e))
    return torch.zeros(2, splits, e.shape[0], dtype=torch.float32, device=e.device)


def gradient_of_chunk(
    e: Tensor, c_chunk: Tensor, bias_chunk: Tensor | None, columns: Tensor, lse: Tensor, a: Tensor, b: Tensor,
    dz: Tensor, first: int, vocab: int, with_bias: bool, o: Options, filtering: Filter | None, active: Tensor | None,
    entropy: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """Write dz / peak of one chunk; return dbias / peak (row tiles, W) if `with_bias`, else None.

    e and c_chunk are of one dtype and `aligned`. vocab: columns of the whole vocabulary. filtering: None for exact
    gradients. The others are as for `gradient_kernel`.
    """
    (n_rows, dim), width = e.shape, c_chunk.shape[0]
    tail = filtering is not None and filtering.kept is None
    plain = bias_chunk is None and o.softcap is None and entropy is None
    on_hopper = hopper.fits(e) and (filtering is None or tail) and plain
    tiles = hopper_tiles(dim) if on_hopper else gradient_tiles(e)
    row_tiles, col_tiles = cdiv(n_rows, tiles.rows), cdiv(width, tiles.cols)
    dbias = e.new_empty((row_tiles, width), dtype=torch.float32) if with_bias else None
    eps = rank = times = kept = dropped = None
    n_head = 0
    if filtering is not None:
        rule, kept, dropped = filtering.rule, filtering.kept, filtering.dropped
        eps, times = rule.eps, filtering.times
        if rule.rank is not None and not tail:
            rank, n_head = rule.rank[first : first + width], rule.n_head
    programs = multiprocessors(e)
    splits, tiles_per_split = split_columns(row_tiles, col_tiles, programs, most_splits(row_tiles, programs), dim)
    scale, on_target, elsewhere = float(o.logit_scale), 1 - float(o.label_smoothing), float(o.label_smoothing) / vocab
    if on_hopper:
        half, described = tiles.rows // 2, hopper.kernels.Descriptor
        hopper.kernels.hopper_gradient_kernel[(programs,)](
            described(e, half, tiles.inner), described(c_chunk, tiles.cols, tiles.inner),
            described(dz, half, tiles.cols // 2), columns, lse, a, b, active, eps, times, n_rows, width, dim, first,
            splits, tiles_per_split, scale, on_target, elsewhere, tiles.num_stages, GROUP,
            num_warps=tiles.num_warps, maxnreg=hopper.REGISTERS,
        )  # fmt: skip
        return None
    gradient_kernel[(programs,)](
        Descriptor(e, tiles.rows, tiles.inner),
        Descriptor(c_chunk, tiles.cols, tiles.inner),
        Descriptor(dz, tiles.rows, tiles.cols // 2),
        bias_chunk, columns, lse, a, b, entropy, dbias, eps, rank, times, kept, dropped, active,
        n_rows, width, dim, first, n_head, splits, tiles_per_split, scale, float(o.softcap or 0),
        on_target, elsewhere,
        tiles.rows, tiles.cols, tiles.inner, GROUP, o.softcap is not None,
        tail, **tiles.launch,
    )  # fmt: skip
    return dbias
