"""Who may import whom (see the README's map): imports go one way."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "kernels" / "cce_kernels"
LINRNN = ROOT / "src" / "linrnn"
# What every leaf may import of linrnn, and what one leaf may import of another.
SHARED = {"config.schema", "dates", "errors", "architecture", "redaction", "output", "json_files", "checksums"}
LEAVES: dict[str, set[str]] = {
    "accounting": set(),
    "checkpoint": set(),
    "cpu_ops": set(),
    "data": {"tokenizer", "machine"},
    "distributed": {"interrupts", "sharding"},
    "interrupts": set(),
    "loggers": {"interrupts"},
    "losses": set(),
    "machine": set(),
    "metrics": set(),
    "models": {"cpu_ops"},
    "optim": set(),
    "profiling": set(),
    "runtime": set(),
    "sharding": set(),
    "tokenizer": set(),
}


def imports(path: Path) -> set[str]:
    """Dotted names of all that a file imports, also inside functions; relative imports are resolved."""
    package = path.relative_to(ROOT).parts[1:-1]
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return names


def roots(path: Path) -> set[str]:
    """The top-level packages that a file imports from."""
    return {name.split(".")[0] for name in imports(path)}


def files(location: Path) -> list[Path]:
    return sorted(location.rglob("*.py"))


def test_the_kernels_import_torch_and_triton_alone() -> None:
    allowed = {"torch", "triton", "cce_kernels"} | sys.stdlib_module_names
    assert files(KERNELS)
    for path in files(KERNELS):
        # Triton's interpreter itself runs on numpy: what mends it may name it.
        surplus = roots(path) - allowed - ({"numpy"} if path.name == "interpreter.py" else set())
        assert not surplus, f"{path.name} imports {sorted(surplus)}"


@pytest.mark.parametrize("leaf", LEAVES)
def test_leaves_do_not_import_each_other(leaf: str) -> None:
    allowed = SHARED | LEAVES[leaf] | {leaf}
    own = files(LINRNN / leaf) or [LINRNN / f"{leaf}.py"]
    for path in own:
        for name in imports(path):
            if name.startswith("linrnn."):
                inner = name.removeprefix("linrnn.")
                # `from linrnn.config import schema` names linrnn.config too.
                fits = any(f"{inner}.".startswith(f"{a}.") or a.startswith(f"{inner}.") for a in allowed)
                assert fits, f"{path.relative_to(ROOT)} imports {name}"


def test_only_the_loss_backends_name_the_kernels() -> None:
    users = {path for path in files(LINRNN) if "cce_kernels" in path.read_text()}
    assert users
    assert all(path.is_relative_to(LINRNN / "losses") for path in users)


def test_hydra_and_omegaconf_stay_in_the_config_package() -> None:
    users = {path for path in files(LINRNN) if roots(path) & {"hydra", "omegaconf"}}
    assert users
    assert all(path.is_relative_to(LINRNN / "config") for path in users)


def test_nothing_in_the_package_imports_the_trainer_but_scripts() -> None:
    for path in files(LINRNN):
        assert not any(f"{name}.".startswith("linrnn.training.trainer.") for name in imports(path)), path.name
