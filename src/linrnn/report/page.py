"""A report in Markdown as one HTML page that needs no other file and no network."""

import base64
import html
import re
from pathlib import Path

from markdown_it import MarkdownIt


def to_html(title: str, markdown: str, directory: Path) -> str:
    """The page. Text becomes no markup beside Markdown's; pictures of `directory` become part of the page."""

    def data_uri(found: re.Match[str]) -> str:
        return f'src="data:image/png;base64,{base64.b64encode((directory / found[1]).read_bytes()).decode()}"'

    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown)
    page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return page.replace("TITLE", html.escape(title)).replace("BODY", re.sub(r'src="(\w+\.png)"', data_uri, body))
