"""docs/study/index.md: every verdict in short tables. Other tests compare most of them with the rows."""

import re

import pytest
from blocks import ROOT

STUDY = ROOT / "docs" / "study"
INDEX = (STUDY / "index.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^### \[[^]]+\]\((h\w+\.md)\)\n(.+?)(?=^##)", INDEX, re.MULTILINE | re.DOTALL))


def test_every_page_has_a_short_answer_and_a_section() -> None:
    pages = sorted(path.name for path in STUDY.glob("h*.md"))
    assert sorted(SECTIONS) == pages
    assert sorted(re.findall(r"^\| \[[^]]+\]\((h\w+\.md)\) \|", INDEX, re.MULTILINE)) == pages


@pytest.mark.parametrize("page", SECTIONS)
def test_the_figures_of_a_section_stand_on_its_page(page: str) -> None:
    figures = re.findall(r"(?<![\d.])[-+]?\d+\.\d{2,4}(?!\d)", SECTIONS[page])
    text = (STUDY / page).read_text(encoding="utf-8")
    assert [figure for figure in figures if figure not in text] == []


def test_no_cell_is_longer_than_a_line() -> None:
    """Until 28 November 2026 one cell held all verdicts of a page, up to 190 words."""
    cells = [cell for line in INDEX.splitlines() if line.startswith("| ") for cell in line.strip("| ").split(" | ")]
    assert max(len(cell.split()) for cell in cells) <= 25
