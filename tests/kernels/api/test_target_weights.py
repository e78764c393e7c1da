"""`target_weights`: several weighted targets a row. cases.CASES has them with every option, at twice torch's error."""

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from cases import BF16, IGNORE, Case, draw, error, gradients, in_fp64, of_operator
from cce_kernels import linear_cross_entropy
from cce_kernels.operators import cross_entropy
from cce_kernels.options import Call, Inputs
from cce_kernels.runtime.interpreter import INTERPRETED
from everywhere import devices, kernels
from stored_cases import three_products
from torch import Tensor

VOCAB = 391
ROWS = 200
FOUR, ONE_CHUNK, CHUNKS = 0, 256, 128  # products; or three, in chunks of so many rows


def drawn(device: str, k: int = 5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """e, c, and targets and weights (ROWS, K). Some are ignored, many rows share one, one row has one five times."""
    case = Case("soft", shape=(ROWS,), vocab=VOCAB, dtype=BF16, peak=4, several=k)
    e, c, targets, _ = draw(case, device)
    targets[::3, -1], targets[5], targets[7, 0], targets[11] = 3, 17, IGNORE, IGNORE
    weights = torch.rand(targets.shape, generator=torch.Generator().manual_seed(4)).to(device)
    return e, c, targets, weights.masked_fill(targets == IGNORE, torch.nan)


def dense(e: Tensor, c: Tensor, targets: Tensor, weights: Tensor, bias: Tensor | None = None, s: float = 0) -> Tensor:
    """The row losses, from torch, with soft targets (N, V). s: label smoothing."""
    z = F.linear(e, c, None if bias is None else bias.to(e))
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    soft = torch.zeros_like(z).scatter_add(1, targets.clamp(min=0), weights.masked_fill(targets == IGNORE, 0).to(z))
    return F.cross_entropy(z, (1 - s) * soft + s * soft.mean(dim=1, keepdim=True), reduction="none")


def scheme(rows: int) -> AbstractContextManager[None]:
    return three_products(rows) if rows else nullcontext()


@kernels
@pytest.mark.parametrize(
    ("rows", "reduction", "bias"),
    [(FOUR, "mean", True), (ONE_CHUNK, "mean", False), (ONE_CHUNK, "none", True), (CHUNKS, "mean", True)],
)
def test_it_is_cross_entropy_with_soft_targets(rows, reduction, bias, device):
    e, c, targets, weights = drawn(device)
    b, s = (torch.randn(VOCAB).to(device).requires_grad_(), 0.1) if bias else (None, 0.0)
    options = {"bias": b, "reduction": reduction, "label_smoothing": s}
    with scheme(rows):
        loss = linear_cross_entropy(e, c, targets, target_weights=weights, **options)
        got = gradients(loss, (e, c, b))
    e64, c64, b64 = in_fp64(e, c, b)
    want = dense(e64, c64, targets, weights, b64, s)
    want = want if reduction == "none" else want.sum() / (targets != IGNORE).any(dim=1).sum()
    assert error(loss, want) < 1e-6
    for grad, truth in zip(got, gradients(want, (e64, c64, b64)), strict=True):
        assert error(grad, truth) < (5e-3 if grad.dtype == BF16 else 1e-3)  # of one target: the same


@kernels
@pytest.mark.parametrize("rows", [FOUR, ONE_CHUNK, CHUNKS])
def test_a_student_near_its_teacher_learns_as_precisely_as_with_logits_in_fp32(rows, device):
    """p and the weights cancel to a tenth of them. With fp32 logits the gradients' own rounding is left, 1.7e-3."""
    e, c, *_ = drawn(device)
    with torch.no_grad():
        teacher = (e.float() @ c.float().T + 0.1 * torch.randn(ROWS, VOCAB).to(device)).softmax(dim=1)
    weights, targets = teacher.topk(4 if INTERPRETED else 16)
    with scheme(rows):
        got = gradients(linear_cross_entropy(e, c, targets, target_weights=weights), (e, c))
    in_fp32 = gradients(dense(e.float(), c.float(), targets, weights).mean(), (e, c))
    e64, c64 = in_fp64(e, c)
    want = gradients(dense(e64, c64, targets, weights).mean(), (e64, c64))
    for grad, fp32, truth in zip(got, in_fp32, want, strict=True):
        assert error(grad, truth) < 1.5 * error(fp32, truth)


@kernels
@pytest.mark.parametrize("rows", [FOUR, ONE_CHUNK, CHUNKS])
def test_one_target_is_one_with_token_weights_and_calls_give_the_same_bits(rows, device):
    def results(targets: Tensor, **weights: Tensor) -> list[Tensor]:
        with scheme(rows):
            loss = linear_cross_entropy(e, c, targets, reduction="sum", z_loss=1e-3, **weights)
            return [loss, *gradients(loss, (e, c))]

    e, c, targets, weights = drawn(device)
    one = results(targets[:, 0], token_weights=weights[:, 0])
    for a, b in zip(one, results(targets[:, :1], target_weights=weights[:, :1]), strict=True):
        assert torch.equal(a, b)
    first = results(targets, target_weights=weights)
    for a, b in zip(first, results(targets, target_weights=weights), strict=True):
        assert torch.equal(a, b)


@devices
def test_a_target_outside_the_vocabulary_makes_its_row_nan(device):
    """On a GPU nothing may wait for the targets. CPU calls raise instead."""
    e, c, targets, weights = drawn(device)
    *inputs, call = of_operator(e, c, targets, target_weights=weights, reduction="none", return_metrics=False)
    x = Inputs(*inputs)
    x.every_weight[2, 3], x.weights[2] = torch.nan, torch.nan
    rows, *_ = cross_entropy(x, Call.of(call))
    assert rows.isnan().nonzero().tolist() == [[2]]
    assert not rows[11].any()


@devices
def test_accuracy_is_that_of_the_first_target_that_is_not_ignored(device):
    e, c, targets, weights = drawn(device, k=2)
    first = torch.where(targets[:, 0] == IGNORE, targets[:, 1], targets[:, 0])
    _, lse, metrics = linear_cross_entropy(e, c, targets, target_weights=weights, return_lse=True, return_metrics=True)
    _, of_first, metrics_of_first = linear_cross_entropy(e, c, first, return_lse=True, return_metrics=True)
    kept = first != IGNORE
    assert torch.equal(lse[kept], of_first[kept])
    assert metrics == metrics_of_first


@devices
def test_a_row_without_a_dimension_for_rows_and_no_rows(device):
    e, c, targets, weights = drawn(device)
    whole = linear_cross_entropy(e[:1], c, targets[:1], target_weights=weights[:1])
    assert torch.equal(linear_cross_entropy(e[0], c, targets[0], target_weights=weights[0]), whole)
    assert linear_cross_entropy(e[:0], c, targets[:0], target_weights=weights[:0]) == 0
