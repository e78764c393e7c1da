"""Tensors without values: forward and backward give shapes, dtypes and devices, also in eager mode."""

import os
from contextlib import nullcontext

import pytest
import torch
from cce_kernels import PRESETS, linear_cross_entropy
from cce_kernels.arguments import checked
from torch._subclasses.fake_tensor import FakeTensorMode

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the same without kernels")
OPTIONS = {
    "plain": {},
    "rows": {"reduction": "none", "shift": 1, "return_lse": True},
    "statistics": {"preset": "cce_filter", "return_stats": True, "return_metrics": True},
    "filtered": PRESETS["cce_filter"] | {"filter_if_faster": False, "return_stats": True},
    "main_grad": {"main_grad_c": True},
    "weights": {"token_weights": True},
}


@pytest.mark.parametrize("kind", ["fake", "meta"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_shapes_of_losses_and_gradients(options, kind):
    mode, device = (FakeTensorMode(), "cpu") if kind == "fake" else (nullcontext(), "meta")
    with mode:
        e = torch.empty(6, 40, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
        c = torch.empty(1000, 64, device=device, requires_grad=True)
        targets = torch.empty(6, 40, device=device, dtype=torch.int64)
        if "main_grad_c" in options:
            options = options | {"main_grad_c": torch.empty(1000, 64, device=device)}
        if "token_weights" in options:
            options = options | {"token_weights": torch.empty(6, 40, device=device)}
        loss, *extras = as_tuple(linear_cross_entropy(e, c, targets, **options))
        loss.sum().backward()
    assert loss.shape == ((6, 39) if options.get("reduction") == "none" else ())
    assert (loss.dtype, loss.device.type) == (torch.float32, device)
    assert e.grad is not None
    assert (e.grad.shape, e.grad.dtype) == (e.shape, e.dtype)
    if "main_grad_c" not in options:
        assert c.grad is not None
        assert (c.grad.shape, c.grad.dtype) == (c.shape, c.dtype)
    if "return_lse" in options:
        assert extras[0].shape == (6, 39)
    if "return_stats" in options:
        assert {x.shape for of in extras for x in of.values()} == {()}


def test_shapes_on_a_gpu_that_is_not_here():
    pytest.importorskip("triton")
    with FakeTensorMode(), torch.no_grad():
        e, c = (torch.empty(n, 256, device="cuda", dtype=torch.bfloat16) for n in (2048, 32000))
        loss = linear_cross_entropy(e, c, torch.empty(2048, device="cuda", dtype=torch.int64))
    assert (loss.shape, loss.device.type) == ((), "cuda")


@pytest.mark.parametrize(("rows", "filtered"), [(8192, True), (1024, False)])
def test_a_gpu_that_is_not_here_filters_where_that_is_faster(rows, filtered):
    """The fake kernel's state: lists, or the exponentials of the exact loss."""
    pytest.importorskip("triton")
    states = []
    for preset in ("cce_filter", "cce_kahan"):
        with FakeTensorMode():
            e, c = (torch.empty(n, 2304, device="cuda", dtype=torch.bfloat16) for n in (rows, 128256))
            targets = torch.empty(rows, device="cuda", dtype=torch.int64)
            inputs, call, _ = checked(e, c, targets, None, None, None, {}, preset=preset)
            call = call._replace(needs=(True, True, False))
            *_, state = torch.ops.cce_kernels.cross_entropy(*inputs, call.handle())
        states.append([(x.shape, x.dtype) for x in state])
    assert (states[0] != states[1]) == filtered


def as_tuple(x):
    return x if isinstance(x, tuple) else (x,)
