"""Every notebook runs on results made here and on committed ones, and is stored with the committed ones' outputs."""

import base64
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fitting import fitted

from study.notebook import FOLDERS, execute

nbclient = pytest.importorskip("nbclient", reason="pip install 'linrnn[test]'")
pytest.importorskip("ipykernel", reason="pip install 'linrnn[test]'")
nbformat = pytest.importorskip("nbformat", reason="pip install 'linrnn[test]'")
KernelManager = pytest.importorskip("jupyter_client", reason="pip install 'linrnn[test]'").KernelManager

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
RUN = ("model=transformer", "group=mve", "trainer.max_steps=15", "trainer.checkpoint_every=0")


@pytest.fixture(scope="module")
def cpu_results(small_of_module: Callable[..., list[str]]) -> Path:
    """A results directory with small runs of two losses, two batches and two vocabularies."""
    for loss in ("standard", "cce_kahan"):
        for more in ([], ["trainer.batch_size=1"], ["size.vocab_size=700"]):
            options = small_of_module(*RUN, "trainer.warmup_measurement_steps=2", f"loss={loss}", *more)
            group = fitted(options).directory.path.parent
    return group.parent


@pytest.fixture(scope="module")
def kernel() -> Iterator[KernelManager]:
    """One process for every notebook: it imports the libraries once."""
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(ROOT / "notebooks"))
    yield manager
    manager.shutdown_kernel(now=True)


def read(name: str) -> Any:
    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)


def run_all(name: str, kernel: KernelManager, results: Path) -> Any:
    """The notebook with its new outputs."""
    notebook = read(name)
    execute(notebook, results, kernel)
    return notebook


def shown(notebook: Any) -> list[str]:
    """All outputs of a notebook's cells, a plot as `<plot>`."""
    found = []
    for output in (output for cell in notebook.cells for output in cell.get("outputs", [])):
        data = output.get("data", {})
        if "image/png" in data:
            assert len(base64.b64decode(data["image/png"])) > 2000
            found.append("<plot>")
        else:
            found.append(output.get("text") or data.get("text/markdown") or data.get("text/html") or "")
    return found


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_on_results_made_here(name, cpu_results, kernel):
    found = "\n".join(shown(run_all(name, kernel, cpu_results)))
    assert "<plot>" in found
    for sweep in re.findall(r"sweep=(\w+)", found):
        assert (ROOT / "configs" / "sweep" / f"{sweep}.yaml").exists()
    assert "6 runs of mve, made on" in found
    if name == "memory_and_speed":
        assert "not measured: no whole steps" in found


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_stored_with_what_the_committed_results_say(name, kernel, tmp_path):
    """Only the committed rows are used, as in a fresh clone, even if there are other results here."""
    for directory in FOLDERS:
        (tmp_path / directory).symlink_to(ROOT / "results" / directory)
    stored, now = shown(read(name)), shown(run_all(name, kernel, tmp_path))
    assert stored == now, "python scripts/maintain/execute_notebooks.py stores them anew"
    assert "<plot>" in stored
    assert "made on NVIDIA H" in "\n".join(stored)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_text_of_a_notebook_states_no_number_that_no_cell_shows(name):
    notebook = read(name)
    printed = "\n".join(shown(notebook))
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for number in re.findall(r"(?<![\w.])\d[\d,.]*", cell.source):
                assert number.rstrip(".,") in printed, cell.source
