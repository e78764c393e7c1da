"""Functions for the notebooks: results by name, tables and plots. They say so if something was not measured."""

import base64
import io
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.loss_rows import Row, read_rows, rows_for
from benchmarks.steps_rows import read_rows as read_rows_of_steps
from linrnn.config import CONFIG_DIR
from linrnn.core.errors import DataError
from linrnn.core.files import read_object
from linrnn.core.machine import GIB
from linrnn.core.tables import Table
from linrnn.report import tables
from linrnn.report.plots import loss_curves
from linrnn.report.runs import (
    COMMITTED,
    MAX_BATCHES,
    REPORTS,
    Run,
    backend_names,
    environment_of,
    loss_layer_share,
    loss_time_share,
    origin_warning,
    read_committed,
    read_list,
    read_max_batches,
    read_runs,
)
from linrnn.report.targets import NOT_MEASURED, Verdict
from linrnn.report.verdicts import EXACT
from study.criteria import FINAL_LOSS
from study.searches import batch_verdicts, searches_on_the_h100
from study.step_speed import step_speeds

if TYPE_CHECKING:
    import pandas

FOLDERS = ("summaries", "bench_loss", "bench_steps")  # of committed results for notebooks
RESULTS = "LINRNN_RESULTS"  # environment variable for another results directory than the repository's


def results_dir() -> Path:
    """The directory of all results."""
    return Path(os.environ.get(RESULTS) or CONFIG_DIR.parent / "results")


def load(*groups: str) -> list[Run]:
    """The runs of the first of `groups` that was run here, or else of the first that is committed; [] if none is."""
    for group in groups:
        try:
            runs = read_runs(results_dir() / group)
        except DataError:
            continue
        return _loaded(runs, results_dir() / group)
    for group in groups:
        if (results_dir() / REPORTS / group / COMMITTED).exists():
            return _loaded(read_committed(results_dir() / REPORTS / group), results_dir() / REPORTS / group)
    sweep = (CONFIG_DIR / "sweep" / f"{groups[0]}.yaml").exists()
    how = f"python scripts/sweep.py sweep={groups[0]} makes them" if sweep else "the files in configs/sweep say how"
    print(f"open: no results of {' or '.join(groups)}; {how}")
    return []


def _loaded(runs: list[Run], directory: Path) -> list[Run]:
    if warning := origin_warning(runs):
        print(f"warning: {warning}")
    environment = environment_of(runs)
    gpus = ", ".join(gpu["name"] for gpu in environment.get("gpus", [])) or environment.get("cpu")
    commit = (environment.get("git") or {}).get("commit")
    for run in (run for run in runs if run.mixture):
        print(
            f"{run.name} is a mixture ({', '.join(run.mixture)} of its processes differ): it takes part in no verdict"
        )
    print(f"{len(runs)} runs of {directory.relative_to(results_dir())}, made on {gpus} at commit {str(commit)[:9]}")
    return runs


def max_batches() -> list[dict[str, Any]]:
    """Answers that scripts/find_max_batch.py found here, or else the committed ones."""
    found = read_max_batches(results_dir() / "max_batch")
    return found or [entry for path in _summaries(MAX_BATCHES) for entry in read_list(path)]


def breakdowns() -> list[dict[str, Any]]:
    """Breakdowns that scripts/breakdown.py wrote here, or else the committed ones."""
    here = sorted((results_dir() / "breakdown").glob("*.json"))
    files = here or sorted((results_dir() / REPORTS / "breakdown").glob("*.json"))
    found = [one for path in _summaries("breakdowns.json.xz") for one in read_list(path)] if not here else []
    found += [read_object(path, ("run", "time", "environment")) for path in files]
    if not found:
        print("open: no breakdown; python scripts/breakdown.py model=gla size=1b3 loss=compiled makes one")
    return found


def _summaries(name: str) -> list[Path]:
    """The files of that name in every committed report."""
    return sorted((results_dir() / REPORTS).glob(f"*/{name}"))


def batches_on_the_h100() -> list[Verdict]:
    """Verdicts on the committed searches of the largest batch on an H100; [] if they are not below these results."""
    try:
        return [verdict for _, verdict in batch_verdicts(searches_on_the_h100(results_dir()))]
    except DataError:
        print("open: no searches on an H100; scripts/find_max_batch.py --help says how to make one")
        return []


def speeds_of_steps(*folders: str) -> list[Verdict]:
    """Verdicts on the speed of our exact loss in whole steps, from folders of bench_steps."""
    found = []
    for folder in folders:
        directory = results_dir() / "bench_steps" / folder
        if not directory.is_dir():
            print(f"open: no whole steps in bench_steps/{folder}; python benchmarks/steps.py makes them")
            continue
        speeds = step_speeds(read_rows_of_steps(directory))
        found += [one.verdict for one in speeds if one.verdict.backend == EXACT]
    return found


def bench_rows(device: str) -> list[Row]:
    """Rows of the loss benchmark on `device` (a directory below results/bench_loss): of the set `shapes`, or else all.

    Without such rows: those of another device that has some, a GPU before a CPU.
    """
    devices = [path for path in (results_dir() / "bench_loss").glob("*") if path.is_dir()]
    for path in sorted(devices, key=lambda path: (path.name != device, path.name == "cpu", path.name)):
        if rows := [row for file in sorted(path.glob("*.json")) for row in read_rows(file)]:
            rows = [row for row in rows if row.set == "shapes"] or rows
            rows = sorted(rows_for("shapes", rows).values(), key=lambda row: row.problem)
            print(f"{len(rows)} rows of {path.relative_to(results_dir())}")
            return rows
    print("open: no loss benchmark; python benchmarks/loss.py makes one")
    return []


