"""The README names tests that there are."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_fault_in_the_readme_has_the_test_that_it_names() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "README.md").read_text())
    assert len(named) >= 12
    for file, test in named:
        assert f"def {test}(" in (ROOT / file).read_text(), f"{file}::{test}"
