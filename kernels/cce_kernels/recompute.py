"""Four products: gradients of e, c and bias from recomputed logits, a chunk of the vocabulary at a time.

    dz_iv = (a_i p_iv − b_i ((1 − s) [v = target_i] + s / V)) · slope        p_iv = exp(z_iv − LSE_i)
    dE = scale · dz C        dC = scale · dzᵀ E        dbias = Σ_i dz_i

The first is the forward pass's (exponentials.py); three more a chunk (products.py):
  2. `gradient_kernel` recomputes the chunk's logits and writes dz from the accumulator, rounded once to the
     operands' dtype. The logits never leave fp32, so that they match the forward pass's LSE.
  3. dE += dz C_chunk: the only sum across chunks, with what rounding lost kept beside it (accumulator.py).
  4. dC_chunk = dzᵀ E: complete in one product over all rows, fp32 in registers, rounded once.
Every output tile has one owner: no locks, no atomics, deterministic. dz is stored relative to the largest row
coefficient ("peak"), which the products multiply back in: the small gradients of a mean over many tokens do
not underflow in fp16.

Where a gradient is wanted in fp32, the targets' entries are left out of dz and added in fp32 (targets.py): p − 1 is no
longer rounded, nor what the tensor cores add to a sum that holds it.

A filter (filtered.py) is applied to each entry of dz as it is made; where only one gradient is filtered, dz is made
twice. That is for what entries.py does not cover, and where its lists turn out too small: `active` says on the device
whether there is anything to do.

Cost: 3 N D V multiply-adds on the tensor cores; N × width × 2 bytes of workspace, written once, read twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import hopper
from .accumulator import Accumulator, compensated
from .epilogues import gradient_of
from .exponentials import split_columns, target_logits
from .filtered import FilterStats, Rule
from .hashing import draw
from .launch import quick
from .options import Options
from .products import product
from .schemes import most_splits
from .targets import add_by_target, sort_by_target, target_rows
from .tiles import GROUP, cdiv, descriptor, gradient_tiles, grouped, multiprocessors


@quick
@triton.jit(do_not_specialize=["N", "W", "D", "first", "first_entry", "n_head", "splits", "tiles_per_split"])
def gradient_kernel(
    e_desc,  # (N, D)
    c_desc,  # (W, D), the chunk
    dz_desc,  # (N, W), written
    bias_ptr,  # (W,) or None
    columns_ptr,  # (N,) int64, in the whole vocabulary
    lse_ptr,  # (N,) fp32
    a_ptr,  # (N,) fp32, divided by the peak
    b_ptr,  # (N,) fp32, divided by the peak
    dbias_ptr,  # (row tiles, W) fp32 or None: this tile's part of dbias, written
    eps_ptr,  # (N,) fp32 or None: each row's threshold of the filter
    hash_ptr,  # (N,) int32 or None; see filtered.Rule
    rank_ptr,  # (W,) int32 or None; entries of a rank below n_head are kept
    kept_ptr,  # (splits, N) fp32 or None: entries kept, added to
    dropped_ptr,  # (splits, N) fp32 or None: mass dropped, added to
    active_ptr,  # () int32 or None: 0 for nothing to do
    N,
    W,
    D,
    first,  # the chunk's first column
    first_entry,  # and what the filter's draws call it
    n_head,
    splits,
    tiles_per_split,
    logit_scale,
    softcap,
    on_target,  # 1 − s
    elsewhere,  # s / V
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """dz of a chunk; units of work and the one loop over them as in exponentials.py."""
    row_tiles, col_tiles, depth = tl.cdiv(N, BLOCK_N), tl.cdiv(W, BLOCK_V), tl.cdiv(D, BLOCK_D)
    HALF: tl.constexpr = BLOCK_V // 2
    PRECISE: tl.constexpr = e_desc.dtype == tl.float32
    units = row_tiles * splits
    if active_ptr is not None:
        units *= tl.load(active_ptr)
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        row_tile, split = grouped(unit, row_tiles, splits, GROUP)
        row = row_tile * BLOCK_N
        rows = row + tl.arange(0, BLOCK_N)
        inside = rows < N
        column = tl.load(columns_ptr + rows, mask=inside, other=-1).to(tl.int32) - first
        lse = tl.load(lse_ptr + rows, mask=inside, other=float("inf"))  # beyond N: p = 0
        a = tl.load(a_ptr + rows, mask=inside, other=0.0)
        b = tl.load(b_ptr + rows, mask=inside, other=0.0)
        eps, row_hash = lse, rows
        if eps_ptr is not None:
            eps = tl.load(eps_ptr + rows, mask=inside, other=0.0)
        if hash_ptr is not None:
            row_hash = tl.load(hash_ptr + rows, mask=inside, other=0)
        some_filtered = tl.max(eps, axis=0) > 0
        kept = tl.zeros((BLOCK_N,), dtype=tl.float32)
        dropped = tl.zeros((BLOCK_N,), dtype=tl.float32)
        first_tile = split * tiles_per_split
        tiles = tl.minimum(tiles_per_split, col_tiles - first_tile)
        acc = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)
        for step in range(tiles * depth):
            col = (first_tile + step // depth) * BLOCK_V
            d = step % depth * BLOCK_D
            acc = tl.dot(e_desc.load([row, d]), c_desc.load([col, d]).T, acc, input_precision="ieee")
            if step % depth == depth - 1:  # half a tile at a time: fewer registers, less to stage for the store
                left, right = tl.split(acc.reshape((BLOCK_N, 2, HALF)).permute(0, 2, 1))
                cols = col + tl.arange(0, HALF)
                dz, p, is_target = gradient_of(
                    left, cols, column, lse, a, b, bias_ptr, W, logit_scale, softcap, on_target, elsewhere,
                    HAS_SOFTCAP, PRECISE,
                )  # fmt: skip
                if eps_ptr is not None:  # noqa: SIM102 (known to the compiler, unlike the next)
                    if some_filtered:
                        dz, kept, dropped = _filter(
                            dz, p, is_target, cols, first_entry, W, a, eps, row_hash, hash_ptr, rank_ptr, n_head, kept,
                            dropped, HAS_SOFTCAP,
                        )  # fmt: skip
                dz_desc.store([row, col], dz.to(dz_desc.dtype))
                if dbias_ptr is not None:
                    tl.store(dbias_ptr + row_tile.to(tl.int64) * W + cols, tl.sum(dz, axis=0), mask=cols < W)
                cols += HALF
                dz, p, is_target = gradient_of(
                    right, cols, column, lse, a, b, bias_ptr, W, logit_scale, softcap, on_target, elsewhere,
                    HAS_SOFTCAP, PRECISE,
                )  # fmt: skip
                if eps_ptr is not None:  # noqa: SIM102 (known to the compiler, unlike the next)
                    if some_filtered:
                        dz, kept, dropped = _filter(
                            dz, p, is_target, cols, first_entry, W, a, eps, row_hash, hash_ptr, rank_ptr, n_head, kept,
                            dropped, HAS_SOFTCAP,
                        )  # fmt: skip
                dz_desc.store([row, col + HALF], dz.to(dz_desc.dtype))
                if dbias_ptr is not None:
                    tl.store(dbias_ptr + row_tile.to(tl.int64) * W + cols, tl.sum(dz, axis=0), mask=cols < W)
                acc = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)
        if kept_ptr is not None:
            partial = split.to(tl.int64) * N + rows
            tl.store(kept_ptr + partial, kept + tl.load(kept_ptr + partial, mask=inside, other=0.0), mask=inside)
            dropped += tl.load(dropped_ptr + partial, mask=inside, other=0.0)
            tl.store(dropped_ptr + partial, dropped, mask=inside)


@triton.jit
def _filter(
    dz, p, is_target, cols, first_entry, W, a, eps, row_hash, hash_ptr, rank_ptr, n_head, kept, dropped,
    HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """dz of one half tile after the filter; entries kept and mass dropped of the rows, with this half's added."""
    eps = eps[:, None]
    if hash_ptr is None:
        keep = p >= eps
        weighted = dz
    else:
        keep = p * 2.0**32 > eps * draw(row_hash[:, None], (first_entry + cols)[None, :])
        if HAS_SOFTCAP:
            weighted = dz * tl.maximum(1.0, eps / tl.maximum(p, 1e-37))
        else:  # dz is a p where no target is
            weighted = tl.where(p < eps, a[:, None] * eps, dz)
    always = is_target
    if rank_ptr is not None:
        always |= (tl.load(rank_ptr + cols, mask=cols < W, other=0) < n_head)[None, :]
    entry = (cols < W)[None, :]
    stays = (keep | always) & entry
    kept += tl.sum(tl.where(stays, 1.0, 0.0), axis=1)
    dropped += tl.sum(tl.where(stays | (entry == 0), 0.0, p), axis=1)
    return tl.where(always, dz, tl.where(keep, weighted, 0.0)), kept, dropped


