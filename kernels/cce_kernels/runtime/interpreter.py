"""`mend()` gives Triton's interpreter (TRITON_INTERPRET=1) the GPU's arithmetic in bf16 and fp8.

The interpreter of Triton 3.6.0 and 3.7.1 has three errors:
  * it keeps bf16 as 16-bit integers, and multiplies the integers;
  * it truncates to bf16 instead of rounding;
  * it halves an fp8 number that rounds up to the next power of 2.
"""

from __future__ import annotations

import ctypes
import os
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class OpenInInterpreter(NamedTuple):
    """What `repeated.Open` is to a GPU: a launch whose addresses are open."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple
    options: dict[str, Any]
    spots: tuple[tuple[int, torch.dtype, torch.Size, tuple[int, ...]], ...]  # index, and what lies at the address

    def at(self, addresses: list[int]) -> tuple[Any, tuple, tuple]:
        """The launch with these addresses, one for each spot: a function of (*grid, stream, *rest), grid and rest."""
        args = list(self.args)
        for (index, dtype, shape, stride), address in zip(self.spots, addresses, strict=True):
            extent = (1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))) * dtype.itemsize
            there = torch.frombuffer((ctypes.c_char * extent).from_address(address), dtype=dtype)
            tensor = there.as_strided(shape, stride)
            if args[index] is None:
                args[index] = tensor
            else:
                args[index] = copy(args[index])
                args[index].base = tensor
        return self._run, self.grid, tuple(args)

    def _run(self, *values: Any) -> None:
        self.kernel[self.grid](*values[len(self.grid) + 1 :], **self.options)


def opened_in_interpreter(
    kernel: Any, grid: tuple[int, ...], args: tuple, options: dict[str, Any]
) -> tuple[OpenInInterpreter, list[Tensor]]:
    """The launch, and the tensors whose addresses go to its spots."""
    without: list[Any] = []
    spots, tensors = [], []
    for index, x in enumerate(args):
        tensor = x if isinstance(x, Tensor) else getattr(x, "base", None)
        if tensor is None:
            without.append(x)
            continue
        tensors.append(tensor)
        spots.append((index, tensor.dtype, tensor.shape, tensor.stride()))
        described = None
        if tensor is not x:
            described = copy(x)
            described.base = None
        without.append(described)
    return OpenInInterpreter(kernel, grid, tuple(without), options, tuple(spots)), tensors


def mend() -> None:
    """Make casts to bf16 and fp8 (e5m2) round to nearest even, and products of 16-bit numbers exact in fp32."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    convert, dot = interpreter._convert_float, builder.create_dot
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

    interpreter._convert_float = convert_float
    builder.create_dot = create_dot
