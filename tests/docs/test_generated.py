"""Marked places of README and docs hold what the committed rows say; a changed row, claim or page is found."""

import re
from pathlib import Path

import pytest

from linrnn.core.errors import ConfigError
from study import measures, pages

PAGES = pages.pages()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(pages.ROOT).as_posix())
def test_a_page_says_what_its_rows_say(page):
    text = page.read_text(encoding="utf-8")
    assert pages.filled(text, page) == text, "make pages"


@pytest.mark.parametrize("name", pages.CLAIMS)
def test_rows_answer_every_claim(name):
    assert pages.claim(name)["text"]


def test_a_changed_figure_is_found():
    readme = pages.ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    changed = text.replace(f"-->{pages.claim('batch_full')['text']}<!--", "-->2.00 to 3.00<!--")
    assert changed != text
    assert pages.filled(changed, readme) == text


def test_a_changed_claim_changes_its_page(monkeypatch):
    monkeypatch.setitem(pages.CLAIMS["batch_full"], "where", {"checkpointing": "selective"})
    assert pages.claim("batch_full") == pages.claim("batch_selective")


def test_a_changed_row_changes_its_claim(monkeypatch, tmp_path):
    rows = measures.RESULTS / "gradient_noise" / "nvidia_h200.jsonl"
    before = pages.claim("sampling_noise_range")
    (tmp_path / "gradient_noise").mkdir()
    text = rows.read_text().replace('"sample_over_batch": 0.0054', '"sample_over_batch": 0.0954', 1)
    assert text != rows.read_text()
    (tmp_path / "gradient_noise" / rows.name).write_text(text)
    monkeypatch.setattr(measures, "RESULTS", tmp_path)
    assert pages.claim("sampling_noise_range") != before


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(pages.ROOT).as_posix())
def test_no_line_begins_with_a_figure(page):
    """There the comment would end the paragraph, and 17. would begin a list."""
    assert not re.findall(r"^<!-- rows: \w+ -->.+", page.read_text(encoding="utf-8"), re.MULTILINE)


def test_no_claim_has_the_name_of_a_table():
    assert not pages.CLAIMS.keys() & pages.TABLES.keys()


def test_an_unknown_place_is_refused():
    with pytest.raises(ConfigError, match="neither a claim nor a table"):
        pages.filled("<!-- rows: telepathy -->0.5<!-- end -->", Path("page.md"))
