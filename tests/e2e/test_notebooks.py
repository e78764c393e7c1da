"""Every notebook runs from top to bottom, on results made here and on committed ones; none is stored with outputs."""

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from linrnn.config import load_config
from linrnn.experiments.breakdown import measure, to_json
from linrnn.training.trainer import Trainer

nbclient = pytest.importorskip("nbclient", reason="pip install 'linrnn[test]'")
pytest.importorskip("ipykernel", reason="pip install 'linrnn[test]'")
nbformat = pytest.importorskip("nbformat", reason="pip install 'linrnn[test]'")
KernelManager = pytest.importorskip("jupyter_client", reason="pip install 'linrnn[test]'").KernelManager

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
SMALL = (
    "device=cpu",
    "trainer.max_steps=25",
    "trainer.seq_len=80",
    "trainer.valid_tokens=400",
    "trainer.warmup_measurement_steps=2",
    "trainer.checkpoint_every=0",
    "data.n_tokens=20000",
    "data.n_valid_tokens=2000",
    "logger.wandb.mode=disabled",
)


@pytest.fixture(scope="module")
def cpu_results(tmp_path_factory: pytest.TempPathFactory, data_cache: Path) -> Path:
    """A results directory with small runs of two losses, two batches and two vocabularies, and a breakdown."""
    results = tmp_path_factory.mktemp("results")
    common = [*SMALL, f"results_dir={results}", f"data.cache_dir={data_cache}", "model=transformer", "group=mve"]
    for loss in ("standard", "cce_kahan"):
        for more in (
            ["trainer.batch_size=1"],
            ["trainer.batch_size=2"],
            ["trainer.batch_size=2", "size.vocab_size=700"],
        ):
            Trainer(load_config([*common, f"loss={loss}", *more])).fit()
    (results / "breakdown").mkdir()
    trainer = Trainer(load_config([*common, "trainer.batch_size=3"]))
    breakdown = to_json(measure(trainer, "small", warmup_steps=1, steps=1))
    (results / "breakdown" / "small.json").write_text(json.dumps(breakdown))
    return results


@pytest.fixture(scope="module")
def kernel() -> Iterator[KernelManager]:
    """One process for every notebook: it imports the libraries once."""
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(ROOT / "notebooks"))
    yield manager
    manager.shutdown_kernel(now=True)


def execute(name: str, kernel: KernelManager, results: Path) -> str:
    """Run a notebook; returns all that it shows, a plot as `<plot>`. It finds no name of the notebook before."""
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    forget = f"%reset -f\nimport os\nos.environ['LINRNN_RESULTS'] = {str(results)!r}\ndel os"
    notebook.cells.insert(0, nbformat.v4.new_code_cell(forget))
    nbclient.NotebookClient(notebook, timeout=300, km=kernel).execute()
    shown = []
    for output in (output for cell in notebook.cells for output in cell.get("outputs", [])):
        data = output.get("data", {})
        if "image/png" in data:
            assert len(base64.b64decode(data["image/png"])) > 2000
            shown.append("<plot>")
        shown.append(output.get("text") or data.get("text/markdown") or data.get("text/html") or "")
    return "\n".join(shown)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_on_results_made_here(name: str, cpu_results: Path, kernel: KernelManager) -> None:
    shown = execute(name, kernel, cpu_results)
    assert "<plot>" in shown
    for sweep in re.findall(r"sweep=(\w+)", shown):
        assert (ROOT / "configs" / "sweep" / f"{sweep}.yaml").exists()
    if name == "01_mve":
        assert "6 runs of mve, made on" in shown
        assert "peak memory, ratio | transformer | cce_kahan | standard" in shown
    if name == "04_where_memory_goes":
        assert "# small: where memory and time go" in shown
    if name == "02_loss_layer":
        assert "open: no loss benchmark" in shown


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_on_the_committed_results(name: str, kernel: KernelManager, tmp_path: Path) -> None:
    """The committed summaries alone, as in a fresh clone, whatever lies beside them here."""
    (tmp_path / "summaries").symlink_to(ROOT / "results" / "summaries")
    shown = execute(name, kernel, tmp_path)
    assert "H200" in shown
    assert "<plot>" in shown or "no curves were committed" in shown or "nothing to draw" in shown
    if name == "04_where_memory_goes":
        for breakdown in (ROOT / "results" / "summaries" / "breakdown").glob("*.json"):
            assert f"# {breakdown.stem}: where memory and time go" in shown


def test_there_are_five_notebooks_stored_without_outputs() -> None:
    assert [name[:2] for name in NOTEBOOKS] == ["01", "02", "03", "04", "05"]
    for name in NOTEBOOKS:
        notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
        nbformat.validate(notebook)
        for cell in notebook.cells:
            assert cell.cell_type == "markdown" or (cell.outputs == [] and cell.execution_count is None)
