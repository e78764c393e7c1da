"""GLA in chunks of 128 through FLA's Triton kernels on CPU tensors; prints its relative errors as JSON, by the decays'
dtype, in which they are kept for the backward pass.

Run with TRITON_INTERPRET=1. The interpreter (3.7.1) needs two things put right: it has no driver to time
autotuning configurations with, so the first is taken; and its loop variables are plain integers, on which
kernels call `.to()`.
"""

import builtins
import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import logsigmoid
from triton.runtime.autotuner import Autotuner

from linrnn.cpu_ops import mixers
from linrnn.models.chunk_size import _ChunkGLA
from linrnn.models.fla_models import import_fla


class LoopVariable(int):
    def to(self, *_: Any) -> "LoopVariable":
        return self


def loop(*bounds: Any) -> Iterator[LoopVariable]:
    """`range` over numbers or the interpreter's scalars."""
    numbers = (b.handle.data.item() if hasattr(b, "handle") else b for b in bounds)
    return map(LoopVariable, builtins.range(*map(int, numbers)))


Autotuner.do_bench = property(lambda _: lambda *args, **kwargs: (0.0, 0.0, 0.0))
import_fla("fla.ops.gla.chunk")
for name in ("fla.ops.common.chunk_h", "fla.ops.gla.chunk"):
    sys.modules[name].range = loop  # type: ignore[attr-defined]

torch.manual_seed(0)
q, k, v, g = (torch.randn(1, 200, 1, 16) for _ in range(4))
cu_seqlens = torch.tensor([0, 60, 200])
weights = torch.randn(1, 200, 1, 16)
errors = {}
for dtype in (torch.float32, torch.bfloat16):
    leaves = [x.detach().requires_grad_() for x in (q, k, v, (logsigmoid(g) / 4).to(dtype))]
    results = []
    for output, _ in (
        _ChunkGLA.apply(*leaves, None, False, True, cu_seqlens, 128),
        mixers.chunk_gla(*leaves, cu_seqlens=cu_seqlens),
    ):
        results.append([output.detach(), *torch.autograd.grad((output * weights).sum(), leaves)])
    errors[str(dtype).removeprefix("torch.")] = {
        name: float((ours - theirs).norm() / theirs.norm())
        for name, ours, theirs in zip(("o", "dq", "dk", "dv", "dg"), *results, strict=True)
    }
print(json.dumps(errors))
