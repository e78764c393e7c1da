"""The filter on CPU tensors; test_interpreter.py and test_gpu.py run the same checks on the kernels."""

import pytest
import torch
from cases import BF16, FP32
from cce_kernels.filtered import SAMPLED, Rule, block_rows, drawn_columns, drawn_rows, head_size, seed_of
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


def test_samples_have_one_of_each_group_and_are_right_on_average():
    """Columns and rows drawn: one of SAMPLED neighbours each, uniform over seeds, others in each block of rows; a
    shard's are the whole vocabulary's. The rules' weights are p on average."""
    n_rows, dim, vocab, seeds = 2 * block_rows(4096), 4096, 200, 2000
    p = torch.rand(n_rows, vocab, dtype=torch.float64) * 2.0**-6
    columns, rows, weight_e, weight_c = [], [], torch.zeros_like(p[[0, -1]]), torch.zeros_like(p[:, :2])
    for i in range(seeds):
        seed = seed_of(torch.tensor([i, i // 3, -1]))
        columns.append(drawn_columns(seed, n_rows, dim, 0, vocab))
        rows.append(drawn_rows(seed, n_rows))
        rule = Rule(torch.full((n_rows,), 2.0**-7), seed, None, None)
        if i < 200:
            weight_e += rule.weights_e(p, torch.arange(vocab), dim)[[0, -1]] / 200
            weight_c += rule.weights_c(p[:, :2], torch.arange(2)) / 200
    for drawn in (torch.stack(columns), torch.stack(rows)):
        places = drawn - SAMPLED * torch.arange(drawn.shape[-1])
        assert ((places >= 0) & (places < SAMPLED)).all()
        share = torch.nn.functional.one_hot(places, SAMPLED).double().mean(dim=0)
        assert (share - 1 / SAMPLED).abs().max() < 5 * (1 / SAMPLED / seeds) ** 0.5
        both = (places[..., 1:] == places[..., :-1]).double().mean()
        assert abs(both - 1 / SAMPLED) < 5 * (1 / SAMPLED / places[..., 1:].numel()) ** 0.5
    first, second = torch.stack(columns).unbind(dim=1)
    assert abs((first == second).double().mean() - 1 / SAMPLED) < 5 * (1 / SAMPLED / first.numel()) ** 0.5
    torch.testing.assert_close(drawn_columns(seed, n_rows, dim, 40, 96) + 40, columns[-1][:, 40 // SAMPLED : 9])
    spread = 5 * (SAMPLED - 1) ** 0.5 * 2.0**-7 / 200**0.5
    assert (weight_e - p[[0, -1]]).abs().max() < spread
    assert (weight_c - p[:, :2]).abs().max() < spread


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
