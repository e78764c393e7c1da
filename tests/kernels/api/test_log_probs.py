"""`linear_log_probs`: log-probabilities and entropies against fp64, with gradients of both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import BF16, FP16, FP32, IGNORE, Case, draw, error, gradients, in_fp64
from cce_kernels import linear_cross_entropy, linear_log_probs
from everywhere import devices, devices_with, kernels
from stored_cases import Stored, three_products
from stored_cases import draw as draw_stored
from torch import Tensor

SMALL = Case("log_probs", shape=(50,), dim=24, vocab=300)
CASES = {
    "plain": (SMALL, {}),
    "temperature": (SMALL, {"temperature": 0.7}),
    "shift": (Case("shift", shape=(5, 11), dim=24, vocab=300), {"shift": 1, "temperature": 2}),
    "strided": (Case("strided", shape=(5, 11), dim=24, vocab=300, strided=True), {}),
    "everything": (
        Case("everything", shape=(50,), dim=24, vocab=300, bias=True, peak=4),
        {"softcap": 15.0, "logit_scale": 1.3, "temperature": 1.5},
    ),
    "chunks": (Case("chunks", shape=(70,), dim=24, vocab=1300), {"workspace_mib": 0.3}),
    "fp32 sums": (Case("sums", shape=(70,), dim=24, vocab=1300), {"workspace_mib": 0.5, "accumulate": "fp32"}),
    "one entry": (Case("one", shape=(5,), dim=24, vocab=1), {}),
    "all ignored": (Case("ignored", shape=(5,), dim=24, vocab=30, ignored=1), {}),
    "bf16": (Case("bf16", shape=(50,), dim=24, vocab=300, dtype=BF16), {}),
    "autocast": (Case("autocast", shape=(50,), dim=24, vocab=300, autocast=BF16), {}),
    "autocast, flat": (Case("flat", shape=(50,), dim=24, vocab=300, autocast=BF16), {"logit_scale": 0.05}),
    "bf16 everything": (
        Case("bf16", shape=(50,), dim=24, vocab=300, bias=True, dtype=BF16, peak=4),
        {"softcap": 15.0, "logit_scale": 1.3, "temperature": 1.5},
    ),
    "fp16 chunks": (Case("fp16", shape=(70,), dim=24, vocab=1300, dtype=FP16), {"workspace_mib": 0.4}),
}
INTERPRETED_CASES = ("everything", "chunks", "one entry", "autocast, flat", "bf16 everything", "fp16 chunks")


def of_logits(
    e: Tensor, c: Tensor, targets: Tensor, bias: Tensor | None, *, temperature: float = 1.0, shift: int = 0,
    softcap: float | None = None, logit_scale: float = 1.0, **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Log-probabilities and entropies from all logits."""
    if shift:
        e, targets = e[..., :-shift, :], targets[..., shift:]
    z = logit_scale * (e @ c.T) + (0 if bias is None else bias)
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    log_p = torch.log_softmax(z.to(torch.promote_types(z.dtype, FP32)) / temperature, dim=-1)
    entropy = -(log_p.exp() * log_p).sum(dim=-1)
    at_target = log_p.gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)
    return torch.where(targets == IGNORE, 0, at_target), torch.where(targets == IGNORE, 0, entropy)


def policy_loss(log_probs: Tensor, entropies: Tensor) -> Tensor:
    """A sum with a gradient of its own for each log-probability and each entropy."""
    g = torch.Generator().manual_seed(5)
    first, second = (torch.randn(log_probs.shape, generator=g).to(log_probs) for _ in range(2))
    return (first * log_probs).sum() + 3 * (second * entropies).sum()


@devices_with("name", list(CASES), INTERPRETED_CASES)
def test_values_and_gradients_are_those_of_all_logits(name, device):
    case, options = CASES[name]
    e, c, targets, bias = draw(case, device)
    multiplied = (e, c) if case.autocast is None else (e.to(case.autocast), c.to(case.autocast))
    wide = in_fp64(*multiplied, bias)
    want = of_logits(*wide[:2], targets, wide[2], **options)
    with torch.autocast(e.device.type, case.autocast, enabled=case.autocast is not None):
        base = of_logits(e, c, targets, bias, **options)
        found = linear_log_probs(e, c, targets, bias=bias, return_entropy=True, **options)
        alone = linear_log_probs(e, c, targets, bias=bias, **options)
    assert torch.equal(alone, found[0]) or error(alone, found[0]) < 1e-6
    for got, one, true in zip(found, base, want, strict=True):
        assert got.dtype == FP32
        assert got.shape == true.shape
        assert error(got, true) <= 2 * error(one, true) + 2e-6
        assert not got[(targets if "shift" not in options else targets[:, 1:]) == IGNORE].any()
    inputs = [x for x in (e, c, bias) if x is not None]
    wide = [x for x in wide if x is not None]
    for used in ((0, 1), (1,), (0,)):

        def loss(pair: tuple[Tensor, Tensor]) -> Tensor:
            return policy_loss(*(x if i in used else x.detach() for i, x in enumerate(pair)))  # noqa: B023

        upstream = [torch.autograd.grad(loss(pair), of, retain_graph=True)
                    for pair, of in ((found, inputs), (base, inputs), (want, wide))]  # fmt: skip
        for x, got, one, true in zip(inputs, *upstream, strict=True):
            assert got.dtype == x.dtype
            assert error(got, true) <= 2 * error(one, true) + 5e-6


