"""Who may import whom (see the README's map): imports go one way."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINRNN = ROOT / "src" / "linrnn"
LEAVES = {
    "models",
    "losses",
    "data",
    "optim",
    "metrics",
    "loggers",
    "checkpoint",
    "accounting",
    "profiling",
    "tokenizer",
}
SHARED = {"config.schema", "errors", "architecture"}
ALLOWED = {
    # a leaf imports the schema, the errors and the architecture; what else it needs stands here
    "losses": {"losses"},
    "models": {"models", "cpu_ops"},
    "data": {"data", "tokenizer"},
    "accounting": {"accounting"},
}


def imports(path: Path) -> set[str]:
    """Dotted names of every module imported anywhere in a file, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def files(*roots: Path) -> list[Path]:
    return [path for root in roots for path in ([root] if root.is_file() else sorted(root.rglob("*.py")))]


def test_the_kernels_import_torch_and_triton_alone() -> None:
    allowed = {"torch", "triton", "cce_kernels"}
    standard = {
        "__future__",
        "math",
        "os",
        "typing",
        "dataclasses",
        "functools",
        "collections",
        "contextlib",
        "enum",
    }
    for path in files(ROOT / "kernels" / "cce_kernels"):
        # Triton's interpreter itself runs on numpy: what mends it may name it.
        roots = {name.split(".")[0] for name in imports(path)} - (
            {"numpy"} if path.stem == "interpreter" else set()
        )
        assert roots <= allowed | standard, f"{path.name} imports {sorted(roots - allowed - standard)}"


@pytest.mark.parametrize("leaf", sorted(LEAVES))
def test_leaves_do_not_import_each_other(leaf: str) -> None:
    location = LINRNN / leaf if (LINRNN / leaf).is_dir() else LINRNN / f"{leaf}.py"
    allowed = SHARED | ALLOWED.get(leaf, set()) | {leaf}
    for path in files(location):
        for name in imports(path):
            if name.startswith("linrnn."):
                inner = name.removeprefix("linrnn.")
                assert any(
                    inner == a or inner.startswith(f"{a}.") or a.startswith(f"{inner}.") for a in allowed
                ), f"{path.relative_to(ROOT)} imports {name}"


def test_only_the_loss_backends_name_the_kernels() -> None:
    users = {path for path in files(LINRNN) if "cce_kernels" in path.read_text()}
    assert users
    assert all(path.is_relative_to(LINRNN / "losses") for path in users)


def test_hydra_and_omegaconf_stay_in_the_config_package() -> None:
    for path in files(LINRNN):
        if not path.is_relative_to(LINRNN / "config"):
            roots = {name.split(".")[0] for name in imports(path)}
            assert not roots & {"hydra", "omegaconf"}, (
                f"{path.relative_to(ROOT)} imports {roots & {'hydra', 'omegaconf'}}"
            )


def test_nothing_in_the_package_imports_the_trainer_but_scripts() -> None:
    for path in files(LINRNN):
        assert not any(name.startswith("linrnn.trainer") for name in imports(path)), path.name
