"""The report of the loss benchmark: tables, plots and the crossovers of sweeps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from linrnn.bench.loss.plots import (
    AXES,
    MANY_SHAPES,
    by_problem,
    error_plot,
    filter_eps,
    series_of,
    shapes_plot,
    sweep_axis,
    sweep_plot,
    tradeoff_plot,
)
from linrnn.bench.loss.rows import AGAIN, BAR, FLOOR, Row, crossovers, winners
from linrnn.bench.records import runs_section
from linrnn.core.errors import DataError
from linrnn.core.files import write_text
from linrnn.core.plot_style import save
from linrnn.core.tables import Table, show


def _interval(low: float | None, high: float | None) -> str:
    return "-" if low is None or high is None else f"{low:.3f}-{high:.3f}"


def _to_floor(row: Row) -> str:
    """Time over that of three products, with its interval if the products are the floor's."""
    ratio, low, high = row.ratio_to_three_products, row.ratio_to_three_products_low, row.ratio_to_three_products_high
    return show(ratio, ".2f") if low is None else f"{show(ratio, '.3f')} ({_interval(low, high)})"


def _error(error: float | None, ratio: float | None) -> str:
    return show(error, ".2e") + ("" if ratio is None else f" ({ratio:.2f})")


_COLUMNS: dict[str, Callable[[Row], str]] = {
    "backend": lambda row: row.label,
    "n": lambda row: str(row.rounds or "-"),
    "ms": lambda row: show(row.forward_backward_ms, ".2f"),
    "/ compiled": lambda row: show(row.ratio_to_compiled, ".3f"),
    "95 %": lambda row: _interval(row.ratio_to_compiled_low, row.ratio_to_compiled_high),
    "/ product": lambda row: show(row.ratio_to_product, ".2f"),
    "/ 3 products": _to_floor,
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
_MEANINGS = (
    ("n", "rounds; times and ratios are medians over them"),
    ("ms", "forward and backward pass"),
    ("/ compiled", "time divided by torch.compile's time in the same round"),
    ("95 %", f"bootstrap interval of that ratio; `compiled {AGAIN}` is the same function again and shows the noise"),
    ("/ product, / 3 products", "time divided by that of one or three cuBLAS products N x D x V"),
    ("graph ms", "replay of a CUDA graph; measured where the inputs fit the L2 cache"),
    ("forward ms", "forward pass without gradients; the next column divides it by one product"),
    ("backward ms", "the part of *ms* after the forward pass; the next column divides it by that of `standard`"),
    ("extra MiB", "peak memory of a call beyond inputs and gradients"),
    ("forward MiB", "the same without gradients"),
    ("loss err, dE err, dC err", "errors relative to fp64: loss, gradient of the hidden states, gradient of the head"),
    ("(in parentheses)", f"the error as a multiple of that of `{BAR}`"),
    ("dC err, sum", "error of dC summed over that many batches"),
    ("same bits", "whether two calls agree bit for bit"),
    ("first call s", "seconds of the first call, which compiles and tunes kernels"),
)
LEGEND = (
    "## Columns", "",
    f"`{BAR}` has fp32 logits and rounds softmax - onehot to the products' dtype. Its errors are "
    "those of rounding alone.", "",
    *Table(("column", "meaning"), _MEANINGS, words=("column", "meaning")).markdown(), "",
)  # fmt: skip
# Stands below LEGEND where rows have the floor.
FLOOR_LEGEND = (
    f"`{FLOOR}` is the floor: cuBLAS's three products of a loss that stores N x V, and nothing between them. "
    "The floor has no loss, so its errors and its memory are not measured. */ 3 products* is the time divided by the "
    "floor's time in the same round, with the 95 % interval.", "",
)  # fmt: skip


def table(rows: list[Row]) -> str:
    """Rows of one problem as aligned text. Backends that did not run stand below with the reason."""
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

    The plot shows a sweep where at least three shapes differ in one of N, D and V. It shows time by shape where shapes
    are more than MANY_SHAPES, and time against memory otherwise. A CPU has no memory figures, so that last plot is left
    out there. Where rows differ in `filter_eps`, <name>_error.png shows errors against time.

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
    elif len({row.shape for row in rows}) > MANY_SHAPES:
        save(shapes_plot(rows), plot)
        paths.append(plot)
    elif any(row.extra_mib is not None for row in rows):
        save(tradeoff_plot(rows), plot)
        paths.append(plot)
    if len({filter_eps(row) for row in rows} - {None}) > 1:
        paths.append(directory / f"{name}_error.png")
        save(error_plot(rows), paths[-1])
    title = f"{name}, {directory.name}"
    write_text(paths[0], _markdown(rows, runs, title, axis, [path.name for path in paths[1:]]))
    return paths


def _markdown(rows: list[Row], runs: dict[str, dict[str, Any]], title: str, axis: str | None, plots: list[str]) -> str:
    lines = [f"# The loss layer alone: {title}", ""]
    for plot in plots:
        lines += [f"![{plot.removesuffix('.png')}]({plot})", ""]
    lines += [*_overview(rows, axis), *LEGEND, *(FLOOR_LEGEND if any(row.backend == FLOOR for row in rows) else ())]
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
    lines += runs_section([runs[run] for run in origins if run in runs])
    return "\n".join(lines)


def _overview(rows: list[Row], axis: str | None) -> list[str]:
    """A line per backend and a column per shape. A sweep also says where each backend crosses torch.compile.

    More than MANY_SHAPES get a table per backend, with a line per shape.
    """
    lines = []
    heads = {row.shape: f"{axis.upper()} = {getattr(row, axis):,}" if axis else row.shape for row in rows}
    for (gradients, logits), own in by_problem(rows).items():
        best, cells = winners(own), {(row.label, row.shape): row for row in own}
        if len(heads) > MANY_SHAPES:
            lines += _by_shape(own, f"{logits} logits, gradients {gradients}")
            continue
        lines += [
            f"**{logits} logits, gradients {gradients}**. A cell holds time / compiled's, MiB beyond inputs and "
            "gradients, error of dE, error of dC. The fastest exact backend is bold.",
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


def _by_shape(rows: list[Row], problem: str) -> list[str]:
    """A table per backend: a line per shape, with torch.compile's figures in front."""
    compiled = {row.shape: row for row in rows if row.backend == "compiled"}
    lines = []
    for label in dict.fromkeys(row.label for row in rows if row.ratio_to_compiled and row.backend != "compiled"):
        lines += [f"**{label}, {problem}**. TFLOP/s: 6 N D V / time.", ""]
        lines += [*_table_by_shape([row for row in rows if row.label == label], compiled), ""]
    return lines


def _table_by_shape(rows: list[Row], compiled: dict[str, Row]) -> list[str]:
    floor = any(row.ratio_to_three_products_low is not None for row in rows)
    heads = (
        "N x D x V", "n", "compiled ms", *(["/ 3 products"] if floor else []), "TFLOP/s", "MiB", "/ compiled", "95 %",
        *(["/ 3 products"] if floor else []), "TFLOP/s", "MiB", "dE err", "dC err",
    )  # fmt: skip
    cells = [
        (
            f"{row.n:,} x {row.d:,} x {row.v:,}", str(row.rounds), show(base.forward_backward_ms, ".2f"),
            *([_to_floor(base)] if floor else []), _tflops(base), show(base.extra_mib, ",.0f"),
            show(row.ratio_to_compiled, ".3f"), _interval(row.ratio_to_compiled_low, row.ratio_to_compiled_high),
            *([_to_floor(row)] if floor else []), _tflops(row), show(row.extra_mib, ",.0f"),
            _error(row.de_err, row.de_err_ratio), _error(row.dc_err, row.dc_err_ratio),
        )
        for row in rows
        if (base := compiled.get(row.shape)) is not None
    ]  # fmt: skip
    return Table(heads, cells, words=("N x D x V",)).markdown()


def _tflops(row: Row) -> str:
    """Three products' FLOPs over the time of forward and backward pass, in TFLOP/s."""
    ms = row.forward_backward_ms
    return show(None if ms is None else 6 * row.n * row.d * row.v / ms / 1e9, ".0f")


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
