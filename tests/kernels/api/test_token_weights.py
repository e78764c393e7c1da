"""`token_weights`: a number that each row's loss is multiplied by."""

from contextlib import nullcontext

import pytest
import torch
from cases import IGNORE, Case, draw, error, gradients, of_operator
from cce_kernels import linear_cross_entropy
from cce_kernels.runtime.interpreter import INTERPRETED
from everywhere import devices
from stored_cases import Stored, three_products
from stored_cases import draw as draw_stored

SMALL = Case("weights", shape=(50,), dim=24, vocab=300)
PATHS = {"recomputed": {}, "filter": {"filter_eps": 2.0**-6}, "tail": {"filter_eps": 2.0**-6, "filter_unbiased": True}}


def weights_like(targets: torch.Tensor) -> torch.Tensor:
    return torch.randn(targets.shape, generator=torch.Generator().manual_seed(3)).to(targets.device)


@devices
@pytest.mark.parametrize("options", PATHS.values(), ids=PATHS)
def test_weights_are_upstream_gradients_of_row_losses(options, device):
    e, c, targets, _ = draw(SMALL, device)
    weights = weights_like(targets)
    rows = linear_cross_entropy(e, c, targets, reduction="none", **options)
    want = gradients((weights * rows).sum(), (e, c))
    loss = linear_cross_entropy(e, c, targets, reduction="sum", token_weights=weights, **options)
    weighted = weights.double() * rows.double()
    weighted[targets == IGNORE] = 0
    assert (loss - weighted.sum()).abs() < 1e-6 * weighted.abs().sum()
    for grad, wanted in zip(gradients(loss, (e, c)), want, strict=True):
        assert error(grad, wanted) < 1e-6
    weighted = linear_cross_entropy(e, c, targets, reduction="none", token_weights=weights, **options)
    assert torch.equal(weighted, torch.where(targets == IGNORE, 0, weights * rows))


@devices
@pytest.mark.parametrize("rows", [0, 128])  # four products; three, in several chunks
def test_weights_of_1_and_calls_again_give_the_same_bits(rows, device):
    if rows and device == "cpu" and not INTERPRETED:
        rows = 0  # blockwise torch has one scheme
    e, c, targets = draw_stored(Stored("ones"), device)

    def results(**weights):
        with three_products(rows) if rows else nullcontext():
            loss = linear_cross_entropy(e, c, targets, label_smoothing=0.1, z_loss=1e-3, **weights)
            return [loss, *gradients(loss, (e, c))]

    plain, ones, again, twos = (
        results(**{} if x is None else {"token_weights": torch.full(targets.shape, x, device=device)})
        for x in (None, 1.0, 1.0, 2.0)
    )
    for a, b, once_more, of_twos in zip(plain, ones, again, twos, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(b, once_more)
        assert torch.equal(of_twos, b)  # a mean


@devices
def test_weights_that_sum_to_0_give_no_mean_and_no_gradients(device):
    e, c, targets, _ = draw(SMALL, device)
    weights = torch.where(torch.arange(50, device=device) % 2 == 0, 1.0, -1.0)
    targets[:] = targets.clamp(min=0)
    for given in (torch.zeros(50, device=device), weights):
        loss, metrics = linear_cross_entropy(e, c, targets, token_weights=given, return_metrics=True)
        assert loss == 0
        assert not any(grad.any() for grad in gradients(loss, (e, c)))
        assert metrics["entropy"] > 0  # metrics have no weights


@devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_16_bits_with_any_strides(dtype, device):
    e, c, targets, _ = draw(Case("strided", shape=(5, 9), dim=24, vocab=300), device)
    weights = weights_like(targets).to(dtype)
    want = linear_cross_entropy(e, c, targets, token_weights=weights.float(), shift=1, reduction="sum")
    for given in (weights, weights.T.contiguous().T):
        assert torch.equal(linear_cross_entropy(e, c, targets, token_weights=given, shift=1, reduction="sum"), want)
    of_columns = linear_cross_entropy(e, c, targets, token_weights=weights[:1].expand(5, 9), reduction="none")
    rows = linear_cross_entropy(e, c, targets, reduction="none")
    assert torch.equal(of_columns, torch.where(targets == IGNORE, 0, rows * weights[:1].float()))


@devices
@pytest.mark.parametrize("weighted", [False, True])
def test_a_target_outside_the_vocabulary_makes_the_loss_nan_at_any_weight(device, weighted):
    """On a GPU nothing may wait for the targets, so the row becomes NaN. CPU calls raise instead."""
    from cce_kernels.operators import cross_entropy
    from cce_kernels.options import Call, Inputs

    e, c, targets, _ = draw(Case("outside", shape=(6,), ignored=0), device)
    weights = torch.tensor([1.0, -1.0, 0.0, 2.0, 3.0, torch.nan], device=device) if weighted else None
    *inputs, call = of_operator(e, c, targets, None, weights, reduction="none", return_metrics=False)
    targets[2], targets[4], targets[5] = c.shape[0], -1, IGNORE
    rows, lse, _ = cross_entropy(Inputs(*inputs), Call.of(call))
    assert rows.isnan().tolist() == [False, False, True, False, True, False]
    assert rows[5] == 0
    assert lse.isfinite().all()
    grad_e, _ = torch.autograd.grad(rows.nansum(), (e, c))
    assert not grad_e[5].any()
    assert grad_e[[0, 1, 3]].isfinite().all()
