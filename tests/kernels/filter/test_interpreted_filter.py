"""The filter's Triton kernels, on CPU tensors in Triton's interpreter."""

import pytest
import torch
from cases import BF16, check_default_dtype, gradients, of_operator
from cce_kernels import linear_cross_entropy
from filter_cases import (
    FILTERED,
    TOGETHER,
    Filtered,
    check_filtered,
    drawn,
)
from triton_interpreter import MARKS

pytestmark = MARKS

FILTERED_HERE = (
    "threshold", "threshold_e_only", "unbiased", "unbiased_scaled", "mass_unbiased", "short_lists", "short_lists_kahan",
)  # fmt: skip


@pytest.mark.parametrize("case", [case for case in FILTERED if case.name in FILTERED_HERE], ids=str)
def test_filtered_gradients_and_statistics_are_those_of_the_rule(case):
    check_filtered(case, BF16, "cpu")


@pytest.mark.parametrize("options", [{}, {"accumulate": "fp32", "z_loss": 1e-2}], ids=str)
def test_samples_of_several_blocks_of_rows_and_chunks_of_columns(monkeypatch, options):
    monkeypatch.setattr(*TOGETHER)
    monkeypatch.setattr("cce_kernels.filter.rule.TILE_ROWS", 16)
    monkeypatch.setattr("cce_kernels.filter.rule.TWO_WAVES", 1)
    monkeypatch.setattr("cce_kernels.filter.sample.tail_width", lambda *_: 16)
    check_filtered(Filtered("blocks", {"filter_unbiased": True} | options), BF16, "cpu")


def test_the_operator_returns_what_its_fake_kernel_says_of_lists_and_samples():
    e, c, targets, _ = drawn(Filtered("operator", shape=(20, 16, 300)), BF16, "cpu")
    arguments = of_operator(e, c, targets, return_metrics=False, filter_eps=2.0**-6, filter_unbiased=True)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.cce_kernels_interpreted.cross_entropy.default, arguments, test_utils=checks)


def test_the_filter_at_a_logit_scale_of_0_drops_all_but_the_target():
    e, c, targets, _ = drawn(Filtered("scale_0"), BF16, "cpu")
    loss, stats = linear_cross_entropy(e, c, targets, logit_scale=0.0, filter_eps=2.0**-6, return_stats=True)
    assert not any(grad.any() for grad in gradients(loss, (e, c)))
    share = 1 / c.shape[0]
    assert stats["entries_kept"].item() == pytest.approx(share)
    assert stats["dropped_mass_mean"].item() == pytest.approx(1 - share)


def test_a_default_dtype_of_few_bits_rounds_no_threshold(monkeypatch):
    monkeypatch.setattr(*TOGETHER)
    eps = 2.0**-8 * (1 + 0.98 * 2.0**-8)  # 2^-8 in bf16
    check_default_dtype({"filter_eps": eps, "filter_unbiased": True}, BF16, "cpu", rows=24)
