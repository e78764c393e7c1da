"""Forward: log-sum-exp and target logit of every row, without the logits in memory.

    LSE_i = log Σ_v exp z_iv        z = softcap(scale · E Cᵀ + bias)

Tiling: the work is cut into units of BLOCK_N rows × one split of the vocabulary, shared out among one
persistent program per multiprocessor. A program walks over its split's BLOCK_V-wide tiles, keeps each row's
running maximum and sum of exponentials in registers (online softmax), and takes the target logit from the
same accumulator: one computed apart would differ from the LSE by the tensor cores' rounding. It stores one
partial per row and split; a second, small kernel combines them. No locks, no atomics: deterministic.

Cost: N D V multiply-adds on the tensor cores; writes 8 to 12 bytes × N × splits (at most 32).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .options import Options
from .tiles import GROUP, descriptor, grouped, logits_tile, multiprocessors, tiles_for

LOG2E = tl.constexpr(1.4426950408889634)
MAX_SPLITS = 32
MIN_SPLITS = 8  # fewer, and the row tiles at work at one time would not fit L2 together


@triton.jit(do_not_specialize=["N", "V", "D", "splits", "tiles_per_split"])
def forward_kernel(
    e_desc,  # (N, D)
    c_desc,  # (V, D)
    bias_ptr,  # (V,) or None
    columns_ptr,  # (N,) int64, -1 for none
    max_ptr,  # (splits, N) fp32, written
    sum_ptr,  # (splits, N) fp32, written
    z_sum_ptr,  # (splits, N) fp32 or None, written
    z_target_ptr,  # (N,) fp32, zero before, written by the one split that holds the target
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
):
    row_tiles = tl.cdiv(N, BLOCK_N)
    for unit in range(tl.program_id(0), row_tiles * splits, tl.num_programs(0)):
        row_tile, split = grouped(unit, row_tiles, splits, GROUP)
        rows = row_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        column = tl.load(columns_ptr + rows, mask=rows < N, other=-1).to(tl.int32)

        largest = tl.full((BLOCK_N,), float("-inf"), dtype=tl.float32)
        exp_sum = tl.zeros((BLOCK_N,), dtype=tl.float32)
        z_target = tl.zeros((BLOCK_N,), dtype=tl.float32)
        z_sum = tl.zeros((BLOCK_N,), dtype=tl.float32)
        first = split * tiles_per_split * BLOCK_V
        end = tl.minimum(first + tiles_per_split * BLOCK_V, V)
        for col in range(first, end, BLOCK_V):
            z = logits_tile(
                e_desc, c_desc, bias_ptr, row_tile * BLOCK_N, col, V, D, logit_scale, softcap,
                BLOCK_N, BLOCK_V, BLOCK_D, HAS_SOFTCAP,
            )  # fmt: skip
            cols = col + tl.arange(0, BLOCK_V)
            z_target += tl.sum(tl.where(cols[None, :] == column[:, None], z, 0.0), axis=1)
            if z_sum_ptr is not None:
                z_sum += tl.sum(tl.where((cols < V)[None, :], z, 0.0), axis=1)
            z = tl.where((cols < V)[None, :], z, float("-inf"))
            new_largest = tl.maximum(largest, tl.max(z, axis=1))
            # A bias of −inf may mask out a whole tile: anchor at 0 there, the exponentials are 0 anyway.
            anchor = tl.where(new_largest == float("-inf"), 0.0, new_largest)
            exp_sum = exp_sum * tl.exp2((largest - anchor) * LOG2E)
            exp_sum += tl.sum(tl.exp2((z - anchor[:, None]) * LOG2E), axis=1)
            largest = new_largest

        partial = split.to(tl.int64) * N + rows
        tl.store(max_ptr + partial, largest, mask=rows < N)
        tl.store(sum_ptr + partial, exp_sum, mask=rows < N)
        tl.store(z_target_ptr + rows, z_target, mask=(rows < N) & (column >= first) & (column < end))
        if z_sum_ptr is not None:
            tl.store(z_sum_ptr + partial, z_sum, mask=rows < N)


@triton.jit(do_not_specialize=["N", "splits"])
def combine_kernel(max_ptr, sum_ptr, lse_ptr, N, splits, BLOCK_N: tl.constexpr):
    """lse (N,) from partials (splits, N): log Σ_s sum_s exp(max_s − max) + max."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = rows < N
    largest = tl.full((BLOCK_N,), float("-inf"), dtype=tl.float32)
    max_ptrs = max_ptr + rows
    for _ in range(splits):
        largest = tl.maximum(largest, tl.load(max_ptrs, mask=inside, other=0.0))
        max_ptrs += N
    total = tl.zeros((BLOCK_N,), dtype=tl.float32)
    max_ptrs = max_ptr + rows
    sum_ptrs = sum_ptr + rows
    for _ in range(splits):
        partial = tl.load(max_ptrs, mask=inside, other=0.0)
        total += tl.load(sum_ptrs, mask=inside, other=1.0) * tl.exp2((partial - largest) * LOG2E)
        max_ptrs += N
        sum_ptrs += N
    tl.store(lse_ptr + rows, largest + tl.log(total), mask=inside)


def forward(
    e: Tensor, c: Tensor, bias: Tensor | None, columns: Tensor, o: Options
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows' log-sum-exp, target logit and (with label smoothing) mean logit, fp32 (N,) each.

    Args:
        e: (N, D) and c: (V, D), of one dtype and `aligned`. bias: (V,) contiguous or None.
        columns: (N,) int64, each row's target, -1 for none.
    """
    (n_rows, dim), vocab = e.shape, c.shape[0]
    tiles = tiles_for(e.dtype)
    programs = multiprocessors(e)
    splits, tiles_per_split = _split(triton.cdiv(n_rows, tiles.rows), triton.cdiv(vocab, tiles.cols), programs)
    new = e.new_empty
    partial_max, partial_sum = (new((splits, n_rows), dtype=torch.float32) for _ in range(2))
    partial_z = new((splits, n_rows), dtype=torch.float32) if o.label_smoothing else None
    z_target = e.new_zeros(n_rows, dtype=torch.float32)
    forward_kernel[(programs,)](
        descriptor(e, tiles.rows, tiles.inner),
        descriptor(c, tiles.cols, tiles.inner),
        bias, columns, partial_max, partial_sum, partial_z, z_target,
        n_rows, vocab, dim, splits, tiles_per_split, float(o.logit_scale), float(o.softcap or 0),
        tiles.rows, tiles.cols, tiles.inner, GROUP, o.softcap is not None,
        **tiles.launch,
    )  # fmt: skip
    lse = new(n_rows, dtype=torch.float32)
    combine_kernel[(triton.cdiv(n_rows, 128),)](partial_max, partial_sum, lse, n_rows, splits, 128)
    return lse, z_target, None if partial_z is None else partial_z.sum(dim=0) / vocab


def _split(row_tiles: int, col_tiles: int, programs: int) -> tuple[int, int]:
    """(splits, column tiles per split) with the shortest longest program; no split is empty."""

    def longest(tiles_per_split: int) -> int:
        units = row_tiles * triton.cdiv(col_tiles, tiles_per_split)
        return triton.cdiv(units, programs) * tiles_per_split

    most = max(1, col_tiles // MIN_SPLITS)
    least = triton.cdiv(col_tiles, MAX_SPLITS)
    tiles_per_split = min(range(least, max(least, most) + 1), key=longest)
    return triton.cdiv(col_tiles, tiles_per_split), tiles_per_split
