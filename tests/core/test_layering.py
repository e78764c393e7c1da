"""Which package may import which: the packages have an order; the kernels stand apart."""

import ast
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "kernels" / "cce_kernels"
LINRNN = ROOT / "src" / "linrnn"
# Each package imports only packages before it. docs/develop/architecture.md draws the order.
ORDER = [
    *("core", "config", "data", "models", "losses", "distributed", "costs"),
    *("profiling", "runs", "training", "inference", "report", "experiments"),
]


def imports(path: Path) -> set[str]:
    """Dotted names of everything that a file imports, also inside functions. Relative imports are resolved."""
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


def targets(path: Path, modules: Collection[str]) -> set[str]:
    """The modules that a file imports; for `from package import module` only the module."""
    names = imports(path) & set(modules)
    return {name for name in names if not any(other.startswith(f"{name}.") for other in names)}


def files(location: Path) -> list[Path]:
    return sorted(location.rglob("*.py"))


def test_linrnn_holds_its_commands_and_packages():
    assert {path.name for path in LINRNN.glob("*.py")} == {"__init__.py", "__main__.py", "commands.py"}
    assert {path.parent.name for path in LINRNN.glob("*/__init__.py")} == set(ORDER)


def test_linrnn_itself_makes_the_losses_known_and_no_more():
    """Composing a configuration needs the losses' options; `config` stands below `losses`."""
    assert imports(LINRNN / "__init__.py") == {"linrnn.losses"}


def test_a_composed_configuration_has_imported_no_torch():
    """Wrong keys and --help are answered at once, although every loss's file has been read."""
    program = "import sys, linrnn.config as c; c.load_config(['loss=liger']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("package", ORDER)
def test_a_package_imports_only_packages_before_it(package):
    allowed = {*ORDER[: ORDER.index(package) + 1]}
    for path in files(LINRNN / package):
        used = {name.split(".")[1] for name in imports(path) if name.startswith("linrnn.")}
        assert used <= allowed, f"{path.relative_to(ROOT)} imports {sorted(used - allowed)}"


def test_no_package_imports_what_no_wheel_holds():
    for path in (*files(LINRNN), *files(KERNELS)):
        assert not roots(path) & {"benchmarks", "study", "scripts", "tests"}, path


@pytest.mark.parametrize("root", [LINRNN, KERNELS], ids=["linrnn", "cce_kernels"])
def test_modules_import_each_other_in_no_circle(root):
    """Imports at the top of a module and inside functions both count."""
    modules = {".".join(path.relative_to(root.parent).with_suffix("").parts): path for path in files(root)}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    below = {name: targets(path, modules.keys()) - {name} for name, path in modules.items()}
    while free := {name for name, others in below.items() if not others & below.keys()}:
        below = {name: others for name, others in below.items() if name not in free}
    assert not below


@pytest.mark.parametrize("root", [LINRNN, KERNELS], ids=["linrnn", "cce_kernels"])
def test_no_folder_holds_more_than_a_dozen_modules(root):
    for folder in {path.parent for path in files(root)}:
        modules = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(modules) <= 12, f"{folder.relative_to(ROOT)}: {sorted(modules)}"


def test_the_kernels_import_torch_and_triton_alone():
    allowed = {"torch", "triton", "cce_kernels"} | sys.stdlib_module_names
    assert files(KERNELS)
    for path in files(KERNELS):
        # Triton's interpreter runs on numpy, so its patches may import numpy.
        surplus = roots(path) - allowed - ({"numpy"} if path.name == "interpreter.py" else set())
        assert not surplus, f"{path.name} imports {sorted(surplus)}"


def test_the_core_of_the_kernels_imports_no_more_of_the_filter_than_its_rule():
    """Only the backends, which assemble the implementations, may import the filter's kernels."""
    for path in files(KERNELS):
        if path.relative_to(KERNELS).parts[0] not in ("filter", "backends"):
            of_filter = {name for name in imports(path) if name.startswith("cce_kernels.filter.")}
            assert all(name.startswith("cce_kernels.filter.rule") for name in of_filter), path.name


def test_only_the_loss_backends_name_the_kernels():
    users = {path for path in files(LINRNN) if "cce_kernels" in path.read_text()}
    assert users
    assert all(path.is_relative_to(LINRNN / "losses") for path in users)


def test_hydra_and_omegaconf_stay_in_the_config_package():
    users = {path for path in files(LINRNN) if roots(path) & {"hydra", "omegaconf"}}
    assert users
    assert all(path.is_relative_to(LINRNN / "config") for path in users)


IMPORTING_FROM_TABLES = ("before_after.py", "checks.py", "other_losses.py", "requirements.py", "fla_import.py")


def test_modules_are_imported_by_names_that_the_source_holds():
    """A constant or an entry of a table, never a configuration's text. Ruff finds pickles and evaluated text."""
    tops = ("src", "kernels", "benchmarks", "scripts")
    for path in [ROOT / "train.py", *(path for top in tops for path in files(ROOT / top))]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
                assert isinstance(node.args[0], ast.Constant) or path.name in IMPORTING_FROM_TABLES, path
