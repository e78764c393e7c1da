"""Which gradients a backward pass returns, and how often: every dtype, frozen inputs, several passes."""

from itertools import product

import pytest
import torch
from cases import BF16, FP16, FP32, Case, check, draw, error, gradients, launches_are_free
from cce_kernels import linear_cross_entropy
from cce_kernels.runtime.interpreter import INTERPRETED
from everywhere import devices, devices_with, on

DTYPES = (BF16, FP16, FP32)
PASSES = {
    "stored": {},
    "stored_in_chunks": {"workspace_mib": 0.04},
    "stored_sum": {"reduction": "sum", "z_loss": 1e-3, "softcap": 20.0},
    "stored_smoothed": {"label_smoothing": 0.1},
    "stored_bias": {"bias": True, "workspace_mib": 0.04},
    "recomputed": {"label_smoothing": 0.1, "softcap": 20.0},
    "row_losses": {"reduction": "none"},
    "listed": {"filter_eps": 2.0**-10, "filter_unbiased": True},
}
INTERPRETED_PASSES = ("stored_in_chunks", "stored_sum", "stored_bias", "recomputed", "row_losses")
FROZEN = [{}, {"reduction": "none"}, {"workspace_mib": 0.5}, {"bias": True}]


# Every dtype of e and c, with some of the bias and of autocast
CROSSED = [
    Case(
        "-".join(str(x)[6:] or "none" for x in (e, c, bias, autocast)), shape=(70,), dim=8, vocab=40, dtype=e,
        dtype_c=c, bias=bias is not None, dtype_bias=bias, autocast=autocast, peak=3,
    )
    for e, c in product(DTYPES, DTYPES)
    for bias, autocast in ((None, None), (None, BF16), (FP32, None), (BF16, FP16), (FP16, BF16))
]  # fmt: skip
INTERPRETED_CASES = [case for case in CROSSED if not case.bias or case.dtype == case.dtype_c == case.dtype_bias]


@devices_with("case", CROSSED, INTERPRETED_CASES)
@launches_are_free()
def test_every_dtype_of_e_c_bias_and_autocast(case, device):
    check(case, device)


@devices
@pytest.mark.parametrize("dtype_c", DTYPES, ids=str)
@launches_are_free()
def test_a_sum_over_rows_that_fp16_cannot_hold_is_only_held_finished(dtype_c, device):
    """dC of the summed loss exceeds fp16's range; dC of the mean does not."""
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


@devices_with("options", [*FROZEN, {"filter_eps": 2.0**-6}], FROZEN)
@launches_are_free()
def test_main_grad_is_not_touched_where_c_is_frozen(options, device):
    e, c, targets, bias = draw(Case("frozen", dtype=BF16, bias=True, dim=16, vocab=100), device)
    c = c.detach()
    options = {**options, "bias": bias} if "bias" in options else options
    main_grad = torch.randn(c.shape, device=device)
    before = main_grad.clone()
    linear_cross_entropy(e, c, targets, main_grad_c=main_grad, **options).sum().backward()
    if "bias" in options:  # nor where the bias alone gets a gradient
        linear_cross_entropy(e.detach(), c, targets, main_grad_c=main_grad, **options).backward()
        assert bias.grad.any()
    assert torch.equal(main_grad, before)
    assert e.grad.abs().sum() > 0


@devices_with("passes", [*product(PASSES, (False, True))], [(name, True) for name in INTERPRETED_PASSES])
@launches_are_free()
def test_backward_passes_may_follow_one_another(passes, device):
    """With retain_graph=True, whatever happens to the first pass's gradients."""
    options, main_grad = dict(PASSES[passes[0]]), passes[1]
    if "workspace_mib" in options and device == "cpu" and not INTERPRETED:
        options["workspace_mib"] = 0.5  # of CPU tensors all memory counts
    e, c, targets, bias = draw(Case("passes", shape=(260,), dim=8, vocab=60, dtype=BF16, peak=3, bias=True), device)
    options |= {"bias": bias} if options.pop("bias", False) else {}
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
@launches_are_free()
def test_the_gradients_of_e_and_of_c_may_be_asked_for_alone_and_one_after_the_other(device):
    e, c, targets, _ = draw(Case("one_each", shape=(260,), dim=8, vocab=60, dtype=BF16, peak=3), device)
    both = gradients(linear_cross_entropy(e, c, targets), (e, c))
    alone = linear_cross_entropy(e.detach(), c, targets), linear_cross_entropy(e, c.detach(), targets)
    assert torch.equal(gradients(alone[0], (c,))[0], both[1])
    assert torch.equal(gradients(alone[1], (e,))[0], both[0])
    loss = linear_cross_entropy(e, c, targets)
    (grad_e,) = torch.autograd.grad(loss, e, retain_graph=True)
    (grad_c,) = torch.autograd.grad(3 * loss, c)
    assert error(grad_e, both[0]) < 6e-3
    assert error(grad_c, 3 * both[1]) < 6e-3


@devices
@launches_are_free()
def test_a_changed_weight_is_still_refused_between_two_passes(device):
    e, c, targets, _ = draw(Case("changed", shape=(260,), dim=8, vocab=60, dtype=BF16), device)
    loss = linear_cross_entropy(e, c, targets)
    loss.backward(retain_graph=True)
    with torch.no_grad():
        c += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@on("cpu", "cuda")
@launches_are_free()
def test_a_compiled_programs_second_backward_pass_is_right_or_refused(device):
    e, c, targets, _ = draw(Case("compiled", shape=(70,), dim=8, vocab=40, dtype=BF16, peak=3), device)

    def program(e, c):
        return 3 * linear_cross_entropy(2 * e, c, targets)

    torch._dynamo.reset()
    backend = "inductor" if device == "cuda" else "aot_eager"
    loss = torch.compile(program, backend=backend, fullgraph=True)(e, c)
    want = gradients(program(e, c), (e, c))
    try:
        first = torch.autograd.grad(loss, (e, c), retain_graph=True)
        second = torch.autograd.grad(loss, (e, c))
    except RuntimeError as refusal:  # by torch.compile, which reuses the memory of what it saved
        if "retain_graph" in str(refusal):
            return
        raise
    for grads in (first, second):
        assert all(error(grad, wanted) < 6e-3 for grad, wanted in zip(grads, want, strict=True))
