"""Fill the marked places of README and docs from committed rows: `make pages`.

A place is `<!-- rows: NAME --> … <!-- end -->`. NAME is a claim of claims.yaml, or a table of tables.py.
"""

import re
from pathlib import Path

from linrnn.core.errors import ConfigError
from study.measures import CLAIMS, claim
from study.tables import TABLES

ROOT = Path(__file__).resolve().parents[1]
PLACE = re.compile(r"(<!-- rows: (\w+) -->)(\n?).*?(<!-- end -->)", re.DOTALL)


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


def main() -> None:
    for page in pages():
        text = page.read_text(encoding="utf-8")
        new = filled(text, page)
        if new != text:
            page.write_text(new, encoding="utf-8")
        print(f"{page.relative_to(ROOT)}: {'written anew' if new != text else 'as its rows say'}")


if __name__ == "__main__":
    main()
