"""Puts this folder on the import path, for cases.py. Calls of the loss run as usual here."""

import sys
from pathlib import Path

import pytest
from interpreted import repeat_no_calls

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def calls_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat no call from its program. Tests of repeated calls ask for them (devices/test_repeated_calls.py)."""
    repeat_no_calls(monkeypatch)
