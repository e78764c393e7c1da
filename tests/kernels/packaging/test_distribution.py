"""Both packages: the kernels' sdist and wheel are built, checked and run alone, beside the wheel of linrnn."""

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

KERNELS = Path(__file__).resolve().parents[3] / "kernels"
# The folder holds the installed package alone. torch comes from this interpreter; the repository's folders do not.
PROGRAM = """
import sys
sys.path[:] = [sys.argv[1], *(path for path in sys.path if not path.startswith(sys.argv[2]) or "site-packages" in path)]
import importlib.metadata, torch, cce_kernels
assert cce_kernels.__file__.startswith(sys.argv[1]), cce_kernels.__file__
assert importlib.metadata.version("cce-kernels") == cce_kernels.__version__
e, c = torch.randn(20, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
loss = cce_kernels.LinearCrossEntropyLoss()(e, c, torch.arange(20))
loss.backward()
torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(e @ c.T, torch.arange(20)))
print("ran", sorted({"transformers", "fla", "linrnn"} & set(sys.modules)))
"""


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the sdist, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run("-m", "build", "--no-isolation", "--outdir", str(folder), str(KERNELS), cwd=folder)
    return folder


def test_the_wheel_holds_every_module_and_no_more(built):
    [wheel] = built.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = {path.relative_to(KERNELS).as_posix() for path in (KERNELS / "cce_kernels").rglob("*.py")}
    assert names == {*sources, "cce_kernels/py.typed"}


def test_the_sdist_holds_the_license_the_readme_and_the_examples(built):
    [sdist] = built.glob("*.tar.gz")
    with tarfile.open(sdist) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "examples/plain_loop.py", "cce_kernels/api.py"} <= names


def test_the_metadata_is_complete(built):
    output = run("-m", "twine", "check", "--strict", *map(str, built.iterdir()), cwd=built)
    assert output.count("PASSED") == 2
    [wheel] = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        [name] = [name for name in opened.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = opened.read(name).decode()
    assert re.search(r"^Version: \d+\.\d+\.\d+$", metadata, re.MULTILINE), "a semantic version"
    bounds = re.search(r"^Requires-Dist: torch<([\d.]+),>=([\d.]+)$", metadata, re.MULTILINE)
    assert bounds
    below, least = (tuple(map(int, bound.split("."))) for bound in bounds.groups())
    assert least <= tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) < below


def test_the_installed_wheel_runs(built, tmp_path):
    [wheel] = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path)  # as pip does with a wheel of Python files
    assert run("-c", PROGRAM, str(tmp_path), str(KERNELS.parent), cwd=tmp_path) == "ran []\n"


def test_the_wheel_of_linrnn_holds_the_library_and_its_configurations_alone(built, tmp_path):
    run("-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(KERNELS.parent), cwd=tmp_path)
    [wheel] = tmp_path.glob("linrnn-*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert {name.partition("/")[0] for name in names} == {"linrnn"}  # nothing of cce_kernels: both install in any order
    configs = KERNELS.parent / "configs"
    assert {f"linrnn/configs/{path.relative_to(configs).as_posix()}" for path in configs.rglob("*.yaml")} <= names
    assert wheel.name.split("-")[1] == next(built.glob("*.whl")).name.split("-")[1], "one version"
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    [scripts] = (tmp_path / "site").glob("*.dist-info/entry_points.txt")
    assert "[console_scripts]\nlinrnn = linrnn." in scripts.read_text()
    printed = run("-m", "linrnn", "train", "size=mve", "--help", cwd=tmp_path / "site")
    assert "usage: linrnn train" in printed
    assert "--- configs/size/mve.yaml" in printed
