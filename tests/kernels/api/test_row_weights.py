"""Weights of rows (`token_weights`) and of several targets a row (`target_weights`).

cases.CASES has both with every option, at twice torch's error.
"""

import pytest
import torch
import torch.nn.functional as F
from cases import BF16, IGNORE, Case, draw, error, gradients, in_fp64, of_operator
from cce_kernels import linear_cross_entropy
from cce_kernels.operators import cross_entropy
from cce_kernels.options import Call, Inputs
from cce_kernels.runtime.interpreter import INTERPRETED
from everywhere import devices, devices_with, kernels
from stored_cases import three_products
from torch import Tensor

VOCAB = 391
ROWS = 100
FOUR, ONE_CHUNK, CHUNKS = 0, 128, 64  # products; or three, in chunks of so many rows
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


# several targets a row
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


@kernels
@pytest.mark.parametrize(
    ("rows", "reduction", "bias"),
    [(FOUR, "mean", True), (ONE_CHUNK, "mean", False), (ONE_CHUNK, "none", True), (CHUNKS, "mean", True)],
)
def test_it_is_cross_entropy_with_soft_targets(rows, reduction, bias, device):
    e, c, targets, weights = drawn(device)
    b, s = (torch.linspace(-2, 2, VOCAB, device=device).requires_grad_(), 0.1) if bias else (None, 0.0)
    options = {"bias": b, "reduction": reduction, "label_smoothing": s}
    with three_products(rows):
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
        noise = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(4)).to(device)
        teacher = (e.float() @ c.float().T + 0.1 * noise).softmax(dim=1)
    weights, targets = teacher.topk(4 if INTERPRETED else 16)
    with three_products(rows):
        got = gradients(linear_cross_entropy(e, c, targets, target_weights=weights), (e, c))
    in_fp32 = gradients(dense(e.float(), c.float(), targets, weights).mean(), (e, c))
    e64, c64 = in_fp64(e, c)
    want = gradients(dense(e64, c64, targets, weights).mean(), (e64, c64))
    for grad, fp32, truth in zip(got, in_fp32, want, strict=True):
        assert error(grad, truth) < 1.5 * error(fp32, truth)


@devices_with("rows", [FOUR], [FOUR, ONE_CHUNK, CHUNKS], on_gpu=[ONE_CHUNK, CHUNKS])  # blockwise torch has one scheme
def test_calls_again_weights_of_1_and_one_target_of_several_give_the_same_bits(rows, device):
    e, c, targets, weights = drawn(device)
    first = targets[:, 0]

    def results(targets: Tensor, *of_rows: float, **options) -> list[Tensor]:
        if of_rows:
            options["token_weights"] = torch.full(targets.shape, *of_rows, device=device)
        with three_products(rows):
            loss = linear_cross_entropy(e, c, targets, z_loss=1e-3, **options)
            return [loss, *gradients(loss, (e, c))]

    smoothed, of_sum = {"label_smoothing": 0.1}, {"reduction": "sum"}
    one = results(first, 1.0, **smoothed)
    for found, same in (
        (results(first, **smoothed), one),
        (results(first, 1.0, **smoothed), one),
        (results(first, 2.0, **smoothed), one),  # a mean
        (results(first, token_weights=weights[:, 0], **of_sum),
         results(targets[:, :1], target_weights=weights[:, :1], **of_sum)),
        *[[results(targets, target_weights=weights, **of_sum) for _ in range(2)]],
    ):  # fmt: skip
        assert all(map(torch.equal, found, same))


@devices
@pytest.mark.parametrize("kind", ["plain", "weighted", "several"])
def test_a_target_outside_the_vocabulary_makes_its_row_nan_at_any_weight(device, kind):
    """On a GPU nothing may wait for the targets. CPU calls raise instead."""
    e, c, targets, _ = draw(Case("outside", shape=(6,), ignored=0), device)
    targets[5] = IGNORE
    weights = {"weights": torch.tensor([1.0, -1.0, 0.0, 2.0, 3.0, torch.nan], device=device)}
    if kind == "several":
        targets, weights = targets[:, None].repeat(1, 2), {"target_weights": torch.ones(6, 2, device=device)}
    weights = {} if kind == "plain" else weights
    *inputs, call = of_operator(e, c, targets, reduction="none", return_metrics=False, **weights)
    x = Inputs(*inputs)
    if kind == "several":  # as arguments.py has it
        x.every_weight[[2, 4], 1] = x.weights[[2, 4]] = torch.nan
    else:
        x.targets[2], x.targets[4] = c.shape[0], -1
    rows, lse, _ = cross_entropy(x, Call.of(call))
    assert rows.isnan().tolist() == [False, False, True, False, True, False]
    assert rows[5] == 0
    assert lse.isfinite().all()
    grad_e, _ = torch.autograd.grad(rows.nansum(), (e, c))
    assert not grad_e[5].any()
    assert grad_e[[0, 1, 3]].isfinite().all()


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
