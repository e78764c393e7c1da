"""The code blocks of the README and of docs/, and the commands in them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```(\S*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- compiled only: [^>]+ -->\s*\Z")
ASSIGNMENT = re.compile(r"[A-Z_]+=")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: path relative to the repository.
        language: the word behind the fence.
        runs: False if a comment before the block says that it is only compiled.
    """

    page: str
    line: int
    language: str
    text: str
    runs: bool

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        before = text[: match.start()]
        body = "\n".join(line.removeprefix(match[1]) for line in match[3].splitlines())
        name = page.relative_to(ROOT).as_posix()
        yield Block(name, before.count("\n") + 1, match[2], body, MARK.search(before) is None)


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each command in a bash block, without comments and leading variables."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and ASSIGNMENT.match(words[0]):
            del words[0]
        if words:
            yield words
