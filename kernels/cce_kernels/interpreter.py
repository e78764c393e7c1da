"""bf16 under TRITON_INTERPRET=1: Triton's interpreter keeps bf16 as raw 16-bit integers, multiplies those,
and truncates instead of rounding (seen in 3.6.0 and 3.7.1). `mend()` gives it the arithmetic of the real
kernels."""

from __future__ import annotations

import os

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def mend() -> None:
    """Make the interpreter's bf16 casts round to nearest even, and its products exact in fp32."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    convert, dot = interpreter._convert_float, builder.create_dot

    def convert_float(data, source, target, rounding_mode):
        if (source, target) == (tl.float32, tl.bfloat16):
            values = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
            return values.to(torch.bfloat16).view(torch.uint16).numpy()
        if (source, target) == (tl.bfloat16, tl.float32):
            return (np.ascontiguousarray(data).astype(np.uint32) << 16).reshape(data.shape)
        return convert(data, source, target, rounding_mode)

    def create_dot(self, a, b, d, *rest):
        def wide(operand):
            if operand.dtype.scalar not in (tl.bfloat16, tl.float16):
                return operand
            return self.cast_impl(operand, tl.block_type(tl.float32, list(operand.data.shape)))

        return dot(self, wide(a), wide(b), d, *rest)

    interpreter._convert_float = convert_float
    builder.create_dot = create_dot
