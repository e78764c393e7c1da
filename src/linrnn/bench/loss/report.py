"""The loss benchmark as people read it: tables with their plots, crossovers of sweeps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from linrnn.bench.loss.plots import (
    AXES,
    by_problem,
    error_plot,
    filter_eps,
    series_of,
    sweep_axis,
    sweep_plot,
    tradeoff_plot,
)
from linrnn.bench.loss.rows import AGAIN, BAR, Row, crossovers, winners
from linrnn.core.errors import DataError
from linrnn.core.plot_style import save
from linrnn.core.tables import Table, show


def _interval(low: float | None, high: float | None) -> str:
    return "-" if low is None or high is None else f"{low:.3f}-{high:.3f}"


def _error(error: float | None, ratio: float | None) -> str:
    return show(error, ".2e") + ("" if ratio is None else f" ({ratio:.2f})")


_COLUMNS: dict[str, Callable[[Row], str]] = {
    "backend": lambda row: row.label,
    "ms": lambda row: show(row.forward_backward_ms, ".2f"),
    "/ compiled": lambda row: show(row.ratio_to_compiled, ".3f"),
    "95 %": lambda row: _interval(row.ratio_to_compiled_low, row.ratio_to_compiled_high),
    "/ product": lambda row: show(row.ratio_to_product, ".2f"),
    "/ 3 products": lambda row: show(row.ratio_to_three_products, ".2f"),
    "graph ms": lambda row: show(row.graph_ms, ".2f"),
    "forward ms": lambda row: show(row.forward_ms, ".2f"),
    "/ product ": lambda row: show(row.forward_ratio_to_product, ".2f"),
    "backward ms": lambda row: show(row.backward_ms, ".2f"),
    "/ eager's": lambda row: show(row.backward_ratio_to_eager, ".3f"),
    "extra MiB": lambda row: show(row.extra_mib, ",.0f"),
    "forward MiB": lambda row: show(row.forward_extra_mib, ",.1f"),
    "loss err": lambda row: show(row.loss_err, ".1e"),
    "dE err": lambda row: _error(row.de_err, row.de_err_ratio),
    "dC err": lambda row: _error(row.dc_err, row.dc_err_ratio),
    "dC err, sum": lambda row: "-" if row.dc_sum_err is None else f"{row.dc_sum_err:.2e} of {row.batches}",
    "same bits": lambda row: "-" if row.deterministic is None else ("yes" if row.deterministic else "no"),
    "first call s": lambda row: show(row.first_call_s, ".1f"),
}
_LEGEND = f"""ms: forward + backward, median; / compiled: its ratio to torch.compile's time, round by round, with a 95 %
bootstrap interval (`compiled {AGAIN}` is the same function once more: its interval is the noise); / product,
/ 3 products: to cuBLAS products N x D x V; graph ms: replay of a CUDA graph, where the inputs fit the L2 cache;
forward ms: without gradients; backward ms: what follows the forward pass in forward + backward, / eager's: its ratio to
that of `standard`; extra MiB: peak memory of a call beyond inputs and gradients, forward MiB: the same without
gradients; errors are relative to fp64, in parentheses as a multiple of those of `{BAR}` (fp32 logits, softmax - onehot
rounded to the products' dtype); dC err, sum: of dC added up over so many batches; same bits: two calls agree bit for
bit; first call: compiling and tuning."""


def table(rows: list[Row]) -> str:
    """Rows of one problem as aligned text; those that did not run stand below with the reason."""
    ran = [row for row in rows if row.status == "ok"]
    cells = [list(_COLUMNS), *([column(row) for column in _COLUMNS.values()] for row in ran)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(_COLUMNS))]
    lines = [
        "  ".join([line[0].ljust(widths[0]), *(text.rjust(w) for text, w in zip(line[1:], widths[1:], strict=True))])
        for line in cells
    ]
    lines += [f"{row.label.ljust(widths[0])}  {row.status}: {row.reason}" for row in rows if row not in ran]
    return "\n".join(lines) + "\n"


def write_report(rows: list[Row], runs: dict[str, dict[str, Any]], directory: Path, name: str) -> list[Path]:
    """Write <name>.md and <name>.png from rows of one device; returns their paths.

    The plot is a sweep where the shapes differ in one of N, D and V and there are at least three, otherwise time
    against memory; the latter is left out where no memory was measured, on a CPU. Where rows differ in `filter_eps`,
    <name>_error.png has errors against time.

    Raises:
        DataError: there are no rows.
    """
    if not rows:
        raise DataError(f"no rows of set {name} under {directory}", "measure them first: measure=true")
    axis = sweep_axis(rows)
    plot = directory / f"{name}.png"
    paths = [directory / f"{name}.md"]
    if axis is not None:
        save(sweep_plot(rows, axis), plot)
        paths.append(plot)
    elif any(row.extra_mib is not None for row in rows):
        save(tradeoff_plot(rows), plot)
        paths.append(plot)
    if len({filter_eps(row) for row in rows} - {None}) > 1:
        paths.append(directory / f"{name}_error.png")
        save(error_plot(rows), paths[-1])
    title = f"{name}, {directory.name}"
    paths[0].write_text(_markdown(rows, runs, title, axis, [path.name for path in paths[1:]]), encoding="utf-8")
    return paths


def _markdown(rows: list[Row], runs: dict[str, dict[str, Any]], title: str, axis: str | None, plots: list[str]) -> str:
    lines = [f"# The loss layer alone: {title}", ""]
    for plot in plots:
        lines += [f"![{plot.removesuffix('.png')}]({plot})", ""]
    lines += _overview(rows, axis)
    origins = sorted({row.run for row in rows})
    columns = dict(_COLUMNS)
    if len(origins) > 1:
        columns["run"] = lambda row: str(origins.index(row.run) + 1)
    problems: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in rows:
        problems.setdefault(row.problem, []).append(row)
    for (shape, dtype, gradients, logits), own in problems.items():
        first = own[0]
        lines += [
            f"## {shape} ({first.n} x {first.d} x {first.v}), {logits} logits, {dtype}, gradients {gradients}",
            "",
        ]
        if first.trained:
            nats = next((row.loss_nats for row in own if row.backend == BAR), None)
            lines += [f"Hidden states and head of {first.trained}: loss {show(nats, '.3f')} nats.", ""]
        cells = [[column(row) for column in columns.values()] for row in own if row.status == "ok"]
        lines += Table(list(columns), cells, words=list(columns)[:1]).markdown()
        refused = [f"* {row.label}: {row.status}. {row.reason}" for row in own if row.status != "ok"]
        lines += ["", *refused, *([""] if refused else [])]
    lines += [_LEGEND, "", *_origin([runs[run] for run in origins if run in runs])]
    return "\n".join(lines)


def _overview(rows: list[Row], axis: str | None) -> list[str]:
    """A line per backend, a column per shape; below it, on a sweep, where each backend crosses torch.compile."""
    lines = []
    heads = {row.shape: f"{axis.upper()} = {getattr(row, axis):,}" if axis else row.shape for row in rows}
    for (gradients, logits), own in by_problem(rows).items():
        best, cells = winners(own), {(row.label, row.shape): row for row in own}
        lines += [
            f"**{logits} logits, gradients {gradients}**: time / compiled's, MiB beyond inputs and gradients, "
            "dE error, dC error; the fastest exact one in bold",
            "",
        ]
        labels = dict.fromkeys(row.label for row in own)
        rows_of = [(label, *(_cell(cells.get((label, shape)), best) for shape in heads)) for label in labels]
        lines += [*Table(("backend", *heads.values()), rows_of, words=("backend",)).markdown(), ""]
        if axis:
            lines += [f"Crossover with compiled along {AXES[axis]}:", ""]
            for label, points in series_of(own, axis, "ratio_to_compiled").items():
                if not label.startswith("compiled"):
                    lines.append(f"* {label}: {_crossing_text([x for x, _ in points], [y for _, y in points])}")
            lines.append("")
    return lines


def _cell(row: Row | None, best: dict[tuple[str, str, str, str], Row]) -> str:
    if row is None:
        return ""
    if row.status != "ok":
        return row.status
    ratio = show(row.ratio_to_compiled, ".3f")
    if best.get(row.problem) is row:
        ratio = f"**{ratio}**"
    return f"{ratio}, {show(row.extra_mib, ',.0f')}, {show(row.de_err, '.1e')}, {show(row.dc_err, '.1e')}"


def _crossing_text(sizes: list[int], ratios: list[float]) -> str:
    found = crossovers(sizes, ratios)
    if not found:
        return f"{'faster' if ratios[0] <= 1 else 'slower'} at every size measured ({sizes[0]:,} to {sizes[-1]:,})"
    return "; ".join(f"{'faster' if x.faster_above else 'slower'} above {x.size:,.0f}" for x in found)


def _origin(runs: list[dict[str, Any]]) -> list[str]:
    lines = ["## Runs", ""]
    for number, run in enumerate(runs, start=1):
        environment = run["environment"]
        git = environment["git"] or {}
        gpus = ", ".join(gpu["name"] for gpu in environment["gpus"]) or environment["cpu"]
        packages = ", ".join(f"{name} {version}" for name, version in environment["packages"].items() if version)
        lines += [
            f"{number}. `{run['command']}`: commit {git.get('commit')}"
            f"{' with uncommitted changes' if git.get('dirty') else ''}, {gpus}, "
            + (f"driver {environment['gpu_driver']}, " if environment["gpu_driver"] else "")
            + f"Python {environment['python']}, {packages}",
        ]
    return [*lines, ""]
