"""Text files are UTF-8 in every locale. An ASCII terminal changes no file and breaks no command."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("src", "benchmarks", "scripts", "kernels")
SOURCES = [*(path for folder in FOLDERS for path in ROOT.glob(f"{folder}/**/*.py")), ROOT / "train.py"]


def calls_without_encoding(source: str) -> Iterator[int]:
    """Lines that open a text file in the locale's encoding."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and opens_text(node) and "encoding" not in {k.arg for k in node.keywords}:
            yield node.lineno


def opens_text(call: ast.Call) -> bool:
    """Whether a call is `open`, `Path.open`, `Path.read_text` or `Path.write_text` of a text file."""
    function = call.func
    if isinstance(function, ast.Name):
        return function.id == "open" and _text_mode(call.args[1:2])
    if not isinstance(function, ast.Attribute):
        return False
    owner = ast.unparse(function.value)
    if function.attr in ("read_text", "write_text"):
        return len(call.args) < 2  # RunDirectory's own write_text takes a name and the text
    ours = owner == "self" or owner.endswith("directory")  # RunDirectory.open takes a lock
    return function.attr == "open" and not ours and owner not in ("lzma", "gzip", "os") and _text_mode(call.args[:1])


def _text_mode(mode: list[ast.expr]) -> bool:
    return all(isinstance(m, ast.Constant) and set(str(m.value)) <= set("rwaxt+") for m in mode)


def test_every_text_file_is_opened_as_utf_8() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in SOURCES
        for line in calls_without_encoding(path.read_text(encoding="utf-8"))
    ]
    assert not found, 'add encoding="utf-8"'


def test_the_search_finds_what_it_looks_for() -> None:
    source = (
        "a.read_text()\nb.write_text(x)\nopen(p)\np.open('a')\nopen(p, 'rb')\nlzma.open(p)\np.open(encoding='utf-8')"
    )
    assert list(calls_without_encoding(source)) == [1, 2, 3, 4]
