"""The source never executes data: ruff finds pickles and evaluated text, and this test what is imported."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for folder in ("src", "kernels", "benchmarks", "scripts"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path, ast.parse(path.read_text())
    yield ROOT / "train.py", ast.parse((ROOT / "train.py").read_text())


def test_modules_are_imported_by_names_that_the_source_holds():
    """`import_module` gets a constant or a name from a table of this repository, never a configuration's text."""
    for path, tree in sources():
        for node in ast.walk(tree):
            function = getattr(node, "func", None)
            name = getattr(function, "attr", getattr(function, "id", ""))
            if isinstance(node, ast.Call) and name == "import_module":
                fits = isinstance(node.args[0], ast.Constant) or path.name in (
                    "before_after.py",
                    "other_losses.py",
                    "requirements.py",
                    "fla_import.py",
                )
                assert fits, f"{path.relative_to(ROOT)}:{node.lineno}"
