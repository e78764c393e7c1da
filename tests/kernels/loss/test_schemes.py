"""What the planner chooses, from shapes and dtypes alone: no Triton, no GPU."""

from itertools import product

import pytest
import torch
from cce_kernels.options import DEFAULT_WORKSPACE_MIB, MIB, Options
from cce_kernels.planner import MOST_DEFAULT_MIB, ROW_MULTIPLE, Plan, Problem, plan

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = [
    (131072, 4096, 262144), (65536, 2048, 151936), (8192, 2304, 256000), (32768, 1024, 32000), (4096, 8192, 500000),
    (2048, 4096, 128256), (600, 64, 500),
]  # fmt: skip


def chosen(shape: tuple[int, int, int], grad_e=BF16, grad_c=BF16, main_grad=False, dtype=BF16, **options) -> Plan:
    problem = Problem(*shape, dtype, grad_e, grad_c, main_grad, uniform=True, has_bias=False)
    return plan(problem, 132, Options(**options))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_default_workspace_is_a_third_of_the_logits_within_bounds(shape):
    n_rows, _, vocab = shape
    found = chosen(shape)
    third = 2 * (-(-n_rows // 3) + ROW_MULTIPLE) * vocab
    if found.rows:
        assert 2 * found.rows * vocab <= max(DEFAULT_WORKSPACE_MIB * MIB, min(third, MOST_DEFAULT_MIB * MIB))
    else:
        assert 2 * n_rows * found.columns <= max(DEFAULT_WORKSPACE_MIB * MIB, 2 * n_rows * 256)


def test_the_default_takes_all_of_its_bound_where_logits_are_larger():
    n_rows, dim, vocab = SHAPES[0]
    mib = 2 * chosen((n_rows, dim, vocab)).rows * vocab / MIB
    assert 0.9 * MOST_DEFAULT_MIB <= mib <= MOST_DEFAULT_MIB


@pytest.mark.parametrize(("grad_e", "grad_c"), product((None, BF16, FP16, FP32), repeat=2), ids=str)
@pytest.mark.parametrize("main_grad", [False, True])
def test_exponentials_are_stored_only_for_gradients_that_can_hold_their_sums(grad_e, grad_c, main_grad):
    found = chosen(SHAPES[2], grad_e, grad_c, main_grad)
    holds_c = grad_c != FP16 or main_grad  # a buffer is added to from a sum in bf16
    assert bool(found.rows) == (grad_e != FP16 and holds_c)


@pytest.mark.parametrize("workspace_mib", [None, 600, 4096])
def test_every_plan_has_columns_for_a_backward_pass_that_makes_logits(workspace_mib):
    """The second one through a loss does; 600 MiB hold no 256 columns of a million rows."""
    for shape in (*SHAPES, (2**20, 256, 2**14)):
        assert chosen(shape, workspace_mib=workspace_mib).columns >= min(256, shape[2])
