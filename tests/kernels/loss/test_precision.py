"""What rounding must not touch: sure tokens, ignored rows with far logits, a number added to all logits of a row."""

from typing import Any

import pytest
import torch
from cases import BF16, FP32, IGNORE, error, gradients, in_fp64
from cce_kernels import linear_cross_entropy, linear_log_probs, reference_linear_cross_entropy
from everywhere import devices, devices_with
from torch import Tensor

DTYPES = pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)  # fp16 takes the way of bf16
KINDS = {"plain": {}, "bias": {"bias": True}, "softcap": {"softcap": 50.0}, "scaled": {"logit_scale": 0.7}}


def sure(dtype: torch.dtype, device: str, peak: float, n_rows: int = 70) -> tuple[Tensor, Tensor, Tensor]:
    """Rows whose target logit exceeds the others by about `peak`."""
    g = torch.Generator().manual_seed(0)
    c = torch.randn(150, 16, generator=g) / 4
    targets = torch.randint(0, 150, (n_rows,), generator=g)
    e = 0.2 * torch.randn(n_rows, 16, generator=g) + peak * c[targets] / c[targets].square().sum(dim=1, keepdim=True)
    e, c = e.to(device, dtype).requires_grad_(), c.to(device, dtype).requires_grad_()
    return e, c, targets.to(device)


@devices
@DTYPES
@pytest.mark.parametrize(("peak", "kind"), [(20, "plain"), *((45, kind) for kind in KINDS)])
def test_the_loss_of_a_token_that_the_model_is_sure_of_keeps_its_digits(peak, kind, dtype, device):
    """The difference of LSE and target logit, both about 45, is right to 4e-6."""
    e, c, targets = sure(dtype, device, peak)
    options = dict(KINDS[kind])
    bias = 0.1 * torch.arange(150, device=device) % 1 if options.pop("bias", False) else None
    loss, metrics = linear_cross_entropy(e, c, targets, bias=bias, reduction="none", return_metrics=True, **options)
    e64, c64 = in_fp64(e, c)
    truth, _ = reference_linear_cross_entropy(e64, c64, targets, bias=bias, reduction="none", **options)
    assert truth.min() < (1e-2 if peak == 20 else 1e-6)
    assert ((loss - truth).abs() <= 1e-4 * truth).all()
    if not options and bias is None:
        entropy = torch.special.entr(torch.softmax(e64 @ c64.T, dim=1)).sum(dim=1).mean()
        assert metrics["entropy"].item() == pytest.approx(entropy.item(), abs=2e-5)


@devices
@DTYPES
@pytest.mark.parametrize("options", [{}, {"bias": True}, {"softcap": 9.0}, {"return_lse": True}], ids=str)
def test_a_vocabulary_of_one_entry_has_no_loss(options, dtype, device):
    g = torch.Generator().manual_seed(0)
    e = (10 * torch.randn(5, 24, generator=g)).to(device, dtype).requires_grad_()
    c = torch.randn(1, 24, generator=g).to(device, dtype).requires_grad_()
    bias = torch.full((1,), 0.3, device=device) if "bias" in options else None
    options = {name: value for name, value in options.items() if name != "bias"}
    targets = torch.zeros(5, dtype=torch.long, device=device)
    result = linear_cross_entropy(e, c, targets, bias=bias, reduction="none", **options)
    loss = result[0] if isinstance(result, tuple) else result
    assert not loss.any()
    # p is exp(z − LSE). Both hold a logit of 24 terms, which processors sum in different orders.
    rounding = 24 * 2.0**-24 * (e.abs() @ c.abs().T).float()
    grad_e, grad_c = gradients(loss.sum(), (e, c))
    assert (grad_e.abs() <= rounding @ c.abs().float()).all()
    assert (grad_c.abs() <= rounding.T @ e.abs().float()).all()


