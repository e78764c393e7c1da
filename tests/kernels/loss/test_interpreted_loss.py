"""The Triton kernels of the exact loss, on CPU tensors in Triton's interpreter."""

import pytest
import torch
from cases import BF16, CASES, DEFAULTED, Case, check, check_default_dtype, check_offloaded, draw, gradients
from cce_kernels import linear_cross_entropy, vocabulary_parallel_linear_cross_entropy
from hypothesis import given, settings
from random_cases import random_cases
from torch import distributed as dist
from triton_interpreter import MARKS

pytestmark = MARKS

# The interpreter is slow. In bf16 it leaves out cases that differ only before or after the kernels (test_blockwise has
# these). In other dtypes it runs what differs there: tiles and rounding.
OUTSIDE = ("no_ignored", "leading_dimensions", "sum", "row_losses", "shift", "mixed-bf16_fp16")
OTHERS = ("one_row", "everything", "many_chunks_kahan", "mixed-fp32_bf16")
INTERPRETED_CASES = [
    case for case in CASES if (case.dtype == BF16 or case.name.startswith(OTHERS)) and not case.name.startswith(OUTSIDE)
]


@pytest.mark.parametrize("case", INTERPRETED_CASES, ids=str)
def test_loss_and_gradients_are_within_twice_torchs_error(case):
    check(case, "cpu")


@pytest.mark.parametrize("options", [DEFAULTED["plain"], DEFAULTED["threshold"]], ids=["plain", "threshold"])
def test_the_default_dtype_changes_nothing(monkeypatch, options):
    monkeypatch.setattr("cce_kernels.filter.gather.ENTRIES", 32)  # fewer steps to interpret
    check_default_dtype(options, torch.float64, "cpu", rows=24)


def test_evaluation_needs_no_workspace():
    e, c, targets, _ = draw(Case("evaluation", shape=(5,), ignored=0), "cpu")
    want = linear_cross_entropy(e, c, targets).detach()
    with torch.no_grad():
        assert linear_cross_entropy(e, c, targets, workspace_mib=1e-6) == want


def test_a_bias_of_minus_infinity_masks_whole_tiles():
    e, c, _, bias = draw(Case("masked", bias=True, vocab=1300), "cpu")
    allowed = slice(700, 720)
    masked = torch.full_like(bias, -torch.inf)
    masked[allowed] = bias.detach()[allowed]
    targets = torch.randint(0, 20, e.shape[:1])
    loss = linear_cross_entropy(e, c, targets + 700, bias=masked)
    want = linear_cross_entropy(e, c[allowed], targets, bias=bias[allowed])
    torch.testing.assert_close(loss, want)
    for grad, wanted in zip(gradients(loss, (e, c)), gradients(want, (e, c)), strict=True):
        torch.testing.assert_close(grad, wanted)


OFFLOADED = [{}, {"reduction": "none"}, {"filter_eps": 0.01, "filter_unbiased": True}]


@pytest.mark.parametrize("options", OFFLOADED, ids=str)
def test_saved_tensors_may_be_offloaded(options):
    check_offloaded(linear_cross_entropy, "cpu", **options)


def test_saved_tensors_may_be_offloaded_with_the_vocabulary_over_ranks():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        check_offloaded(vocabulary_parallel_linear_cross_entropy, "cpu", shards=[70])
    finally:
        dist.destroy_process_group()


@settings(max_examples=12, deadline=None, derandomize=True)
@given(random_cases)
def test_any_combination_of_options(case):
    check(case, "cpu", floor=1e-5)
