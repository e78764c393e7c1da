"""Functions for the notebooks: results by name, tables and figures. They say so if something was not measured."""

import base64
import contextlib
import io
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from benchmarks.steps_rows import Row, read_rows
from linrnn.config import CONFIG_DIR
from linrnn.core.errors import DataError
from linrnn.core.tables import Table
from linrnn.report.runs import Run, environment_of, find_group, origin_warning

FOLDERS = ("summaries", "bench_loss", "bench_steps")  # of committed results for notebooks
RESULTS = "LINRNN_RESULTS"  # environment variable for another results directory than the repository's


def results_dir() -> Path:
    """The directory of all results."""
    return Path(os.environ.get(RESULTS) or CONFIG_DIR.parent / "results")


def load(*groups: str) -> list[Run]:
    """The runs of the first of `groups` that was run here or is committed; [] if none is."""
    for group in groups:
        with contextlib.suppress(DataError):
            runs, directory = find_group(results_dir(), group)
            if warning := origin_warning(runs):
                print(f"warning: {warning}")
            environment = environment_of(runs)
            gpus = ", ".join(gpu["name"] for gpu in environment.get("gpus", [])) or environment.get("cpu")
            commit = (environment.get("git") or {}).get("commit")
            name = directory.relative_to(results_dir())
            print(f"{len(runs)} runs of {name}, made on {gpus} at commit {str(commit)[:9]}")
            return runs
    sweep = (CONFIG_DIR / "sweep" / f"{groups[0]}.yaml").exists()
    how = f"python scripts/sweep.py sweep={groups[0]} makes them" if sweep else "the files in configs/sweep say how"
    print(f"not measured: no results of {' or '.join(groups)}; {how}")
    return []


def load_steps(folder: str) -> list[Row]:
    """The rows of whole steps in a folder of bench_steps; [] if there is none."""
    directory = results_dir() / "bench_steps" / folder
    if not directory.is_dir():
        print(f"not measured: no whole steps in bench_steps/{folder}; python benchmarks/steps.py makes them")
        return []
    return read_rows(directory)


def show(content: Table | Sequence[str] | None) -> None:
    """Display a table or lines of Markdown."""
    from IPython.display import Markdown, display

    if not content:
        print("not measured")
        return
    display(Markdown("\n".join(content.markdown() if isinstance(content, Table) else content)))


def show_plot(draw: Callable[..., Any], rows: Collection[Any], *arguments: Any, **options: Any) -> None:
    """Draw and display a figure once, or say that there is nothing to draw."""
    from IPython.display import display
    from matplotlib import pyplot

    figure = draw(rows, *arguments, **options) if rows else None
    if figure is None or not any(axes.has_data() for axes in figure.axes):
        print("not measured: nothing to draw")
    else:
        display(figure)
    pyplot.close("all")


def execute(notebook: Any, results: Path, kernel: Any = None) -> None:
    """Run every cell of a notebook (as nbformat reads it) on the results below `results`, and store the outputs.

    Args:
        kernel: a started kernel that other notebooks have used; its variables are deleted. None starts one.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    import nbclient
    from nbformat.v4 import new_code_cell

    forget = f"%reset -f\nimport os\nos.environ[{RESULTS!r}] = {str(results)!r}\ndel os"
    notebook.cells.insert(0, new_code_cell(forget))
    options = {"kernel_name": "python3", "record_timing": False, "coalesce_streams": True, "resources": {}}
    nbclient.NotebookClient(notebook, timeout=300, km=kernel, **options).execute()
    del notebook.cells[0]
    for number, cell in enumerate((cell for cell in notebook.cells if cell.cell_type == "code"), start=1):
        cell.execution_count = number
        for output in cell.outputs:
            if "execution_count" in output:
                output["execution_count"] = number
            if "image/png" in output.get("data", {}):
                output["data"]["image/png"] = _light(output["data"]["image/png"])


def _light(png: str) -> str:
    """A base64 PNG with only as many colours as a plot needs: a third of the bytes."""
    from PIL import Image

    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB").quantize(96)
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()
