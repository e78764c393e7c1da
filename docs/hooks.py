"""What the site needs beyond MkDocs: folders of pages in the menu, a page for each package, and linked files.

Pages link to files of the repository outside docs/, as a forge shows them. The site takes each linked file in, Markdown
as a page and everything else as it is. A link to a file that does not exist stays as it is, and MkDocs reports it.

A forge draws Mermaid diagrams from their source. The site shows the pictures of docs/diagrams instead, because the
script that draws Mermaid in a browser comes from another site.
"""

import ast
import os
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"(!?\[[^\[\]]*\]\()([^()\s]+)(\))")
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
# Pages of numbers: the search leaves them out.
TABLES = tuple(
    f"repository/results/{name}/"
    for name in (
        "summaries",
        "bench_before_after",
        "bench_flame",
        "bench_loss",
        "bench_models",
        "bench_parallel",
        "bench_steps",
        "bench_trl",
        "bench_first_step",
    )
)
PACKAGES = ["cce_kernels", *(f"linrnn.{path.parent.name}" for path in sorted(ROOT.glob("src/linrnn/*/__init__.py")))]


def on_config(config: Any) -> Any:
    """Put the pages of a folder in the place of its name in the menu."""
    config["nav"] = [_expanded(entry) for entry in config["nav"]]
    return config


def _expanded(entry: Any) -> Any:
    if isinstance(entry, str):
        return entry
    [(title, value)] = entry.items()
    if isinstance(value, list):
        return {title: [_expanded(item) for item in value]}
    if value == "reference/":
        return {title: [{name: f"reference/{name}.md"} for name in PACKAGES]}
    if value.endswith("/"):
        pages = sorted((DOCS / value).glob("*.md"), key=lambda path: (path.name != "index.md", path.name))
        return {title: [path.relative_to(DOCS).as_posix() for path in pages]}
    return entry


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each package, and every file outside docs/ that a page links to."""
    for name in PACKAGES:
        files.append(File.generated(config, f"reference/{name}.md", content=_reference(name)))
    waiting = [DOCS / file.src_uri for file in files.documentation_pages() if (DOCS / file.src_uri).is_file()]
    added: set[Path] = set()
    while waiting:
        page = waiting.pop()
        for _, target in _links(page.read_text(encoding="utf-8"), page):
            if target in added or target.is_relative_to(DOCS):
                continue
            added.add(target)
            if target.is_dir():
                content = _listing(target)
                files.append(File.generated(config, _uri(target), content=content, inclusion=InclusionLevel.NOT_IN_NAV))
                continue
            file = File.generated(config, _uri(target), abs_src_path=str(target), inclusion=InclusionLevel.NOT_IN_NAV)
            files.append(file)
            if target.suffix == ".md":
                waiting.append(target)
    return files


def _reference(name: str) -> str:
    """A page of the package's public names, or of all its modules where it does not list any."""
    folder = ROOT.joinpath("kernels" if name == "cce_kernels" else "src", *name.split("."))
    init = ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))
    head = f"---\ntitle: {name}\n---\n\n# `{name}`\n\n"
    imports = [node for node in init.body if isinstance(node, ast.ImportFrom)]
    if name != "cce_kernels":
        return f"{head}::: {name}\n    options: {{show_submodules: {str(not imports).lower()}}}\n"
    # One by one: a module there has the name of the function in it.
    names = [f"{name}." * bool(node.level) + f"{node.module}.{alias.name}" for node in imports for alias in node.names]
    options = "    options: {show_root_heading: true, show_root_toc_entry: true}"
    return head + (ast.get_docstring(init) or "") + "".join(f"\n\n::: {each}\n{options}\n" for each in names)


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings mark names as :func:`name`; the site shows the name alone."""
    return re.sub(r":(?:func|class|meth|mod|data|attr):(?=<code>)", "", html)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Turn links to files outside docs/ into links to their copies in the site, and diagrams into pictures."""
    if page.file.src_uri.startswith(TABLES):
        page.meta["search"] = {"exclude": True}
    source = page.file.abs_src_path
    if source is None:
        return markdown
    here = Path(source)
    places = dict(_links(markdown, here))
    folder = os.path.dirname(page.file.src_uri)
    numbers = count(1)

    def replaced(match: re.Match[str]) -> str:
        target = places.get(match[2])
        if target is None:
            return match[0]
        anchor = match[2].partition("#")[2]
        uri = os.path.relpath(_uri(target), folder or ".")
        return f"{match[1]}{uri}{'#' + anchor if anchor else ''}{match[3]}"

    def shown(part: str) -> str:
        if part.startswith("```mermaid\n"):
            picture = DOCS / "diagrams" / f"{here.stem}-{next(numbers)}.svg"
            return f"![diagram]({os.path.relpath(picture, here.parent)})"
        return part if FENCE.match(part) else LINK.sub(replaced, part)

    return "".join(map(shown, _parts(markdown)))


def _parts(markdown: str) -> Iterator[str]:
    """The text in pieces, each all of a fenced block or without one."""
    end = 0
    for fence in FENCE.finditer(markdown):
        yield from (markdown[end : fence.start()], fence[0])
        end = fence.end()
    yield markdown[end:]


def _links(markdown: str, page: Path) -> Iterator[tuple[str, Path]]:
    """Links of a page to files and folders of the repository that exist."""
    for part in _parts(markdown):
        for match in LINK.finditer("" if FENCE.match(part) else part):
            name = unquote(match[2].partition("#")[0])
            if not name or ":" in name or name.startswith("/"):
                continue
            target = (page.parent / name).resolve()
            if target.exists() and target.is_relative_to(ROOT):
                yield match[2], target


def _uri(target: Path) -> str:
    """Where the site keeps a file."""
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS).as_posix()
    name = target.relative_to(ROOT).as_posix()
    return f"repository/{name}/index.md" if target.is_dir() else f"repository/{name}"


def _listing(folder: Path) -> str:
    """A page that names a folder's files."""
    names = "\n".join(f"* `{path.name}`" for path in sorted(folder.iterdir()) if not path.name.startswith("."))
    return f"# {folder.relative_to(ROOT).as_posix()}\n\n{names}\n"