@dataclass(frozen=True)
class Filter:
    """What is kept; and, added to, `parts` of how much each row kept and dropped."""

    rule: Rule
    kept: Tensor
    dropped: Tensor


@dataclass(frozen=True)
class Fallback:
    """Gradients that may be there already: `active` () int32, 0 if so; where they are, of the wanted dtypes."""

    active: Tensor
    grad_e: Tensor | None
    grad_c: Tensor | None


def parts(e: Tensor) -> Tensor:
    """Zeros (2, splits, N), fp32, for `Filter.kept` and `Filter.dropped`."""
    row_tiles = cdiv(e.shape[0], gradient_tiles(e.dtype).rows)
    splits = most_splits(row_tiles, multiprocessors(e))
    return torch.zeros(2, splits, e.shape[0], dtype=torch.float32, device=e.device)


def gradients(
    e: Tensor,
    c: Tensor,
    bias: Tensor | None,
    columns: Tensor,
    lse: Tensor,
    a: Tensor,
    b: Tensor,
    width: int,
    o: Options,
    dtypes: tuple[torch.dtype | None, torch.dtype | None, torch.dtype | None],
    main_grad_c: Tensor | None,
    filtering: Filter | None,
    fallback: Fallback | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of e, c and bias where `dtypes` names a dtype for them, else None; dC is added to main_grad_c if given.

    Args:
        e: (N, D) and c: (V, D), of one dtype and `aligned`. bias: (V,) contiguous or None.
        lse, a, b: (N,) fp32; dL/dz_iv = a_i p_iv − b_i ((1 − s) [v = target] + s / V), see rows.py.
        width: vocabulary entries per chunk.
        filtering: the filter, where options name one and this call is not exact after all; gradients that the options
            do not filter go without.
        fallback: where this is only for what others could not do; the device says whether that is anything.
    """
    n_rows, vocab = e.shape[0], c.shape[0]
    dtype_e, dtype_c, dtype_bias = dtypes
    active = grad_e = None
    if fallback is None:
        grad_c = None if dtype_c is None else torch.empty(c.shape, dtype=dtype_c, device=c.device)
    else:
        active, grad_e, grad_c = fallback.active, fallback.grad_e, fallback.grad_c
    sum_e = None
    if dtype_e is not None:
        sum_e = Accumulator(e, tuple(e.shape), dtype_e, o.accumulate, value=grad_e)
    out_c = grad_c if main_grad_c is None else main_grad_c
    grad_bias = None if dtype_bias is None else torch.empty(vocab, dtype=dtype_bias, device=c.device)
    passes = o.passes(sum_e is not None, out_c is not None or grad_bias is not None)

    peak = torch.maximum(a.abs().amax(), b.abs().amax())
    peak = torch.where(peak == 0, 1.0, peak)
    a, b, scale = a / peak, b / peak, peak * o.logit_scale

    at_target = None
    if filtering is None and fallback is None and bias is None and _targets_apart(e, dtypes, main_grad_c, o):
        b_alone = torch.where(columns >= 0, a * torch.exp(target_logits(e, c, None, columns, o) - lse), b)
        at_target, b = b_alone - b, b_alone  # of the target's entry dz keeps what p differs by between kernels
        if sum_e is not None:
            target_rows(c, columns, at_target, sum_e.value, sum_e.lost)

    workspace = e.new_empty(n_rows, cdiv(width, 16) * 16)
    for first in range(0, vocab, width):
        chunk = slice(first, min(first + width, vocab))
        c_chunk = c[chunk]
        bias_chunk = None if bias is None else bias[chunk]
        dz = workspace[:, : c_chunk.shape[0]]
        for eps in passes:
            rule_applies = None if eps is None else filtering
            dbias = _gradient(
                e, c_chunk, bias_chunk, columns, lse, a, b, dz, first, vocab, grad_bias is not None, o, rule_applies,
                active,
            )  # fmt: skip
            if out_c is not None and eps == o.eps_c:
                into = None if main_grad_c is None else main_grad_c[chunk]
                product(dz, e, out_c[chunk], transpose_a=True, scale=scale, into=into, active=active)
            if sum_e is not None and eps == o.eps_e:  # the shorter tiles last
                ends = scale if chunk.stop == vocab else None
                beside = out_c is not None and eps == o.eps_c
                read = first > 0 or at_target is not None
                product(dz, c_chunk, sum_e.value, sum_e.lost, read=read, scale=ends, beside=beside, active=active)
            if grad_bias is not None and dbias is not None and eps == o.eps_c:
                grad_bias[chunk] = (dbias.sum(dim=0) * peak).to(dtype_bias)
    del dz, workspace  # room for what follows
    if at_target is not None and out_c is not None:
        add_by_target(e, *sort_by_target(columns), at_target * scale, out_c, None)
    if sum_e is None:
        return None, grad_c, grad_bias
    result = sum_e.result()
    if active is not None and grad_e is not None and result is not grad_e:
        result = grad_e.copy_(torch.where(active != 0, result, grad_e))
    return result, grad_c, grad_bias


def _targets_apart(e: Tensor, dtypes: tuple[torch.dtype | None, ...], main_grad_c: Tensor | None, o: Options) -> bool:
    """Whether a sum in fp32 gains by it, and the other loses nothing: what is added to it is not rounded for good."""
    dtype_e, dtype_c, _ = dtypes
    if e.dtype == torch.float32 or o.softcap is not None or o.label_smoothing:
        return False
    dtype_c = dtype_c if main_grad_c is None else torch.float32
    whole_e = dtype_e in (None, torch.float32) or o.accumulate == "fp32" or compensated(dtype_e, o.accumulate)
    return whole_e and dtype_c in (None, torch.float32) and torch.float32 in (dtype_e, dtype_c)


def dropped_mass(
    e: Tensor, c: Tensor, bias: Tensor | None, columns: Tensor, lse: Tensor, width: int, o: Options, rule: Rule
) -> Tensor:
    """The mass (N,) fp32 that the rule drops from each row: one product."""
    kept, dropped = parts(e)
    ones = torch.ones_like(lse)
    workspace = e.new_empty(e.shape[0], cdiv(width, 16) * 16)
    for first in range(0, c.shape[0], width):
        chunk = slice(first, min(first + width, c.shape[0]))
        dz = workspace[:, : chunk.stop - first]
        bias_chunk = None if bias is None else bias[chunk]
        measured = Filter(rule, kept, dropped)
        _gradient(e, c[chunk], bias_chunk, columns, lse, ones, ones, dz, first, c.shape[0], False, o, measured, None)
    return dropped.sum(dim=0)


def _gradient(
    e: Tensor,
    c_chunk: Tensor,
    bias_chunk: Tensor | None,
    columns: Tensor,
    lse: Tensor,
    a: Tensor,
    b: Tensor,
    dz: Tensor,
    first: int,
    vocab: int,
    with_bias: bool,
    o: Options,
    filtering: Filter | None,
    active: Tensor | None,
) -> Tensor | None:
    """Write dz / peak of one chunk; return dbias / peak by row tile, if asked for."""
    (n_rows, dim), width = e.shape, c_chunk.shape[0]
    on_hopper = hopper.fits(e) and filtering is None and bias_chunk is None and o.softcap is None
    tiles = hopper.logits_tiles(dim) if on_hopper else gradient_tiles(e.dtype)
    row_tiles, col_tiles = cdiv(n_rows, tiles.rows), cdiv(width, tiles.cols)
    dbias = e.new_empty((row_tiles, width), dtype=torch.float32) if with_bias else None
    eps = hashes = rank = kept = dropped = None
    first_entry, n_head = first, 0
    if filtering is not None:
        rule, kept, dropped = filtering.rule, filtering.kept, filtering.dropped
        eps, hashes, n_head, first_entry = rule.eps, rule.hashes, rule.n_head, rule.first + first
        rank = None if rule.rank is None else rule.rank[first : first + width]
    programs = multiprocessors(e)
    splits, tiles_per_split = split_columns(row_tiles, col_tiles, programs)
    scale, on_target, elsewhere = float(o.logit_scale), 1 - float(o.label_smoothing), float(o.label_smoothing) / vocab
    if on_hopper:
        pointers = (columns, lse, a, b, active)
        hopper.gradient(programs, e, c_chunk, dz, pointers, first, splits, tiles_per_split, scale, on_target, elsewhere)
        return None
    gradient_kernel[(programs,)](
        descriptor(e, tiles.rows, tiles.inner),
        descriptor(c_chunk, tiles.cols, tiles.inner),
        descriptor(dz, tiles.rows, tiles.cols // 2),
        bias_chunk, columns, lse, a, b, dbias, eps, hashes, rank, kept, dropped, active,
        n_rows, width, dim, first, first_entry, n_head, splits, tiles_per_split, scale, float(o.softcap or 0),
        on_target, elsewhere,
        tiles.rows, tiles.cols, tiles.inner, GROUP, o.softcap is not None,
        **tiles.launch,
    )  # fmt: skip
    return dbias


def backward(
    e: Tensor,
    c: Tensor,
    bias: Tensor | None,
    columns: Tensor,
    lse: Tensor,
    a: Tensor,
    b: Tensor,
    width: int,
    o: Options,
    dtypes: tuple[torch.dtype | None, torch.dtype | None, torch.dtype | None],
    main_grad_c: Tensor | None,
    stats: FilterStats | None,
    rule: Rule | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """`gradients` with the filter that the options name, if any, and what it kept and dropped written to `stats`.

    rule: what the filter goes by, where that is not for these columns alone to say (vocab_parallel.py).
    """
    vocab = c.shape[0]
    filtering, exact = None, None
    kept = dropped = torch.zeros_like(lse)[None]
    need_c = dtypes[1] is not None or dtypes[2] is not None or main_grad_c is not None
    if o.filters(dtypes[0] is not None, need_c):
        rule = rule or Rule.of(columns, vocab, o)
        exact = torch.zeros((), dtype=torch.bool, device=e.device)
        if o.filter_mass is not None:
            mass = dropped_mass(e, c, bias, columns, lse, width, o, rule)
            exact = ((mass > o.filter_mass) & (columns >= 0)).any()
        kept, dropped = parts(e)
        filtering = Filter(rule.exact_if(exact), kept, dropped)
    grads = gradients(e, c, bias, columns, lse, a, b, width, o, dtypes, main_grad_c, filtering)
    if stats is not None:
        stats.write(kept.sum(dim=0), dropped.sum(dim=0), exact, b != 0, vocab)
    return grads
