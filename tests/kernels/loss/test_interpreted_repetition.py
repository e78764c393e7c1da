"""Calls that repeat an earlier one without its Python, in Triton's interpreter."""

import pytest
from repeated_cases import REPEATED, check_changed, check_evaluation, check_hooks, check_repeated
from triton_interpreter import MARKS

pytestmark = MARKS


@pytest.mark.parametrize("case", REPEATED, ids=str)
def test_a_repeated_call_gives_the_bits_of_a_usual_one(case, monkeypatch):
    check_repeated("cpu", monkeypatch, case)


def test_a_forward_pass_alone_is_repeated_too(monkeypatch):
    check_evaluation("cpu", monkeypatch)


def test_a_repeated_loss_may_be_changed_in_place(monkeypatch):
    check_changed("cpu", monkeypatch)


def test_a_call_whose_saved_tensors_have_hooks_runs_as_usual(monkeypatch):
    check_hooks("cpu", monkeypatch)
