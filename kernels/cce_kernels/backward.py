"""Backward: gradients of e, c and bias, a vocabulary chunk at a time.

    dz_iv = (a_i p_iv − b_i ((1 − s) [v = target_i] + s / V)) · slope        p_iv = exp(z_iv − LSE_i)
    dE = scale · dz C        dC = scale · dzᵀ E        dbias = Σ_i dz_i

Three products a chunk:
  1. `gradient_kernel` recomputes the chunk's logits and writes dz from the accumulator, rounded once to the
     operands' dtype. The logits never leave fp32, so that they match the forward pass's LSE.
  2. `product_kernel`, dE += dz C_chunk: the only sum across chunks, compensated in fp32 registers
     (accumulator.py).
  3. `product_kernel`, dC_chunk = dzᵀ E: complete in one product over all rows, fp32 in registers, rounded
      once.
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

from .accumulator import Accumulator
from .filtered import FilterStats, surviving_tiles, vocabulary_order
from .forward import LOG2E
from .options import Options
from .tiles import GROUP, Tiles, aligned, descriptor, flag_tile, grouped, logits_tile, tiles_for


@triton.jit(do_not_specialize=["N", "W", "D", "first"])
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
    row_tiles = tl.cdiv(N, BLOCK_N)
    col_tiles = tl.cdiv(W, BLOCK_V)
    row_tile, col_tile = grouped(tl.program_id(0), row_tiles, col_tiles, GROUP)
    row = row_tile * BLOCK_N
    col = col_tile * BLOCK_V
    rows = row + tl.arange(0, BLOCK_N)
    cols = col + tl.arange(0, BLOCK_V)
    z = logits_tile(
        e_desc, c_desc, bias_ptr, row, col, W, D, logit_scale, softcap,
        BLOCK_N, BLOCK_V, BLOCK_D, HAS_SOFTCAP,
    )  # fmt: skip

    inside = rows < N
    column = tl.load(columns_ptr + rows, mask=inside, other=-1).to(tl.int32) - first
    lse = tl.load(lse_ptr + rows, mask=inside, other=float("inf"))  # beyond N: p = 0
    a = tl.load(a_ptr + rows, mask=inside, other=0.0)
    b = tl.load(b_ptr + rows, mask=inside, other=0.0)
    p = tl.exp2((z - lse[:, None]) * LOG2E)
    is_target = cols[None, :] == column[:, None]
    dz = a[:, None] * p - b[:, None] * (tl.where(is_target, on_target, 0.0) + elsewhere)
    if HAS_SOFTCAP:
        dz *= 1 - (z / softcap) * (z / softcap)

    if flags_ptr is None:
        dz_desc.store([row, col], dz.to(dz_desc.dtype))
    else:
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


@triton.jit(do_not_specialize=["M", "K", "lists"])
def product_kernel(
    a_desc,  # A (M, K), or (K, M) with TRANSPOSE_A
    b_desc,  # B (K, COLS)
    out_ptr,  # (rows, COLS) contiguous: out[place(m)] (+)= peak · scale · A B
    lost_ptr,  # like out, or None: what out's rounding lost (accumulator.py)
    places_ptr,  # (M,) int64 or None: the row of out for each m; None: m itself
    lists_ptr,  # (M / TILE, lists) int32 or None: the TILEs of K that this row of tiles sums over
    counts_ptr,  # (M / TILE,) int32 or None: how many of them
    peak_ptr,  # () fp32
    scale,
    M,
    COLS,
    K,
    lists,
    BLOCK_M: tl.constexpr,  # equals TILE where there are lists
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    TRANSPOSE_A: tl.constexpr,
    FIRST: tl.constexpr,  # out (and lost) hold nothing yet
):
    row_tile, col_tile = grouped(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(COLS, BLOCK_N), GROUP)
    row = row_tile * BLOCK_M
    col = col_tile * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if lists_ptr is None:
        steps = tl.cdiv(K, BLOCK_K)
    else:
        steps = tl.load(counts_ptr + row_tile) * (BLOCK_M // BLOCK_K)
    for step in range(steps):
        if lists_ptr is None:
            k = step * BLOCK_K
        else:
            tile = tl.load(lists_ptr + row_tile * lists + step // (BLOCK_M // BLOCK_K))
            k = tile * BLOCK_M + step % (BLOCK_M // BLOCK_K) * BLOCK_K
        a = a_desc.load([k, row]).T if TRANSPOSE_A else a_desc.load([row, k])
        acc = tl.dot(a, b_desc.load([k, col]), acc, input_precision="ieee")
    acc *= tl.load(peak_ptr) * scale

    rows = row + tl.arange(0, BLOCK_M)
    cols = col + tl.arange(0, BLOCK_N)
    mask = (rows < M)[:, None] & (cols < COLS)[None, :]
    places = rows
    if places_ptr is not None:
        places = tl.load(places_ptr + rows, mask=rows < M, other=0)
    offsets = places.to(tl.int64)[:, None] * COLS + cols[None, :]
    if not FIRST:
        acc += tl.load(out_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        if lost_ptr is not None:
            acc += tl.load(lost_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    rounded = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offsets, rounded, mask=mask)
    if lost_ptr is not None:
        lost = acc - rounded.to(tl.float32)
        tl.store(lost_ptr + offsets, lost.to(lost_ptr.dtype.element_ty), mask=mask)


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
    stats: FilterStats | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of e, c and bias where `dtypes` names a dtype for them, else None.

    Args:
        e: (N, D) and c: (V, D), of one dtype and `aligned`. bias: (V,) contiguous or None.
        lse, a, b: (N,) fp32; dL/dz_iv = a_i p_iv − b_i ((1 − s) [v = target] + s / V), see rows.py.
        width: vocabulary entries per chunk, from `backward_width`.
    """
    n_rows, vocab = e.shape[0], c.shape[0]
    dtype_e, dtype_c, dtype_bias = dtypes
    sum_e = None if dtype_e is None else Accumulator(e, dtype_e, o.accumulate)
    grad_c = None if dtype_c is None else torch.empty(c.shape, dtype=dtype_c, device=c.device)
    grad_bias = None if dtype_bias is None else torch.empty(vocab, dtype=dtype_bias, device=c.device)
    passes = o.passes(sum_e is not None, grad_c is not None or grad_bias is not None)

    peak = torch.maximum(a.abs().amax(), b.abs().amax())
    peak = torch.where(peak == 0, 1.0, peak)
    a, b = a / peak, b / peak
    order = None
    if o.filter_eps is not None:
        order, columns = vocabulary_order(columns, vocab)

    workspace = e.new_empty(n_rows, triton.cdiv(width, 16) * 16)
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
            if sum_e is not None and eps == o.eps_e:
                _product(dz, c_chunk, sum_e.value, sum_e.lost, None, flags, peak, o, False, sum_e.empty)
                sum_e.empty = False
            if grad_c is not None and eps == o.eps_c:
                out = grad_c[chunk] if places is None else grad_c
                _product(dz, e, out, None, places, None if flags is None else flags.T, peak, o, True, True)
            if grad_bias is not None and dbias is not None and eps == o.eps_c:
                grad_bias[chunk if places is None else places] = (dbias.sum(dim=0) * peak).to(dtype_bias)
    return None if sum_e is None else sum_e.result(), grad_c, grad_bias


