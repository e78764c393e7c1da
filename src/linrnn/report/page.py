"""Render a report's sections as Markdown, and as one HTML page that needs no other file and no network."""

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

from linrnn.core.tables import Table

_MARKS = (  # the marks that the sentences of a report use
    (re.compile(r"\*\*(.+?)\*\*"), r"<strong>\1</strong>"),
    (re.compile(r"\*(\w[^*]*?)\*"), r"<em>\1</em>"),
    (re.compile(r"`(.+?)`"), r"<code>\1</code>"),
)


class Commands(list[str]):
    """Lines for a shell."""


class Pictures(list[Path]):
    """Plots, as files beside report.md."""


Block = str | list[str] | Commands | Pictures | Table  # a sentence, sentences as a list, …


@dataclass(frozen=True)
class Section:
    """A heading and the blocks below it.

    Attributes:
        folded: whether the page hides the blocks until a click on the heading.
    """

    title: str
    blocks: Sequence[Block]
    folded: bool = False


def folded(title: str, *blocks: Block) -> Section:
    """A section whose blocks are hidden until a click on its heading."""
    return Section(title, blocks, folded=True)


def to_markdown(title: str, sections: Sequence[Section]) -> str:
    """The sections as one Markdown document."""
    lines = [f"# {title}", ""]
    for section in sections:
        heading = f"<details><summary>{escape(section.title)}</summary>" if section.folded else f"## {section.title}"
        lines += [heading, ""]
        lines += [line for block in section.blocks if block for line in (*_markdown(block), "")]
        lines += ["</details>", ""] if section.folded else []
    return "\n".join(lines)


def _markdown(block: Block) -> list[str]:
    match block:
        case str():
            return [block]
        case Table():
            return block.markdown()
        case Commands():
            return ["```", *block, "```"]
        case Pictures():
            return [f"![{title_of(path)}]({path.name})" for path in block]
    return [f"* {sentence}" for sentence in block]


def to_html(title: str, sections: Sequence[Section], source: str, again: str) -> str:
    """The sections as one HTML page, with inlined pictures.

    Args:
        source: what the report was read from.
        again: the command that makes the page again.
    """
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    filters = {"inline": inline, "picture": data_uri, "title_of": title_of, "slug": slug}
    environment.filters |= filters | {"kind": lambda block: type(block).__name__}
    template = environment.from_string(Path(__file__).with_name("page.html.jinja").read_text(encoding="utf-8"))
    return template.render(title=title, sections=sections, source=source, again=again)


def inline(text: str) -> Markup:
    """A sentence as HTML: escaped, with bold words, emphasis and code marked up."""
    marked = str(escape(text))
    for pattern, replacement in _MARKS:
        marked = pattern.sub(replacement, marked)
    return Markup(marked)


def data_uri(path: Path) -> str:
    """A PNG as the `src` of an `img`."""
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


def title_of(path: Path) -> str:
    """The name of a plot's file in words."""
    return path.stem.replace("_", " ")


def slug(title: str) -> str:
    """A heading as an anchor."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
