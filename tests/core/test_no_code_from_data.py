"""The source never unpickles, and never executes data."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "pickletools"}
CALLS = {"eval", "exec", "compile", "__import__", "unsafe_load", "full_load", "from_pretrained_unsafe"}
OF_MODULES = {("torch", "load"), ("torch", "save"), ("os", "system"), ("os", "popen"), ("yaml", "load")}
OPTIONS = {"shell": True, "allow_pickle": True, "trust_remote_code": True, "weights_only": False}


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for folder in ("src", "kernels", "benchmarks", "scripts"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path, ast.parse(path.read_text())
    yield ROOT / "train.py", ast.parse((ROOT / "train.py").read_text())


def test_no_pickle_is_imported_and_no_text_is_run() -> None:
    seen = 0
    for path, tree in sources():
        for node in ast.walk(tree):
            where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                assert not {name.split(".")[0] for name in modules} & MODULES, where
            if not isinstance(node, ast.Call):
                continue
            seen += 1
            function = node.func
            if isinstance(function, ast.Name):
                assert function.id not in CALLS, where
            if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
                assert (function.value.id, function.attr) not in OF_MODULES, where
            for keyword in node.keywords:
                if keyword.arg in OPTIONS and isinstance(keyword.value, ast.Constant):
                    assert keyword.value.value is not OPTIONS[keyword.arg], where
    assert seen > 3000


def test_modules_are_imported_by_names_that_the_source_holds() -> None:
    """`import_module` gets a constant or a name from a table of this repository, never a configuration's text."""
    for path, tree in sources():
        for node in ast.walk(tree):
            function = getattr(node, "func", None)
            name = getattr(function, "attr", getattr(function, "id", ""))
            if isinstance(node, ast.Call) and name == "import_module":
                fits = isinstance(node.args[0], ast.Constant) or path.name in (
                    "other_losses.py",
                    "requirements.py",
                    "fla_import.py",
                )
                assert fits, f"{path.relative_to(ROOT)}:{node.lineno}"
