"""A number that is added to all logits of a row costs no precision in fp32.

The logits are quarters. So fp32 holds them exactly, and every error is the loss's own.
"""

from typing import Any

import pytest
import torch
from cases import error, gradients, in_fp64
from cce_kernels import linear_cross_entropy, linear_log_probs, reference_linear_cross_entropy
from everywhere import devices_with
from torch import Tensor

CALLS: dict[str, dict[str, Any]] = {
    "mean": {},
    "row_losses": {"reduction": "none"},
    "smoothed": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 1e-4},
    "chunks": {"workspace_mib": 0.1, "accumulate": "fp32"},
    "filter": {"filter_eps": 1e-30},
}
MASKED = [0.0, torch.inf]  # what the first chunk's bias is lowered by


def draw(device: str, offset: float, masked: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """e, c, targets and bias; all but the targets need gradients."""
    g = torch.Generator().manual_seed(0)
    e, c = torch.randint(-12, 13, (70, 16), generator=g) / 4, torch.randint(-1, 2, (600, 16), generator=g).float()
    targets, bias = torch.randint(300, 600, (70,), generator=g), torch.full((600,), offset)
    targets[::5] = -100
    bias[:280] -= masked
    return e.to(device).requires_grad_(), c.to(device).requires_grad_(), targets.to(device), bias.to(device)


@devices_with("call", CALLS, ["mean", "z_loss", "smoothed"])
@pytest.mark.parametrize("offset", [-1e4, 1e5])
def test_loss_and_gradients_are_as_exact_as_without_an_offset(offset, call, device):
    e, c, targets, bias = draw(device, offset, 0.0)
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
    want, *found = (everything(*draw(device, offset, masked)) for offset in (0.0, -1e4, 1e5))
    for each in found:
        assert all(error(got, plain) <= 2e-6 for got, plain in zip(each, want, strict=True))