def far(dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Logits in which every ignored row has one 200 below its LSE, at column 0 and at its own place."""
    g = torch.Generator().manual_seed(0)
    e, c = torch.randn(70, 16, generator=g), torch.randn(90, 16, generator=g) / 4
    targets = torch.randint(1, 90, (70,), generator=g)
    targets[::3] = IGNORE
    e[:, 0] = 1.0
    c[:, 0] = 0.0
    c[0, 0] = -200.0
    return e.to(device, dtype).requires_grad_(), c.to(device, dtype).requires_grad_(), targets.to(device)


@devices
@DTYPES
@pytest.mark.parametrize("options", [
    {}, {"reduction": "none"}, {"z_loss": 1e-2, "reduction": "none"}, {"label_smoothing": 0.1}, {"softcap": 300.0},
], ids=str)  # fmt: skip
def test_ignored_rows_with_far_logits_change_nothing(options, dtype, device):
    e, c, targets = far(dtype, device)
    kept = targets != IGNORE
    loss, metrics = linear_cross_entropy(e, c, targets, return_metrics=True, **options)
    grads = gradients(loss.sum(), (e, c))
    e_kept = e.detach()[kept].requires_grad_()
    want, want_metrics = linear_cross_entropy(e_kept, c, targets[kept], return_metrics=True, **options)
    want_grads = gradients(want.sum(), (e_kept, c))
    assert not grads[0][~kept].any()
    if loss.dim():
        assert not loss[~kept].any()
        loss = loss[kept]
    assert error(loss, want) < 1e-6
    assert error(grads[0][kept], want_grads[0]) < 1e-2
    assert error(grads[1], want_grads[1]) < 1e-2
    for name, value in metrics.items():
        assert value.item() == pytest.approx(want_metrics[name].item(), rel=1e-5)


@devices
@DTYPES
def test_the_log_sum_exp_of_an_ignored_row_is_right_where_it_is_asked_for(dtype, device):
    e, c, targets = far(dtype, device)
    loss, lse = linear_cross_entropy(e, c, targets, return_lse=True)
    e64, c64 = in_fp64(e, c)
    _, want = reference_linear_cross_entropy(e64, c64, targets)
    torch.testing.assert_close(lse.double(), want, rtol=1e-5, atol=1e-5)
    want_grads = gradients(reference_linear_cross_entropy(e64, c64, targets)[0] + want.sum(), (e64, c64))
    for grad, wanted in zip(gradients(loss + lse.sum(), (e, c)), want_grads, strict=True):
        assert error(grad, wanted) < 1e-2


@devices
@DTYPES
def test_a_target_whose_logit_another_equals_is_not_the_predicted_one(dtype, device):
    e, c = torch.ones(3, 16, dtype=dtype, device=device), torch.ones(70, 16, dtype=dtype, device=device)
    targets = torch.tensor([7, 40, IGNORE], device=device)
    for size, accuracy in ((1.0, 0), (2.0, 0.5)):
        c[7] = size
        _, metrics = linear_cross_entropy(e.requires_grad_(), c.clone().requires_grad_(), targets, return_metrics=True)
        assert metrics["accuracy"].item() == accuracy


CALLS: dict[str, dict[str, Any]] = {
    "mean": {},
    "row_losses": {"reduction": "none"},
    "smoothed": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 1e-4},
    "chunks": {"workspace_mib": 0.1, "accumulate": "fp32"},
    "filter": {"filter_eps": 1e-30},
}
MASKED = [0.0, torch.inf]  # what the first chunk's bias is lowered by


def with_offset(device: str, offset: float, masked: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """e, c, targets and bias; e and c need gradients. Logits are quarters, so fp32 holds them with the offset."""
    g = torch.Generator().manual_seed(0)
    e, c = torch.randint(-12, 13, (70, 16), generator=g) / 4, torch.randint(-1, 2, (600, 16), generator=g).float()
    targets, bias = torch.randint(300, 600, (70,), generator=g), torch.full((600,), offset)
    targets[::5] = -100
    bias[:280] -= masked
    return e.to(device).requires_grad_(), c.to(device).requires_grad_(), targets.to(device), bias.to(device)


@devices_with("call", CALLS, ["mean", "z_loss", "smoothed"])
@pytest.mark.parametrize("offset", [-1e4, 1e5])
def test_loss_and_gradients_are_as_exact_as_without_an_offset(offset, call, device):
    e, c, targets, bias = with_offset(device, offset, 0.0)
    e64, c64, bias64 = in_fp64(e, c, bias)
    options = {name: x for name, x in CALLS[call].items() if name not in ("workspace_mib", "accumulate")}
    want, _ = reference_linear_cross_entropy(e64, c64, targets, bias=bias64, **options)
    got = linear_cross_entropy(e, c, targets, bias=bias.requires_grad_(), **CALLS[call])
    assert error(got, want) <= 1e-6
    for grad, truth in zip(gradients(got, (e, c, bias)), gradients(want, (e64, c64, bias64)), strict=True):
        assert error(grad, truth) <= 2e-6


def everything(e: Tensor, c: Tensor, targets: Tensor, bias: Tensor) -> list[Tensor]:
    """What does not depend on a common offset: metrics, log-probabilities, entropies, gradients of all with one."""
    loss, lse, metrics = linear_cross_entropy(e, c, targets, bias=bias, return_lse=True, return_metrics=True)
    log_probs, entropies = linear_log_probs(e, c, targets, bias=bias, return_entropy=True)
    found = [loss, *metrics.values(), log_probs, entropies]
    return [*found, *gradients(lse.sum(), (e, c)), *gradients(log_probs + 2 * entropies, (e, c))]


@devices_with("masked", MASKED, MASKED)
def test_results_and_gradients_that_no_offset_changes(masked, device):
    want, *found = (everything(*with_offset(device, offset, masked)) for offset in (0.0, -1e4, 1e5))
    for each in found:
        assert all(error(got, plain) <= 2e-6 for got, plain in zip(each, want, strict=True))
