"""`mend()` gives Triton's interpreter (TRITON_INTERPRET=1) the GPU's arithmetic in bf16 and fp8.

The interpreter of Triton 3.6 to 3.9 has errors:
  * it keeps bf16 as 16-bit integers, and multiplies the integers;
  * it truncates to bf16 instead of rounding;
  * it halves an fp8 number that rounds up to the next power of 2;
  * it takes a scalar comparison for an integer, which version 3.9 then refuses as part of a mask.
"""

from __future__ import annotations

import os

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def mend() -> None:
    """Make casts to bf16 and fp8 (e5m2) round to nearest even, products of 16-bit numbers exact in fp32, masks bool."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    convert, dot, splat = interpreter._convert_float, builder.create_dot, builder.create_splat
    # By name, because a type's hash may change: other code makes the interpreter quicker that way.
    rounded = {"bf16": (torch.bfloat16, torch.uint16), "fp8e5": (torch.float8_e5m2, torch.uint8)}

    def convert_float(data, source, target, rounding_mode):
        if source == tl.float32 and target.name in rounded:
            to, bits = rounded[target.name]
            return torch.from_numpy(np.ascontiguousarray(data).view(np.float32)).to(to).view(bits).numpy()
        if (source, target) == (tl.bfloat16, tl.float32):
            return (np.ascontiguousarray(data).astype(np.uint32) << 16).reshape(data.shape)
        return convert(data, source, target, rounding_mode)

    def create_dot(self, a, b, d, *rest):
        def wide(operand):
            if operand.dtype.scalar not in (tl.bfloat16, tl.float16):
                return operand
            return self.cast_impl(operand, tl.block_type(tl.float32, list(operand.data.shape)))

        return dot(self, wide(a), wide(b), d, *rest)

    def create_splat(self, to, x):
        block = splat(self, to, x)
        if x.data.dtype == np.bool_:
            block.data = block.data.astype(np.bool_)
        return block

    interpreter._convert_float = convert_float
    builder.create_dot, builder.create_splat = create_dot, create_splat
