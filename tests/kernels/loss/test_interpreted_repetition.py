"""Calls that repeat an earlier one without its Python, in Triton's interpreter."""

import pytest
from interpreted_launches import record_interpreted
from repeated_cases import REPEATED, check_changed, check_evaluation, check_hooks, check_repeated
from triton_interpreter import MARKS

pytestmark = MARKS


@pytest.mark.parametrize("case", REPEATED, ids=str)
def test_a_repeated_call_gives_the_bits_of_a_usual_one(case, monkeypatch):
    record_interpreted(monkeypatch)
    check_repeated("cpu", monkeypatch, case)


@pytest.mark.parametrize("check", [check_evaluation, check_changed, check_hooks])
def test_what_a_repeated_call_leaves_to_its_caller(check, monkeypatch):
    """A forward pass alone is repeated, too; a loss may be changed in place; hooks of saved tensors see usual calls."""
    record_interpreted(monkeypatch)
    check("cpu", monkeypatch)
