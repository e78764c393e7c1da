"""Calls that repeat an earlier one without its Python, in Triton's interpreter."""

import pytest
from repeated_cases import REPEATED, check_evaluation, check_repeated, check_saved_elsewhere
from triton_interpreter import MARKS

pytestmark = MARKS


@pytest.mark.parametrize("case", REPEATED, ids=str)
def test_a_repeated_call_gives_the_bits_of_a_usual_one(case, monkeypatch):
    check_repeated("cpu", monkeypatch, case)


def test_a_forward_pass_alone_is_repeated_too(monkeypatch):
    check_evaluation("cpu", monkeypatch)


def test_a_backward_pass_that_gets_copies_of_what_was_saved_is_another_kind(monkeypatch):
    check_saved_elsewhere("cpu", monkeypatch)
