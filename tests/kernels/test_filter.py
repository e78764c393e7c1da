"""The filter on CPU tensors; test_interpreter.py and test_gpu.py run the same checks on the kernels."""

import pytest
import torch
from cases import BF16, FP32
from cce_kernels.filtered import head_size, row_hashes, uniform
from cce_kernels.options import Options
from cce_kernels.schemes import Problem, plan
from filter_cases import (
    FILTERED,
    check_adversarial_rows,
    check_exact_at_no_mass,
    check_filtered,
    check_monotone,
    check_order_of_the_vocabulary,
    check_unbiased,
)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("case", FILTERED, ids=str)
def test_gradients_and_statistics_are_those_of_the_rule(case, dtype):
    check_filtered(case, dtype, "cpu")


@pytest.mark.parametrize("unbiased", [False, True])
def test_adversarial_rows(unbiased):
    check_adversarial_rows(unbiased, "cpu")


def test_no_mass_may_be_dropped():
    check_exact_at_no_mass("cpu")


@pytest.mark.parametrize("unbiased", [False, True])
def test_a_larger_eps_keeps_less(unbiased):
    check_monotone(unbiased, "cpu")


def test_the_order_of_the_vocabulary_changes_nothing_else():
    check_order_of_the_vocabulary("cpu")


def test_the_unbiased_rule_is_right_on_average():
    check_unbiased("cpu", draws=64)


def test_draws_are_uniform_and_independent():
    """Of rows with consecutive targets and places, and of consecutive eights: moments, and correlations at any lag;
    within eight entries they are an eighth apart."""
    u = uniform(row_hashes(torch.arange(512) // 3), torch.arange(2000)).double()
    n = u.numel()
    assert 0 <= u.min() < 1e-4 < 1 - 1e-4 < u.max() <= 1
    assert abs(u.mean() - 0.5) < 5 / (12 * n) ** 0.5
    assert abs(u.square().mean() - 1 / 3) < 5 * (4 / 45 / n) ** 0.5
    centred = (u - 0.5) * 12**0.5
    for by, across in ((0, 1), (0, 7), (1, 8), (1, 16), (1, 64), (1, 1024)):
        correlation = (centred * centred.roll(across, dims=by)).mean()
        assert abs(correlation) < 5 / n**0.5, (by, across)
    apart = u.view(512, 250, 8).sort(dim=2).values.diff(dim=2)
    torch.testing.assert_close(apart, torch.full_like(apart, 0.125), rtol=0, atol=1e-7)
    rare = (u < 2.0**-8).double()  # as far as lists go
    assert abs(rare.mean(dim=0).std() / (2.0**-8 / 512) ** 0.5 - 1) < 0.1
    assert abs(rare.mean(dim=1).std() / (2.0**-8 / 2000) ** 0.5 - 1) < 0.1


def test_the_head_is_a_small_share_of_the_vocabulary_and_its_probabilities_of_the_memory():
    assert head_size(16384, 128256) == 2048
    assert head_size(10, 700) == 32
    assert head_size(10, 100) == 0
    assert head_size(10**6, 128256) * 10**6 <= 2**26


def test_lists_are_no_longer_than_their_places_can_say():
    """Places are 32 bits wide; beyond that the lists overflow, as they do where memory is short."""
    problem = Problem(5_000_000, 64, 256_000, BF16, BF16, BF16, False, False, False)
    capacity = plan(problem, 132, Options(filter_eps=2.0**-10, workspace_mib=400_000)).capacity
    assert 2**30 < capacity < 2**31
