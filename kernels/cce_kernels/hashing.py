"""The filter's draws in Triton; filtered.py has the same in torch."""

from __future__ import annotations

import triton
import triton.language as tl

from .filtered import HASH_ENTRY, HASH_MIX

_ENTRY, _MIX = tl.constexpr(HASH_ENTRY), tl.constexpr(HASH_MIX)


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
