"""The public function on CPU tensors: what it accepts and rejects, and its promises beyond the numbers."""

import math
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import BF16, FP32, IGNORE, Case, LargestTensor, draw, error, gradients, in_fp64, of_operator
from cce_kernels import LinearCrossEntropyLoss, WorkspaceTooSmall, linear_cross_entropy, linear_log_probs
from cce_kernels.accumulator import Accumulator
from cce_kernels.reference import reference_linear_cross_entropy


def test_backward_inside_autocast_is_the_same_as_outside():
    e, c, targets, _ = draw(Case("autocast_backward", dtype=FP32), "cpu")
    outside = gradients(linear_cross_entropy(e, c, targets), (e, c))
    loss = linear_cross_entropy(e, c, targets)
    with torch.autocast("cpu", torch.bfloat16):
        inside = gradients(loss, (e, c))
    assert all(torch.equal(a, b) for a, b in zip(outside, inside, strict=True))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_rows(reduction):
    e, c = torch.randn(0, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    bias = torch.randn(5, requires_grad=True)
    targets = torch.empty(0, dtype=torch.long)
    loss, lse = linear_cross_entropy(e, c, targets, bias=bias, reduction=reduction, return_lse=True)
    assert loss.shape == ((0,) if reduction == "none" else ())
    assert lse.shape == (0,)
    assert loss.sum() == 0
    loss.sum().backward()
    assert e.grad.shape == e.shape
    assert not c.grad.any()
    assert not bias.grad.any()
    c.grad, summed = None, torch.zeros_like(c)
    linear_cross_entropy(e.detach(), c, targets, main_grad_c=summed).backward()
    assert c.grad is None
    assert not summed.any()


def test_one_row_without_a_dimension_for_rows():
    e, c, targets, _ = draw(Case("one", shape=(1,)), "cpu")
    want = linear_cross_entropy(e, c, targets, reduction="none", return_lse=True)
    found = linear_cross_entropy(e[0], c, targets[0], reduction="none", return_lse=True)
    for got, row in zip(found, want, strict=True):
        assert got.shape == ()
        assert got == row[0]


def test_shift_ignores_the_rows_without_a_target():
    e, c, targets, _ = draw(Case("shift", shape=(3, 9), ignored=0), "cpu")
    want = linear_cross_entropy(e[:, :-2].reshape(-1, 40), c, targets[:, 2:].reshape(-1))
    torch.testing.assert_close(linear_cross_entropy(e, c, targets, shift=2), want)
    assert linear_cross_entropy(e, c, targets, shift=9) == 0


def test_an_ignore_index_inside_the_vocabulary_is_ignored():
    e, c, targets, _ = draw(Case("pad", ignored=0), "cpu")
    targets[::2] = 0
    loss = linear_cross_entropy(e, c, targets, ignore_index=0)
    want = linear_cross_entropy(e, c, targets.masked_fill(targets == 0, IGNORE))
    assert loss == want
    assert all(torch.equal(a, b) for a, b in zip(gradients(loss, (e, c)), gradients(want, (e, c)), strict=True))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint16, torch.uint8])
def test_targets_of_any_integer_type(dtype):
    e, c, targets, _ = draw(Case("int", vocab=200, ignored=0), "cpu")
    assert linear_cross_entropy(e, c, targets.to(dtype)) == linear_cross_entropy(e, c, targets)
    reference = reference_linear_cross_entropy(e, c, targets.to(dtype))[0]
    assert reference == reference_linear_cross_entropy(e, c, targets)[0]


@pytest.mark.parametrize(("dtype", "wrapped"), [(torch.uint8, 156), (torch.int8, 28)])
def test_an_ignore_index_that_the_targets_type_cannot_hold_is_no_target(dtype, wrapped):
    """-100 in 8 bits is 156, which is a valid entry."""
    ignore_index = -100 if dtype == torch.uint8 else 1000 + wrapped
    e, c, targets, _ = draw(Case("narrow", shape=(3, 7), vocab=200, ignored=0, targets_below=100), "cpu")
    targets[:, 3] = min(wrapped, torch.iinfo(dtype).max)
    for options in ({"shift": 2}, {}):
        loss = linear_cross_entropy(e, c, targets.to(dtype), ignore_index=ignore_index, **options)
        assert loss == linear_cross_entropy(e, c, targets, ignore_index=ignore_index, **options)


def test_kahan_keeps_what_plain_sums_lose():
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(64, 50, 50, generator=generator)
    truth = parts.double().sum(dim=0)
    errors = {}
    for accumulate in ("kahan", "fp32", "bf16"):
        total = Accumulator(parts[0], (50, 50), BF16, accumulate)
        for part in parts:
            total.add(part.clone())
        errors[accumulate] = error(total.result(), truth)
    rounding = error(truth.to(BF16), truth)
    assert errors["fp32"] <= 1.001 * rounding
    assert errors["kahan"] <= 1.01 * rounding
    assert errors["bf16"] > 2 * rounding


def test_statistics_break_the_graph_of_a_compiled_program():
    e, c, targets, _ = draw(Case("compiled_stats", peak=4), "cpu")

    def program(e, c):
        return linear_cross_entropy(e * 2, c, targets, return_stats=True, filter_eps=2**-6)

    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="return_stats=True runs outside of a compiled graph"):
        torch.compile(program, backend="aot_eager", fullgraph=True)(e, c)
    loss, stats = torch.compile(program, backend="aot_eager")(e, c)
    want_loss, want_stats = program(e, c)
    torch.testing.assert_close(gradients(loss, (e, c)), gradients(want_loss, (e, c)))
    assert {k: v.item() for k, v in stats.items()} == {k: v.item() for k, v in want_stats.items()}
    assert stats["entries_kept"].isfinite()


