"""The filter's draws in Triton; filtered.py has the same in torch."""

from __future__ import annotations

import triton
import triton.language as tl

from .filtered import HASH_ENTRY, HASH_MIX

_ENTRY, _MIX = tl.constexpr(HASH_ENTRY), tl.constexpr(HASH_MIX)


@triton.jit
def draw(row_hash, entry):
    """2^32 u of an entry, fp32; both int32."""
    mixed = (row_hash ^ (entry * _ENTRY)) * _MIX
    return mixed.to(tl.uint32, bitcast=True).to(tl.float32)
