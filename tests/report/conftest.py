"""Fixtures of the tests of reports."""

import pytest

from linrnn.report import write


@pytest.fixture
def text_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports are written without their pictures, which take most of the time."""
    monkeypatch.setattr(write, "_figures", lambda *given: [])
