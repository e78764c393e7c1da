"""The filter's Triton kernels, interpreted and on a GPU, against its rule in torch."""

import pytest
from cases import BF16, FP32
from everywhere import kernels
from filter_cases import (
    SMALL,
    TOGETHER,
    Filtered,
    check_adversarial_rows,
    check_draws,
    check_exact_at_no_mass,
    check_exact_where_not_faster,
    check_figures,
    check_filtered,
    check_monotone,
    check_order_of_the_vocabulary,
    check_row_coefficients,
    check_unbiased,
)


@kernels
@pytest.mark.parametrize("check", [check_draws, check_figures, check_row_coefficients, check_exact_at_no_mass])
def test_kernels_follow_the_rule(device, check, monkeypatch):
    """What they draw, what they report, the rows' coefficients, and a call that may drop nothing."""
    if device == "cpu":
        monkeypatch.setattr(*TOGETHER)
    check(device)


@kernels
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_likely_entries_are_drawn_from_smaller_groups(device, dtype, monkeypatch):
    monkeypatch.setattr("cce_kernels.filter.rule.MOST_HEAD", 16)
    if device == "cpu":
        monkeypatch.setattr(*TOGETHER)
    shape = (300, 96, 3000) if device == "cuda" else (70, 24, 1100)
    check_filtered(Filtered("likely", {"filter_unbiased": True}, shape=shape), dtype, device)


@kernels
@pytest.mark.parametrize("unbiased", [False, True])
def test_properties_of_the_filter(device, unbiased, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(*TOGETHER)
    check_adversarial_rows(unbiased, device)
    check_monotone(unbiased, device, *([(12, 24, 300)] if device == "cpu" else []))


@kernels
def test_the_order_of_the_vocabulary_and_filters_that_are_not_faster(device, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(*TOGETHER)
        check_order_of_the_vocabulary(device, SMALL)
        check_exact_where_not_faster(device, filters=["preset"])
    else:
        check_order_of_the_vocabulary(device)
        for with_bias in (False, True):
            check_exact_where_not_faster(device, with_bias=with_bias)
        check_unbiased(device, draws=256)