@pytest.mark.parametrize("wanted", ["e", "c", "bias", "scale"])
def test_a_second_derivative_is_refused(wanted):
    """Also inside a larger expression, such as a gradient penalty, where it would silently count as 0."""
    e, c, targets, bias = draw(Case("twice", shape=(6,), bias=True), "cpu")
    scale = torch.ones((), requires_grad=True)
    loss = scale * linear_cross_entropy(e, c, targets, bias=bias)
    (grad,) = torch.autograd.grad(loss, e, create_graph=True)
    assert torch.equal(grad, torch.autograd.grad(loss, e)[0])
    penalised = loss + grad.square().sum()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(penalised, {"e": e, "c": c, "bias": bias, "scale": scale}[wanted])


def test_a_workspace_too_small_can_be_pickled():
    """Processes pickle the errors that they send each other."""
    error = WorkspaceTooSmall(0.5, 3)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.least_mib) == (str(error), 3)
    assert str(error) == "workspace_mib: 0.5 is too small for this shape; give at least 3"


def test_the_workspace_bounds_what_the_passes_allocate(monkeypatch):
    workspace_mib, e, c = (2, torch.randn(512, 32, requires_grad=True), torch.randn(8192, 32, requires_grad=True))
    with LargestTensor() as largest:
        linear_cross_entropy(e, c, torch.randint(0, 8192, (512,)), workspace_mib=workspace_mib).backward()
    assert 2**17 < largest.nbytes <= workspace_mib * 2**20


WEIGHTED = {"shift": 1, "label_smoothing": 0.1}
COMPILED: dict[str, Callable[..., Any]] = {
    "mean": lambda e, c, t, bias, w: 3 * linear_cross_entropy(2 * e, c, t),
    "weighted rows": lambda e, c, t, bias, w: linear_cross_entropy(
        2 * e, c, t, token_weights=2 * w, reduction="none", **WEIGHTED
    ).sum(),
    "module": lambda e, c, t, bias, w: LinearCrossEntropyLoss(label_smoothing=0.1)(2 * e, c, t, bias),
    "entropies": lambda e, c, t, bias, w: math.prod(
        linear_log_probs(2 * e, c, t, bias=bias, return_entropy=True, shift=1)
    ).sum(),
}


@pytest.mark.parametrize("name", COMPILED)
def test_inside_a_compiled_program(name):
    e, c, targets, bias = draw(Case("compiled", shape=(5, 9), bias=True), "cpu")
    weights = torch.rand(5, 9, generator=torch.Generator().manual_seed(3))

    def program(e, c, bias):
        return COMPILED[name](e, c, targets, bias, weights)

    torch._dynamo.reset()
    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)(e, c, bias)  # no graph break
    torch.testing.assert_close(compiled, program(e, c, bias))
    each = (torch.autograd.grad(x, (e, c, bias), allow_unused=True) for x in (compiled, program(e, c, bias)))
    for a, b in zip(*each, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("filter_eps", [None, 2**-8])
def test_main_grad_is_added_to_in_place_of_a_gradient(filter_eps):
    e, c, targets, bias = draw(Case("main_grad", dtype=BF16, bias=True, peak=4), "cpu")
    options = {"bias": bias, "filter_eps": filter_eps, "workspace_mib": 0.5}
    main_grad = torch.randn(c.shape)
    before = main_grad.clone()
    (2 * linear_cross_entropy(e, c, targets, main_grad_c=main_grad, **options)).backward()
    assert c.grad is None
    added = main_grad - before
    grads = gradients(2 * linear_cross_entropy(e, c, targets, **options), (e, c, bias))
    torch.testing.assert_close([e.grad, added.to(BF16), bias.grad], grads)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "softcap": 9.0}], ids=str)
def test_the_custom_operator_keeps_to_pytorchs_rules(options):
    """Schema, fake kernel, autograd registration and a trace through AOTAutograd, as torch.library checks them."""
    inputs = draw(Case("operator", shape=(20,), dim=8, vocab=30, bias=True), "cpu")
    arguments = of_operator(*inputs, torch.linspace(-1, 1, 20) if options else None, **options)
    torch.library.opcheck(torch.ops.cce_kernels.cross_entropy.default, arguments)


def test_the_reference_passes_gradcheck():
    e, c, targets, bias = in_fp64(*draw(Case("reference", shape=(5,), dim=4, vocab=7, bias=True), "cpu"))

    def loss(e, c, bias):
        options = {"label_smoothing": 0.1, "softcap": 9.0, "z_loss": 1e-2, "logit_scale": 1.3}
        return reference_linear_cross_entropy(e, c, targets.long(), bias=bias, **options)

    assert torch.autograd.gradcheck(loss, (e, c, bias))


def test_it_runs_where_numpy_is_not_installed_and_without_torchs_compiler():
    """torch and Triton do not need numpy, so an environment with only the kernels lacks it."""
    program = """
import sys, warnings
sys.modules["numpy"] = None  # as if it were not installed
warnings.simplefilter("ignore")
import torch
from cce_kernels import linear_cross_entropy
assert "torch._dynamo" not in sys.modules  # which takes seconds to import
hidden, head = (torch.randn(shape, requires_grad=True) for shape in ((2, 8, 16), (100, 16)))
linear_cross_entropy(hidden, head, torch.randint(0, 100, (2, 8)), shift=1).backward()
assert hidden.grad.isfinite().all() and head.grad.isfinite().all()
"""
    kernels = Path(__file__).resolve().parents[3] / "kernels"
    done = subprocess.run([sys.executable, "-c", program], cwd=kernels, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
