"""The torch path for CPU tensors against fp64."""

import pytest
from cases import CASES, check, check_small_workspace


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_and_gradients_are_within_twice_torchs_error(case):
    check(case, "cpu")


def test_a_workspace_too_small_is_refused_before_backward_with_the_least_that_will_do():
    check_small_workspace("cpu", (1024, 512), 20)
