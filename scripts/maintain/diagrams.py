"""The Mermaid diagrams of docs/ as SVG, into docs/diagrams: `python scripts/maintain/diagrams.py`. Needs Node."""

import html
import re
import subprocess
import tempfile
from pathlib import Path

from linrnn.config import CONFIG_DIR

MERMAID = re.compile(r"^```mermaid\n(.*?)^```", re.MULTILINE | re.DOTALL)
CLI = ["npx", "--yes", "@mermaid-js/mermaid-cli@11"]
# Labels are SVG text: a browser shows no HTML inside an SVG that is a picture of a page.
SETTINGS = '{"htmlLabels": false, "flowchart": {"htmlLabels": false}}'


def main() -> None:
    docs = CONFIG_DIR.parent / "docs"
    for page in sorted(docs.rglob("*.md")):
        for number, source in enumerate(MERMAID.findall(page.read_text(encoding="utf-8")), start=1):
            path = docs / "diagrams" / f"{page.stem}-{number}.svg"
            path.parent.mkdir(exist_ok=True)
            path.write_text(drawn(source), encoding="utf-8")
            print(f"wrote {path.relative_to(docs.parent)}")


def drawn(source: str) -> str:
    """The SVG of a diagram. Its `desc` holds the source, which a test compares with the page's."""
    with tempfile.TemporaryDirectory() as directory:
        settings, text, picture = (Path(directory, name) for name in ("settings.json", "diagram.mmd", "diagram.svg"))
        settings.write_text(SETTINGS, encoding="utf-8")
        text.write_text(source, encoding="utf-8")
        options = ["--quiet", "--backgroundColor", "white", "--configFile", str(settings)]
        subprocess.run([*CLI, *options, "--input", str(text), "--output", str(picture)], check=True)
        svg = picture.read_text(encoding="utf-8")
    head, end, rest = svg.partition(">")
    size = r'width="\1" height="\2"'  # in place of 100 %: a picture has no page to fill
    head = re.sub(r'width="100%"(?=.* viewBox="0 0 ([\d.]+) ([\d.]+)")', size, head)
    return f"{head}{end}<desc>{html.escape(source)}</desc>{rest}\n"


if __name__ == "__main__":
    main()