@devices
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_log_probs_are_row_losses_and_take_the_same_gradients(dtype, device):
    e, c, targets, _ = draw(Case("rows", shape=(50,), dim=24, vocab=300, dtype=dtype), device)
    rows = linear_cross_entropy(e, c, targets, reduction="none", logit_scale=1 / 0.7)
    found = linear_log_probs(e, c, targets, temperature=0.7)
    with_entropy, entropies = linear_log_probs(e, c, targets, temperature=0.7, return_entropy=True)
    assert torch.equal(found, -rows)
    want = gradients(-rows, (e, c))
    assert all(torch.equal(a, b) for a, b in zip(gradients(found, (e, c)), want, strict=True))
    for grad, wanted in zip(gradients(with_entropy, (e, c)), want, strict=True):
        assert error(grad, wanted) < (1e-3 if dtype == BF16 else 1e-6)
    _, metrics = linear_cross_entropy(e, c, targets, logit_scale=1 / 0.7, return_metrics=True)
    assert entropies.sum().item() / (targets != IGNORE).sum().item() == pytest.approx(metrics["entropy"].item(), 1e-5)


@kernels
def test_stored_exponentials_serve_all_but_the_entropys_gradient(device):
    """The planner's three products; a gradient of the entropies takes four."""
    e, c, targets = draw_stored(Stored("stored"), device)
    weights = torch.linspace(-1, 1, 300, device=device)
    with three_products(384):
        found, entropies = linear_log_probs(e, c, targets, return_entropy=True)
        got = torch.autograd.grad((weights * found).sum() + entropies.detach().sum(), (e, c))
        rows = linear_cross_entropy(e, c, targets, reduction="none")
        want = torch.autograd.grad((-weights * rows).sum(), (e, c))
    assert all(error(a, b) < 1e-3 for a, b in zip(got, want, strict=True))
    again, entropies = linear_log_probs(e, c, targets, return_entropy=True)
    wide = in_fp64(e, c)
    truth = of_logits(*wide, targets, None)
    got = torch.autograd.grad(policy_loss(again, entropies), (e, c))
    want = torch.autograd.grad(policy_loss(*truth), wide)
    base = torch.autograd.grad(policy_loss(*of_logits(e, c, targets, None)), (e, c))
    for x, one, true in zip(got, base, want, strict=True):
        assert error(x, true) <= 2 * error(one, true)


@devices
def test_twice_into_a_buffer_and_with_the_same_bits(device):
    e, c, targets, _ = draw(SMALL, device)
    buffer = torch.zeros(c.shape, device=device)
    first = gradients(policy_loss(*linear_log_probs(e, c, targets, return_entropy=True)), (e, c))
    loss = policy_loss(*linear_log_probs(e, c, targets, return_entropy=True, main_grad_c=buffer))
    once = torch.autograd.grad(loss, e, retain_graph=True)[0]
    assert torch.equal(once, first[0])
    assert error(buffer, first[1]) < 1e-6
    assert error(torch.autograd.grad(loss, e)[0], first[0]) < 1e-6
    assert error(buffer, 2 * first[1]) < 1e-6


@devices
def test_a_bias_of_minus_infinity_and_upstream_nan_of_ignored_rows(device):
    e, c, targets, bias = draw(Case("masked", shape=(50,), dim=24, vocab=300, bias=True), device)
    targets = torch.where(targets >= 0, targets % 100, targets)
    masked = torch.full_like(bias, -torch.inf)
    masked[:100] = bias.detach()[:100]
    found = linear_log_probs(e, c, targets, bias=masked, return_entropy=True)
    want = linear_log_probs(e, c[:100], targets, bias=bias[:100], return_entropy=True)
    upstream = torch.where(targets == IGNORE, torch.nan, 1.0)
    got = torch.autograd.grad(found, (e, c), (upstream, upstream))
    true = torch.autograd.grad(want, (e, c), (torch.ones_like(upstream), torch.ones_like(upstream)))
    torch.testing.assert_close((*found, *got), (*want, *true), rtol=1e-4, atol=1e-5)


def test_no_rows_no_gradients_and_no_second_derivative():
    e, c = torch.randn(0, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    found = linear_log_probs(e, c, torch.empty(0, dtype=torch.long), return_entropy=True)
    assert [x.shape for x in found] == [(0,), (0,)]
    sum(x.sum() for x in found).backward()
    assert not c.grad.any()
    found = linear_log_probs(e[None], c, torch.empty(1, 0, dtype=torch.long), return_entropy=True)
    assert [x.shape for x in found] == [(1, 0), (1, 0)]
    e, c, targets, _ = draw(SMALL, "cpu")
    with torch.no_grad():
        assert not any(x.requires_grad for x in linear_log_probs(e, c, targets, return_entropy=True))
    _, entropies = linear_log_probs(e, c, targets, return_entropy=True)
    (grad,) = torch.autograd.grad(entropies.sum(), e, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()
