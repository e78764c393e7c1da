"""What the notebooks call: results by name, tables and plots that say what is open where nothing was measured."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from linrnn.bench.loss.rows import Row, read_rows, rows_for
from linrnn.config import CONFIG_DIR
from linrnn.core.errors import DataError
from linrnn.study.plots import loss_curves
from linrnn.study.results import (
    BREAKDOWNS,
    COMMITTED,
    MAX_BATCHES,
    Run,
    check_origin,
    read_breakdowns,
    read_committed,
    read_committed_lists,
    read_max_batches,
    read_runs,
)

RESULTS = "LINRNN_RESULTS"  # variable that names another results directory than the repository's


def results_dir() -> Path:
    """The directory of all results."""
    return Path(os.environ.get(RESULTS) or CONFIG_DIR.parent / "results")


def load(*groups: str) -> list[Run]:
    """The runs of the first of `groups` that was run here, else of the first that is committed; [] if none is.

    Raises:
        ConfigError: they were made on different GPUs, with different versions or at different commits.
    """
    for group in groups:
        try:
            runs = read_runs(results_dir() / group)
        except DataError:
            continue
        return _loaded(runs, results_dir() / group)
    for group in groups:
        if (results_dir() / "summaries" / group / COMMITTED).exists():
            return _loaded(read_committed(results_dir() / "summaries" / group), results_dir() / "summaries" / group)
    sweep = (CONFIG_DIR / "sweep" / f"{groups[0]}.yaml").exists()
    how = f"python scripts/sweep.py sweep={groups[0]} makes them" if sweep else "the files in configs/sweep say how"
    print(f"open: no results of {' or '.join(groups)}; {how}")
    return []


def _loaded(runs: list[Run], directory: Path) -> list[Run]:
    check_origin(runs, directory.name)
    environment = next((run.environment for run in runs if run.environment and not run.mixture), {})
    gpus = ", ".join(gpu["name"] for gpu in environment.get("gpus", [])) or environment.get("cpu")
    commit = (environment.get("git") or {}).get("commit")
    for run in (run for run in runs if run.mixture):
        print(
            f"{run.name} is a mixture ({', '.join(run.mixture)} of its processes differ): it takes part in no verdict"
        )
    print(f"{len(runs)} runs of {directory.relative_to(results_dir())}, made on {gpus} at commit {str(commit)[:9]}")
    return runs


def max_batches() -> list[dict[str, Any]]:
    """Answers of scripts/find_max_batch.py made here, else the committed ones."""
    found = read_max_batches(results_dir() / "max_batch")
    return found or read_committed_lists(results_dir() / "summaries", MAX_BATCHES)


def breakdowns() -> list[dict[str, Any]]:
    """What scripts/breakdown.py wrote here, else what is committed."""
    found = read_breakdowns(results_dir() / "breakdown")
    summaries = results_dir() / "summaries"
    found = found or [*read_committed_lists(summaries, BREAKDOWNS), *read_breakdowns(summaries / "breakdown")]
    if not found:
        print("open: no breakdown; python scripts/breakdown.py model=gla size=1b3 loss=compiled makes one")
    return found


def bench_rows() -> list[Row]:
    """Rows of the loss benchmark, of the first GPU that has any, else of the CPU."""
    devices = (path for path in (results_dir() / "bench_loss").glob("*") if path.is_dir())
    for device in sorted(devices, key=lambda path: (path.name == "cpu", path.name)):
        if rows := [row for path in sorted(device.glob("*.json")) for row in read_rows(path)]:
            rows = list(rows_for("shapes", rows).values())
            print(f"{len(rows)} rows of {device.relative_to(results_dir())}")
            return rows
    print("open: no loss benchmark; python scripts/bench_loss.py makes one")
    return []


def show_plot(draw: Callable[..., Any], runs: Sequence[Run], *arguments: Any) -> None:
    """Draw and display a plot of :mod:`linrnn.study.plots`; without measured runs say so."""
    from IPython.display import display
    from matplotlib import pyplot

    if not any(run.finished and run.summary["tokens_per_second"] for run in runs):
        print("open: nothing to draw")
        return
    if draw is loss_curves and not any(run.losses for run in runs):
        print("open: no curves were committed with these runs; scripts/report.py writes them")
        return
    figure = draw(runs, *arguments)
    if any(axes.has_data() for axes in figure.axes):
        display(figure)
    else:
        print("open: nothing to draw")
    pyplot.close(figure)


def show_markdown(lines: Sequence[str]) -> None:
    """Display Markdown."""
    from IPython.display import Markdown, display

    display(Markdown("\n".join(lines)))