def backward_width(e: Tensor, vocab: int, dtype_e: torch.dtype | None, with_stats: bool, o: Options) -> int:
    """Vocabulary entries per chunk of `backward`, so that dz, gathered rows of C (of two chunks), partial
    sums and what the sum of e's gradient (of dtype_e, None: not wanted) takes beside it fit the workspace.

    Raises:
        WorkspaceTooSmall: they do not.
    """
    n_rows, dim = e.shape
    tile = flag_tile(e.dtype)
    fixed = 0 if dtype_e is None else n_rows * dim * Accumulator.scratch_bytes_per_entry(dtype_e, o.accumulate)
    per_column = n_rows * e.itemsize + triton.cdiv(n_rows, tile) * 4
    if o.filter_eps is not None:
        per_column += 2 * dim * e.itemsize + (triton.cdiv(8 * n_rows, tile) if with_stats else 0)
    return o.chunk_width(vocab, fixed, per_column, tiles_for(e.dtype).cols)


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
    tiles = tiles_for(e.dtype, None if eps is None else flag_tile(e.dtype))
    row_tiles, col_tiles = triton.cdiv(n_rows, tiles.rows), triton.cdiv(width, tiles.cols)
    new = e.new_empty
    flags = None if eps is None else new((row_tiles, col_tiles), dtype=torch.int32)
    dbias = new((row_tiles, width), dtype=torch.float32) if with_bias else None
    kept = dropped = None
    if eps is not None and stats is not None:
        kept, dropped = (new((col_tiles, n_rows), dtype=torch.float32) for _ in range(2))
    gradient_kernel[(row_tiles * col_tiles,)](
        descriptor(e, tiles.rows, tiles.inner),
        descriptor(c_chunk, tiles.cols, tiles.inner),
        descriptor(dz, tiles.rows, tiles.cols),
        bias_chunk, columns, lse, a, b, dbias, flags, kept, dropped,
        n_rows, width, dim, first, float(o.logit_scale), float(o.softcap or 0),
        1 - float(o.label_smoothing), float(o.label_smoothing) / vocab, float(eps or 0),
        tiles.rows, tiles.cols, tiles.inner, GROUP, o.softcap is not None,
        **tiles.launch,
    )  # fmt: skip
    if stats is not None and flags is not None and kept is not None and dropped is not None:
        stats.add(kept.sum(dtype=torch.float64), flags.sum(), flags.numel(), dropped.sum(dim=0))
    return flags, dbias


def _product(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    lost: Tensor | None,
    places: Tensor | None,
    flags: Tensor | None,
    peak: Tensor,
    o: Options,
    transpose_a: bool,
    first: bool,
) -> None:
    """out[places] (+)= peak · logit_scale · A B, with A = aᵀ if transpose_a; flags name A's tiles that
    count."""
    depth, n_rows = a.shape if transpose_a else a.shape[::-1]
    cols = b.shape[1]
    tiles: Tiles = tiles_for(a.dtype, cols)
    lists, counts = (None, None) if flags is None else surviving_tiles(flags)
    block_a = (tiles.inner, tiles.rows) if transpose_a else (tiles.rows, tiles.inner)
    grid = (triton.cdiv(n_rows, tiles.rows) * triton.cdiv(cols, tiles.cols),)
    product_kernel[grid](
        descriptor(a, *block_a),
        descriptor(b, tiles.inner, tiles.cols),
        out, lost, places, lists, counts, peak,
        float(o.logit_scale), n_rows, cols, depth, 0 if lists is None else lists.shape[1],
        tiles.rows, tiles.cols, tiles.inner, GROUP, transpose_a, first,
        **tiles.launch,
    )  # fmt: skip
