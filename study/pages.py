"""Fill the marked places of README and docs from committed rows: `make pages`.

A place is `<!-- rows: NAME --> … <!-- end -->`. NAME is a claim of claims.yaml, or a table of tables.py. The command
also lists the figures that stand outside of such places in README and the study, for whoever reads a change.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from linrnn.core.errors import ConfigError
from study.measures import CLAIMS, claim
from study.tables import TABLES

ROOT = Path(__file__).resolve().parents[1]
PLACE = re.compile(r"(<!-- rows: (\w+) -->)(\n?).*?(<!-- end -->)", re.DOTALL)
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
# Decimals, and percentages other than those of intervals. Names of sizes (1.3B) and versions are no figures.
FIGURE = re.compile(r"(?<![\w./#-])[+-]?\d[\d,]*\.\d+(?![\w.])(?: ?%)?|(?<![\w./#-])(?!9[05] %)\d+ %")


def filled(text: str, page: Path) -> str:
    """A page with every marked place filled anew.

    Raises:
        ConfigError: a place names neither a claim nor a table.
    """

    def content(match: re.Match[str]) -> str:
        name = match[2]
        if name in TABLES:
            return "\n".join([match[1], "", *TABLES[name]().markdown(), "", match[4]])
        if name in CLAIMS:
            return f"{match[1]}{claim(name)['text']}{match[4]}"
        raise ConfigError(
            f"{page}: {name} is neither a claim nor a table",
            f"claims: {', '.join(CLAIMS)}; tables: {', '.join(TABLES)}",
        )

    return PLACE.sub(content, text)


def pages() -> list[Path]:
    """README and docs that have a marked place."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if PLACE.search(page.read_text(encoding="utf-8"))]


def outside(page: Path) -> Iterator[tuple[int, str]]:
    """The lines of a page with figures outside of marked places, and these figures."""
    text = FENCED.sub(_lines, PLACE.sub(_lines, page.read_text(encoding="utf-8")))
    for number, line in enumerate(text.splitlines(), start=1):
        if figures := FIGURE.findall(re.sub(r"`[^`]*`|\]\([^)]*\)", "", line)):
            yield number, ", ".join(figures)


def _lines(match: re.Match[str]) -> str:
    return "\n" * match[0].count("\n")


def main() -> None:
    for page in pages():
        text = page.read_text(encoding="utf-8")
        new = filled(text, page)
        if new != text:
            page.write_text(new, encoding="utf-8")
        print(f"{page.relative_to(ROOT)}: {'written anew' if new != text else 'as its rows say'}")
    print("\nfigures that no row stands behind here:")
    study = [page for folder in ("study", "notes") for page in sorted((ROOT / "docs" / folder).rglob("*.md"))]
    for page in [ROOT / "README.md", *study]:
        lines = list(outside(page))
        print(f"  {page.relative_to(ROOT)}: {len(lines)} lines")
        for number, figures in lines if "-v" in sys.argv[1:] else ():
            print(f"    {number}: {figures}")


if __name__ == "__main__":
    main()
