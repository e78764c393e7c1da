"""The filter's draws in Triton; filtered.py has the same in torch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .filtered import HASH_ENTRY, HASH_MIX, HASH_ROUND, HASH_ROW, HASH_START, HASH_TARGET
from .launch import quick
from .tiles import cdiv

_ENTRY, _MIX = tl.constexpr(HASH_ENTRY), tl.constexpr(HASH_MIX)
_ROW, _TARGET = tl.constexpr(HASH_ROW), tl.constexpr(HASH_TARGET)
_START, _ROUND = tl.constexpr(HASH_START), tl.constexpr(HASH_ROUND)
BLOCK = 256


@triton.jit
def draw(row_hash, entry):
    """2^32 u of an entry, fp32; both int32."""
    return (_hash(row_hash, entry >> 3) + ((entry & 7) << 29).to(tl.uint32, bitcast=True)).to(tl.float32)


@triton.jit
def least_draw(row_hash, eighth):
    """The smallest `draw` of the entries 8 eighth to 8 eighth + 7."""
    return (_hash(row_hash, eighth) & 0x1FFFFFFF).to(tl.float32)


@triton.jit
def _hash(row_hash, eighth):
    return ((row_hash ^ (eighth * _ENTRY)) * _MIX).to(tl.uint32, bitcast=True)


@quick
@triton.jit(do_not_specialize=["N"])
def row_hashes_kernel(
    target_ptr,  # (N,) int64
    hash_ptr,  # (N,) int32, written
    N,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(target_ptr + rows, mask=rows < N, other=0)
    x = (rows * _ROW + target * _TARGET + _START).to(tl.uint32)
    for _ in tl.static_range(2):
        x = (x ^ (x >> 16)) * _ROUND
    tl.store(hash_ptr + rows, (x ^ (x >> 16) ^ 0x80000000).to(tl.int32, bitcast=True), mask=rows < N)


def row_hashes(columns: Tensor, out: Tensor) -> None:
    """Write filtered.row_hashes(columns), one launch in place of eighteen, to out (N,) int32."""
    n_rows = columns.shape[0]
    row_hashes_kernel[(cdiv(n_rows, BLOCK),)](columns, out, n_rows, BLOCK, num_warps=4)
