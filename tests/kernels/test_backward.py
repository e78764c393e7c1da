"""Which gradients a backward pass gives, and how often: every dtype, frozen inputs, several passes.

The tests run where they are: on CPU tensors blockwise and, in a process of their own, by the kernels in Triton's
interpreter; on a GPU with `-m gpu`.
"""

import os
import subprocess
import sys
from itertools import product

import numpy as np
import pytest
import torch
from cases import BF16, FP16, FP32, Case, check, draw, error, gradients
from cce_kernels import linear_cross_entropy, schemes

DTYPES = (BF16, FP16, FP32)
HERE = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = pytest.param("cuda", marks=[
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
])  # fmt: skip
devices = pytest.mark.parametrize("device", ["cpu", ON_GPU])


@pytest.mark.skipif(HERE, reason="the interpreter is on: the tests below run in place")
def test_the_kernels_pass_these_tests_in_the_interpreter():
    triton = pytest.importorskip("triton")
    if triton.__version__ < "3.7" and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("Triton 3.6's interpreter fails with numpy 2.4")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", "-m", "not gpu", __file__]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]


@pytest.fixture
def launches_are_free(monkeypatch):
    """The planner stores exponentials for small problems, too, and in chunks of 128 rows."""
    monkeypatch.setattr(schemes, "LAUNCH_SECONDS", 0.0)
    monkeypatch.setattr(schemes, "LEAST_ROWS", 128)
    schemes.plan.cache_clear()
    yield
    schemes.plan.cache_clear()


CROSSED = [
    Case(
        "-".join(str(x)[6:] or "none" for x in (e, c, bias, autocast)), shape=(70,), dim=8, vocab=40, dtype=e, dtype_c=c,
        bias=bias is not None, dtype_bias=bias, autocast=autocast, peak=3,
    )
    for e, c, bias, autocast in product(DTYPES, DTYPES, (None, *DTYPES), (None, BF16, FP16))
    if not HERE or bias in (None, e)  # the interpreter takes a second a case
]  # fmt: skip


@devices
@pytest.mark.parametrize("case", CROSSED, ids=str)
def test_every_dtype_of_e_c_bias_and_autocast(case, device, launches_are_free):
    check(case, device)


@devices
@pytest.mark.parametrize("dtype_c", DTYPES, ids=str)
def test_a_sum_over_rows_that_fp16_cannot_hold_is_only_held_finished(dtype_c, device, launches_are_free):
    """dC of the summed loss is beyond fp16's numbers; that of the mean is not."""
    case = Case("large", shape=(260,), dim=16, vocab=20, dtype=BF16, dtype_c=dtype_c, autocast=BF16, ignored=0)
    e, c, targets, _ = draw(case, device)
    with torch.no_grad():
        e *= 0.1
        e[:, 0] = 3000.0
        c[:, 0] = 0
    with torch.autocast(e.device.type, BF16):
        (grad,) = gradients(linear_cross_entropy(e, c, targets.clamp(max=2)), (c,))
    e32, c32 = (x.detach().float().requires_grad_() for x in (e, c))
    (want,) = gradients(torch.nn.functional.cross_entropy(e32 @ c32.T, targets.clamp(max=2)), (c32,))
    assert error(grad, want) < 1e-2


@devices
@pytest.mark.parametrize("options", [
    {}, {"reduction": "none"}, {"workspace_mib": 0.5}, {"filter_eps": 2.0**-6}, {"label_smoothing": 0.1}, {"bias": True},
], ids=str)  # fmt: skip
def test_main_grad_is_not_touched_where_c_is_frozen(options, device, launches_are_free):
    e, c, targets, bias = draw(Case("frozen", dtype=BF16, bias=True, dim=16, vocab=100), device)
    c = c.detach()
    bias = bias if options.pop("bias", False) else None
    main_grad = torch.randn(c.shape, device=device)
    before = main_grad.clone()
    linear_cross_entropy(e, c, targets, bias=bias, main_grad_c=main_grad, **options).sum().backward()
    assert torch.equal(main_grad, before)
    assert e.grad.abs().sum() > 0


@devices
def test_main_grad_is_not_touched_by_a_call_for_the_bias_alone(device):
    e, c, targets, bias = draw(Case("bias_alone", dtype=BF16, bias=True, dim=16, vocab=100), device)
    main_grad = torch.zeros(c.shape, device=device)
    linear_cross_entropy(e.detach(), c.detach(), targets, bias=bias, main_grad_c=main_grad).backward()
    assert not main_grad.any()
    assert bias.grad.any()


PASSES = {
    "stored": {},
    "stored_in_chunks": {"workspace_mib": 0.02},
    "stored_sum": {"reduction": "sum", "z_loss": 1e-3, "softcap": 20.0},
    "stored_fp32_sums": {"accumulate": "fp32"},
    "recomputed": {"label_smoothing": 0.1},
    "row_losses": {"reduction": "none"},
    "listed": {"filter_eps": 2.0**-10},
}


@devices
@pytest.mark.parametrize("options", PASSES.values(), ids=PASSES)
@pytest.mark.parametrize("main_grad", [True] if HERE else [False, True])
def test_backward_passes_may_follow_one_another(options, main_grad, device, launches_are_free):
    """With retain_graph=True; whatever becomes of the first pass's gradients."""
    if "workspace_mib" in options and device == "cpu" and not HERE:
        options = {"workspace_mib": 0.5}  # of CPU tensors all memory counts
    e, c, targets, _ = draw(Case("passes", shape=(260,), dim=8, vocab=60, dtype=BF16, peak=3), device)
    buffer = torch.zeros(c.shape, device=device) if main_grad else None
    loss = linear_cross_entropy(e, c, targets, main_grad_c=buffer, **options)
    upstream = torch.ones_like(loss)
    found = []
    for again in (True, True, False):
        e.grad = c.grad = None
        if buffer is not None:
            buffer.zero_()
        loss.backward(upstream, retain_graph=again)
        grad_c = c.grad if buffer is None else buffer
        found.append((e.grad.clone(), grad_c.clone()))
        e.grad.zero_()
        grad_c.zero_()
    for later in found[1:]:
        for grad, first in zip(later, found[0], strict=True):
            assert error(grad, first) < 6e-3  # two roundings to bf16
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward(upstream)


@devices
def test_the_gradients_of_e_and_of_c_may_be_asked_for_one_after_the_other(device, launches_are_free):
    e, c, targets, _ = draw(Case("one_each", shape=(260,), dim=8, vocab=60, dtype=BF16, peak=3), device)
    both = gradients(linear_cross_entropy(e, c, targets), (e, c))
    loss = linear_cross_entropy(e, c, targets)
    (grad_e,) = torch.autograd.grad(loss, e, retain_graph=True)
    (grad_c,) = torch.autograd.grad(3 * loss, c)
    assert error(grad_e, both[0]) < 6e-3
    assert error(grad_c, 3 * both[1]) < 6e-3


@devices
def test_a_changed_weight_is_still_refused_between_two_passes(device, launches_are_free):
    e, c, targets, _ = draw(Case("changed", shape=(260,), dim=8, vocab=60, dtype=BF16), device)
    loss = linear_cross_entropy(e, c, targets)
    loss.backward(retain_graph=True)
    with torch.no_grad():
        c += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
