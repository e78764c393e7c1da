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

With a filter (filtered.py) a chunk is a run of vocabulary_order instead of the index: its rows of C are
gathered, dC's scattered back. dz tiles without a survivor are neither written nor read: the products walk
over lists of the others. Where only one gradient is filtered, dz is made twice.

Cost: 3 N D V multiply-adds on the tensor cores; N × width × 2 bytes of workspace, written once, read twice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import hopper
from .accumulator import Accumulator
from .epilogues import gradient_of
from .exponentials import split_columns
from .filtered import FilterStats, surviving_tiles, vocabulary_order
from .options import Options
from .products import product
from .tiles import GROUP, aligned, cdiv, descriptor, gradient_tiles, grouped, multiprocessors


@triton.jit(do_not_specialize=["N", "W", "D", "first", "splits", "tiles_per_split"])
def gradient_kernel(
    e_desc,  # (N, D)
    c_desc,  # (W, D), the chunk
    dz_desc,  # (N, W), written
    bias_ptr,  # (W,) or None
    columns_ptr,  # (N,) int64, places in the whole vocabulary
    lse_ptr,  # (N,) fp32
    a_ptr,  # (N,) fp32, divided by the peak
    b_ptr,  # (N,) fp32, divided by the peak
    dbias_ptr,  # (row tiles, W) fp32 or None: this tile's part of dbias, written
    flags_ptr,  # (row tiles, column tiles) int32 or None: 1 where an entry survives the filter, written
    kept_ptr,  # (column tiles, N) fp32 or None: entries kept, written
    dropped_ptr,  # (column tiles, N) fp32 or None: mass dropped, written
    N,
    W,
    D,
    first,  # the chunk's first place
    splits,
    tiles_per_split,
    logit_scale,
    softcap,
    on_target,  # 1 − s
    elsewhere,  # s / V
    eps,
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
    for unit in range(tl.program_id(0), row_tiles * splits, tl.num_programs(0)):
        row_tile, split = grouped(unit, row_tiles, splits, GROUP)
        row = row_tile * BLOCK_N
        rows = row + tl.arange(0, BLOCK_N)
        inside = rows < N
        column = tl.load(columns_ptr + rows, mask=inside, other=-1).to(tl.int32) - first
        lse = tl.load(lse_ptr + rows, mask=inside, other=float("inf"))  # beyond N: p = 0
        a = tl.load(a_ptr + rows, mask=inside, other=0.0)
        b = tl.load(b_ptr + rows, mask=inside, other=0.0)
        first_tile = split * tiles_per_split
        tiles = tl.minimum(tiles_per_split, col_tiles - first_tile)
        acc = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)
        for step in range(tiles * depth):
            col_tile = first_tile + step // depth
            col = col_tile * BLOCK_V
            d = step % depth * BLOCK_D
            acc = tl.dot(e_desc.load([row, d]), c_desc.load([col, d]).T, acc, input_precision="ieee")
            if step % depth == depth - 1:
                if flags_ptr is None:  # half a tile at a time: fewer registers, less to stage for the store
                    left, right = tl.split(acc.reshape((BLOCK_N, 2, HALF)).permute(0, 2, 1))
                    cols = col + tl.arange(0, HALF)
                    dz, _, _ = gradient_of(
                        left, cols, column, lse, a, b, bias_ptr, W, logit_scale, softcap, on_target, elsewhere,
                        HAS_SOFTCAP, PRECISE,
                    )  # fmt: skip
                    dz_desc.store([row, col], dz.to(dz_desc.dtype))
                    if dbias_ptr is not None:
                        tl.store(dbias_ptr + row_tile.to(tl.int64) * W + cols, tl.sum(dz, axis=0), mask=cols < W)
                    cols += HALF
                    dz, _, _ = gradient_of(
                        right, cols, column, lse, a, b, bias_ptr, W, logit_scale, softcap, on_target, elsewhere,
                        HAS_SOFTCAP, PRECISE,
                    )  # fmt: skip
                    dz_desc.store([row, col + HALF], dz.to(dz_desc.dtype))
                    if dbias_ptr is not None:
                        tl.store(dbias_ptr + row_tile.to(tl.int64) * W + cols, tl.sum(dz, axis=0), mask=cols < W)
                else:
                    cols = col + tl.arange(0, BLOCK_V)
                    dz, p, is_target = gradient_of(
                        acc, cols, column, lse, a, b, bias_ptr, W, logit_scale, softcap, on_target, elsewhere,
                        HAS_SOFTCAP, PRECISE,
                    )  # fmt: skip
                    is_entry = inside[:, None] & (cols < W)[None, :]
                    counts = (b != 0)[:, None] & is_entry
                    keep = ((p >= eps) | is_target) & ((a != 0)[:, None] | counts) & is_entry
                    dz = tl.where(keep, dz, 0.0)
                    survives = tl.max(tl.max(keep.to(tl.int32), axis=1), axis=0)
                    tl.store(flags_ptr + row_tile * col_tiles + col_tile, survives)
                    if survives > 0:
                        dz_desc.store([row, col], dz.to(dz_desc.dtype))
                    if kept_ptr is not None:
                        partial = col_tile.to(tl.int64) * N + rows
                        tl.store(kept_ptr + partial, tl.sum((keep & counts).to(tl.float32), axis=1), mask=inside)
                        dropped = tl.sum(tl.where(counts & (keep == 0), p, 0.0), axis=1)
                        tl.store(dropped_ptr + partial, dropped, mask=inside)
                    if dbias_ptr is not None:
                        tl.store(dbias_ptr + row_tile.to(tl.int64) * W + cols, tl.sum(dz, axis=0), mask=cols < W)
                acc = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)


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
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of e, c and bias where `dtypes` names a dtype for them, else None; dC is added to main_grad_c if given.

    Args:
        e: (N, D) and c: (V, D), of one dtype and `aligned`. bias: (V,) contiguous or None.
        lse, a, b: (N,) fp32; dL/dz_iv = a_i p_iv − b_i ((1 − s) [v = target] + s / V), see rows.py.
        width: vocabulary entries per chunk.
    """
    n_rows, vocab = e.shape[0], c.shape[0]
    dtype_e, dtype_c, dtype_bias = dtypes
    sum_e = None if dtype_e is None else Accumulator(e, tuple(e.shape), dtype_e, o.accumulate)
    grad_c = None if dtype_c is None else torch.empty(c.shape, dtype=dtype_c, device=c.device)
    out_c = grad_c if main_grad_c is None else main_grad_c
    grad_bias = None if dtype_bias is None else torch.empty(vocab, dtype=dtype_bias, device=c.device)
    passes = o.passes(sum_e is not None, out_c is not None or grad_bias is not None)

    peak = torch.maximum(a.abs().amax(), b.abs().amax())
    peak = torch.where(peak == 0, 1.0, peak)
    a, b, scale = a / peak, b / peak, peak * o.logit_scale
    order = None
    if o.filter_eps is not None:
        order, columns = vocabulary_order(columns, vocab)

    workspace = e.new_empty(n_rows, cdiv(width, 16) * 16)
    for first in range(0, vocab, width):
        chunk = slice(first, min(first + width, vocab))
        places = None if order is None else order[chunk]
        c_chunk = c[chunk] if places is None else aligned(c.index_select(0, places))
        bias_chunk = None if bias is None else bias[chunk] if places is None else bias[places]
        dz = workspace[:, : c_chunk.shape[0]]
        for eps in passes:
            flags, dbias = _gradient(
                e, c_chunk, bias_chunk, columns, lse, a, b, dz, first, vocab, eps, grad_bias is not None,
                o, stats,
            )  # fmt: skip
            if out_c is not None and eps == o.eps_c:
                lists = None if flags is None else surviving_tiles(flags.T)
                out = out_c[chunk] if places is None else out_c
                into = None if main_grad_c is None else out
                product(dz, e, out, transpose_a=True, scale=scale, into=into, places=places, tiles_of_k=lists)
            if sum_e is not None and eps == o.eps_e:  # the shorter tiles last
                lists = None if flags is None else surviving_tiles(flags)
                ends = scale if chunk.stop == vocab else None
                beside = out_c is not None and eps == o.eps_c
                product(
                    dz, c_chunk, sum_e.value, sum_e.lost, read=first > 0, scale=ends, tiles_of_k=lists, beside=beside
                )
            if grad_bias is not None and dbias is not None and eps == o.eps_c:
                grad_bias[chunk if places is None else places] = (dbias.sum(dim=0) * peak).to(dtype_bias)
    return None if sum_e is None else sum_e.result(), grad_c, grad_bias


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
    eps: float | None,
    with_bias: bool,
    o: Options,
    stats: FilterStats | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Write dz / peak of one chunk; return the surviving tiles' flags (with a filter) and dbias / peak by row
    tile."""
    (n_rows, dim), width = e.shape, c_chunk.shape[0]
    on_hopper = hopper.fits(e) and eps is None and bias_chunk is None and o.softcap is None
    tiles = hopper.logits_tiles(dim) if on_hopper else gradient_tiles(e.dtype, filtered=eps is not None)
    row_tiles, col_tiles = cdiv(n_rows, tiles.rows), cdiv(width, tiles.cols)
    new = e.new_empty
    flags = None if eps is None else new((row_tiles, col_tiles), dtype=torch.int32)
    dbias = new((row_tiles, width), dtype=torch.float32) if with_bias else None
    kept = dropped = None
    if eps is not None and stats is not None:
        kept, dropped = (new((col_tiles, n_rows), dtype=torch.float32) for _ in range(2))
    programs = multiprocessors(e)
    splits, tiles_per_split = split_columns(row_tiles, col_tiles, programs)
    scale, on_target, elsewhere = float(o.logit_scale), 1 - float(o.label_smoothing), float(o.label_smoothing) / vocab
    if on_hopper:
        pointers = (columns, lse, a, b)
        hopper.gradient(programs, e, c_chunk, dz, pointers, first, splits, tiles_per_split, scale, on_target, elsewhere)
        return None, None
    gradient_kernel[(programs,)](
        descriptor(e, tiles.rows, tiles.inner),
        descriptor(c_chunk, tiles.cols, tiles.inner),
        descriptor(dz, tiles.rows, tiles.cols // 2 if eps is None else tiles.cols),
        bias_chunk, columns, lse, a, b, dbias, flags, kept, dropped,
        n_rows, width, dim, first, splits, tiles_per_split, scale, float(o.softcap or 0), on_target,
        elsewhere, float(eps or 0),
        tiles.rows, tiles.cols, tiles.inner, GROUP, o.softcap is not None,
        **tiles.launch,
    )  # fmt: skip
    if stats is not None and flags is not None and kept is not None and dropped is not None:
        stats.add(kept.sum(dtype=torch.float64), flags.sum(), flags.numel(), dropped.sum(dim=0))
    return flags, dbias