def frame(runs: Sequence[Run]) -> "pandas.DataFrame":
    """One row per run: summary, `backend`, GPU, commit, memory in GiB, and the loss layer's shares of peak and step."""
    import pandas

    nested = ("memory_bytes", "loss_options", "loss_layer_ms")
    rows = []
    for run, backend in zip(runs, backend_names([run.summary for run in runs]), strict=True):
        memory = run.summary.get("memory_bytes") or {}
        peak = run.summary["peak_memory_bytes"]
        gpus = run.environment.get("gpus") or []
        rows.append(
            {
                **{key: value for key, value in run.summary.items() if key not in nested},
                "backend": backend,
                "mixture": ", ".join(run.mixture),
                "gpu": gpus[0]["name"] if gpus else None,
                "commit": (run.environment.get("git") or {}).get("commit"),
                "peak_memory_gib": None if peak is None else peak / GIB,
                **{f"{name}_gib": size / GIB for name, size in memory.items()},
                "loss_layer_share": loss_layer_share(run),
                **{f"loss_{name}_ms": time for name, time in (run.summary.get("loss_layer_ms") or {}).items()},
                "loss_layer_time_share": loss_time_share(run),
            }
        )
    return pandas.DataFrame(rows)


def verdict_table(found: Sequence[Verdict]) -> list[str]:
    """Verdicts as Markdown: a table, answered ones first, and below it a table of what was not measured."""
    missing = tables.not_measured(found)
    below = ["", "Not measured:", "", *missing.markdown()] if missing else []
    measured = any(verdict.verdict != NOT_MEASURED for verdict in found)
    return [*(tables.of_verdicts(found).markdown() if measured else []), *below]


def course_lines(runs: Sequence[Run]) -> list[str]:
    """:func:`linrnn.report.tables.of_courses` as Markdown, with its heading; empty if every run finished."""
    table = tables.of_courses(runs)
    return ["## Over the steps that two runs have", "", *table.markdown(), "", tables.BATCH_NOISE, ""] if table else []


def show_frame(table: "pandas.DataFrame", columns: Mapping[str, tuple[str, str]]) -> None:
    """Display columns of a frame as a table for people.

    Args:
        table: any frame; without rows, a line says so.
        columns: for each column to show, its heading and the format of its numbers ("" for words).
    """
    if not len(table):
        print("open: nothing was measured")
        return
    rows = [[_cell(row[name], form) for name, (_, form) in columns.items()] for _, row in table.iterrows()]
    headings = [heading for heading, _ in columns.values()]
    words = [heading for heading, form in columns.values() if not form]
    show_markdown(Table(headings, rows, words).markdown())


def _cell(value: Any, form: str) -> str:
    missing = value is None or (isinstance(value, float) and math.isnan(value))
    return "-" if missing else format(value, form)


def show_plot(draw: Callable[..., Any], runs: Sequence[Run], *arguments: Any) -> None:
    """Draw and display a plot of :mod:`linrnn.report.plots`, or say that there are no measured runs."""
    if draw is not loss_curves and not any(run.finished and run.summary["tokens_per_second"] for run in runs):
        print("open: nothing to draw")
        return
    if draw is loss_curves and not any(run.losses for run in runs):
        print("open: no curves were committed with these runs; scripts/report.py writes them")
        return
    show_figure(draw(runs, *arguments, **({"margin": FINAL_LOSS.bound} if draw is loss_curves else {})))


def show_figure(figure: Any) -> None:
    """Display a figure once, or say that it has no data."""
    from IPython.display import display
    from matplotlib import pyplot

    if any(axes.has_data() for axes in figure.axes):
        display(figure)
    else:
        print("open: nothing to draw")
    pyplot.close(figure)


def show_markdown(lines: Sequence[str]) -> None:
    """Display Markdown."""
    from IPython.display import Markdown, display

    display(Markdown("\n".join(lines)))


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
    client = nbclient.NotebookClient(
        notebook, timeout=300, km=kernel, kernel_name="python3", record_timing=False, resources={}
    )
    client.execute()
    del notebook.cells[0]
    for number, cell in enumerate((cell for cell in notebook.cells if cell.cell_type == "code"), start=1):
        cell.execution_count = number
        cell.outputs = _joined(cell.outputs)
        for output in cell.outputs:
            if "execution_count" in output:
                output["execution_count"] = number
            if "image/png" in output.get("data", {}):
                output["data"]["image/png"] = _light(output["data"]["image/png"])


def _joined(outputs: Sequence[Any]) -> list[Any]:
    """The outputs with neighbouring pieces of a stream joined: the kernel cuts printed text by time, even in a line."""
    joined: list[Any] = []
    for output in outputs:
        before = joined[-1] if joined else {}
        if output["output_type"] == "stream" and before.get("name") == output["name"]:
            before["text"] += output["text"]
        else:
            joined.append(output)
    return joined


def _light(png: str) -> str:
    """A base64 PNG with only as many colours as a plot needs: a third of the bytes."""
    from PIL import Image

    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB").quantize(96)
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()
