"""The kernels of Liger and flash-linear-attention that the harness calls, on CPU tensors in Triton's interpreter.

The backends' own check asks for a GPU and is skipped here, so that our use of both libraries is tested everywhere.
"""

import builtins
import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton.language as tl
from test_losses import ALL_THREE, CONFIGS, CPU, error, make_case, true_objective
from torch.nn.functional import logsigmoid

from linrnn.losses.fla import Fla
from linrnn.losses.liger import Liger
from linrnn.models import tuning
from linrnn.models.chunk_size import _ChunkGLA
from linrnn.models.cpu_ops import mixers
from linrnn.models.fla_import import import_fla

pytestmark = pytest.mark.interpreter


class Number(float):
    """A number with `.to()`, which Liger's kernel calls. In the interpreter an argument is a plain one."""

    def to(self, *_: Any) -> "Number":
        return self


@pytest.mark.parametrize("options", [{}, {**ALL_THREE, "softcap": Number(ALL_THREE["softcap"])}], ids=["plain", "all"])
@pytest.mark.parametrize(("name", "backend"), [("liger", Liger), ("liger-fp32", Liger), ("fla", Fla)])
def test_losses_and_gradients_are_those_of_fp64(name, backend, options, monkeypatch):
    case = make_case(torch.float32)
    for ops in ("fla.modules.fused_cross_entropy.ops", "liger_kernel.ops.cross_entropy"):  # it has no libdevice
        monkeypatch.setattr(importlib.import_module(ops), "tanh", lambda x: 2 * tl.sigmoid(2 * x) - 1)
    options = {key: value for key, value in options.items() if key not in backend.lacks(CONFIGS[name])}
    loss, grad_h, grad_w = true_objective(case, **options)
    compute = backend(replace(CONFIGS[name], **options), CPU)

    hidden, weight = case.leaves()
    output = compute(hidden, weight, case.labels)
    (output.sum_nats * case.scale).backward()
    assert error(output.sum_nats, loss) < 1e-6
    assert error(hidden.grad, grad_h) < 1e-6
    assert error(weight.grad, grad_w) < 1e-6

    _, weight = case.leaves()  # a frozen backbone
    (compute(case.hidden, weight, case.labels).sum_nats * case.scale).backward()
    assert error(weight.grad, grad_w) < 1e-6

    with torch.no_grad():
        assert error(compute(case.hidden, case.weight, case.labels).sum_nats, loss) < 1e-6

    hidden, weight = case.leaves()
    ignored = compute(hidden, weight, torch.full_like(case.labels, -100))
    ignored.sum_nats.backward()
    assert ignored.sum_nats == 0
    assert not hidden.grad.any()
    assert not weight.grad.any()


class LoopVariable(int):
    """A loop variable with `.to()`, which kernels call. In the interpreter it is a plain integer (Triton 3.7.1)."""

    def to(self, *_: Any) -> "LoopVariable":
        return self


def loop(*bounds: Any) -> Iterator[LoopVariable]:
    """`range` over numbers or the interpreter's scalars."""
    numbers = (b.handle.data.item() if hasattr(b, "handle") else b for b in bounds)
    return map(LoopVariable, builtins.range(*map(int, numbers)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gla_in_chunks_of_128_equals_the_cpu_version(dtype, monkeypatch):
    """`dtype` is that of the decays, in which they are saved for the backward pass."""
    import_fla("fla.ops.gla.chunk")
    tuning.use("first")  # the interpreter has no driver to time configurations with
    for name in ("fla.ops.common.chunk_h", "fla.ops.gla.chunk"):
        monkeypatch.setattr(sys.modules[name], "range", loop, raising=False)

    torch.manual_seed(0)
    q, k, v, g = (torch.randn(1, 200, 1, 16) for _ in range(4))
    cu_seqlens = torch.tensor([0, 60, 200])
    weights = torch.randn(1, 200, 1, 16)
    leaves = [x.detach().requires_grad_() for x in (q, k, v, (logsigmoid(g) / 4).to(dtype))]
    results = []
    for output, _ in (
        _ChunkGLA.apply(*leaves, None, False, True, cu_seqlens, 128),
        mixers.chunk_gla(*leaves, cu_seqlens=cu_seqlens),
    ):
        results.append([output.detach(), *torch.autograd.grad((output * weights).sum(), leaves)])
    errors = {
        name: float((ours - theirs).norm() / theirs.norm())
        for name, ours, theirs in zip(("o", "dq", "dk", "dv", "dg"), *results, strict=True)
    }
    if dtype == torch.bfloat16:
        assert errors.pop("dg") < 2**-9  # half of bf16's last place, at most
    assert max(errors.values()) < 1e-5
