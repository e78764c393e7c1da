"""What a backward pass reads stays in memory, as with torch's own linear layer; and every result is written."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from cases import BF16, CASES, FP32, Case, draw, gradients, launches_are_free, weights_of
from cce_kernels import LinearCrossEntropyLoss, linear_cross_entropy, linear_log_probs
from cce_kernels.runtime.interpreter import INTERPRETED
from everywhere import devices_with
from torch import Tensor

CALLS: dict[str, dict[str, Any]] = {
    "mean": {},
    "row_losses": {"reduction": "none"},
    "lse": {"return_lse": True, "reduction": "sum"},
    "metrics": {"return_metrics": True},
    "smoothed": {"label_smoothing": 0.1, "z_loss": 1e-2},
    "softcap": {"softcap": 9.0, "accumulate": "fp32"},
    "chunks": {"workspace_mib": 0.5, "accumulate": "bf16"},
    "filter": {"filter_eps": 1e-3, "filter_unbiased": True},
    "filter_mass": {"filter_eps": 1e-3, "filter_mass": 0.1, "filter_c": False, "return_stats": True},
    "module": {"module": True},
    "log_probs": {"log_probs": True},
    "entropies": {"log_probs": True, "return_entropy": True},
}


def summed(e: Tensor, c: Tensor, targets: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
    """A number from everything differentiable that a call returns."""
    if options.pop("module", False):
        return LinearCrossEntropyLoss(**options)(e, c, targets, bias)
    function = linear_log_probs if options.pop("log_probs", False) else linear_cross_entropy
    found = function(e, c, targets, bias=bias, **options)
    found = found if isinstance(found, tuple) else (found,)
    return sum((k * x.sum() for k, x in enumerate(found, 1) if isinstance(x, Tensor)), torch.zeros(()))


@contextmanager
def new_memory_is_nan() -> Iterator[None]:
    """torch fills the memory of torch.empty with NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@devices_with(
    "call", [("mean", FP32), *product(CALLS, (BF16,))], [("mean", FP32), ("row_losses", BF16), ("entropies", BF16)]
)
@pytest.mark.parametrize("emptied", ["c", "c and bias, trained", "e"])
@launches_are_free()
def test_an_input_may_lose_its_data_before_the_backward_pass(emptied, call, device):
    """As under DeepSpeed's GatheredParameters, which then puts an empty tensor into the parameter."""
    call, dtype = call
    e, c, targets, bias = draw(Case("emptied", shape=(70,), dim=16, vocab=90, dtype=dtype, bias=True), device)
    if emptied == "c":
        c.requires_grad_(False)
    gone = {"c": (c,), "e": (e,)}.get(emptied, (c, bias))
    wanted = [x for x in (e, c, bias) if x.requires_grad]
    want = gradients(summed(e, c, targets, bias, **CALLS[call]), wanted)
    loss = summed(e, c, targets, bias, **CALLS[call])
    for x in gone:
        x.data = torch.empty(0, dtype=dtype, device=device)
    with new_memory_is_nan():
        got = gradients(loss, [x for x in wanted if not any(x is y for y in gone)])
    kept = [grad for x, grad in zip(wanted, want, strict=True) if not any(x is y for y in gone)]
    assert all(torch.equal(grad, other) for grad, other in zip(got, kept, strict=True))


@devices_with("name", ["e", "c", "bias", "main_grad_c"], ["e", "c", "bias"])
def test_memory_that_is_gone_is_an_error_that_names_it(name, device):
    e, c, targets, bias = draw(Case("gone", shape=(70,), dim=64, vocab=90, dtype=BF16, bias=True), device)
    inputs = {"e": e, "c": c, "bias": bias, "main_grad_c": torch.zeros(c.shape, device=device)}
    inputs = {key: x.detach().clone().requires_grad_(x.requires_grad) for key, x in inputs.items()}
    loss = linear_cross_entropy(targets=targets, workspace_mib=0.5, **inputs)
    inputs[name].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=rf"^{name}: its memory was given back between the forward and the backward"):
        loss.backward()


def test_a_compiled_call_refuses_a_weight_without_data():
    """torch.compile saves the parameter itself. Its own linear layer ends in an error, too."""
    e, c, targets, _ = draw(Case("compiled", shape=(70,), dim=16, vocab=90), "cpu")
    c = torch.nn.Parameter(c.detach(), requires_grad=False)
    torch._dynamo.reset()
    loss = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)(e, c, targets)
    c.data = torch.empty(0)
    with pytest.raises(RuntimeError, match="c: its memory was given back"):
        torch.autograd.grad(loss, e)


IN_BF16 = [case for case in CASES if case.dtype == BF16]
INTERPRETED_CASES = ("ragged", "label_smoothing", "weights-", "everything", "all_ignored", "several-", "several_ev")


@devices_with("case", IN_BF16, [case for case in IN_BF16 if case.name.startswith(INTERPRETED_CASES)])
@launches_are_free(LEAST_SKIPPED=0)
def test_no_result_holds_memory_that_nobody_has_written(case, device):
    if INTERPRETED:  # two tiles
        case = replace(case, vocab=300, shape=(case.shape[0] // 2, *case.shape[1:]))
    e, c, targets, bias = draw(case, device)
    inputs = tuple(x for x in (e, c, bias) if x is not None)
    options = {"bias": bias, **case.options, **weights_of(case, targets)}

    def results() -> list[Tensor]:
        loss, lse, metrics = linear_cross_entropy(e, c, targets, return_lse=True, return_metrics=True, **options)
        plain = linear_cross_entropy(e, c, targets, **options)
        of = targets[..., 0] if case.several else targets
        log_probs, entropies = linear_log_probs(e, c, of, bias=bias, return_entropy=True)
        found = [loss, lse, *metrics.values(), plain, log_probs, entropies]
        found += gradients(linear_cross_entropy(e, c.detach(), targets, **options), (e,))
        found += gradients(linear_cross_entropy(e.detach(), c, targets, **options), (c,))
        for output in (loss.sum() + lse.sum(), plain, log_probs + entropies):
            found += gradients(output, inputs)
        return found

    want = results()
    with new_memory_is_nan():
        got = results()
    for x, y in zip(got, want, strict=True):
        assert x.isfinite().all()
        assert torch.equal(x, y)
