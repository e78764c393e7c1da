"""The page of benchmarks/loss.py: a table for each kind of problem, where backends cross torch.compile, a picture."""

from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.common import Column, grouped, interval, meanings, runs_of, table, write_page
from benchmarks.loss_pictures import error_plot, filter_eps, shape_in_words, shapes_plot, tradeoff_plot
from benchmarks.loss_rows import AGAIN, BAR, BASELINE, FLOOR, Row, winners
from linrnn.core.errors import DataError
from linrnn.core.plot_style import save
from linrnn.core.tables import show
from linrnn.runs.intervals import crossovers

MANY_SHAPES = 8  # more panels do not fit side by side


def _error(name: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        error, ratio = getattr(row, f"{name}_err"), getattr(row, f"{name}_err_ratio")
        return show(error, ".2e") + ("" if ratio is None else f" ({ratio:.2f})")

    return cell


def _to_floor(row: Row) -> str:
    """Time over that of three products, with its interval if the products are the floor's."""
    low, high = row.ratio_to_three_products_low, row.ratio_to_three_products_high
    ratio = row.ratio_to_three_products
    return show(ratio, ".2f") if low is None else f"{show(ratio, '.3f')} ({interval(low, high)})"


def _tflops(row: Row) -> str:
    ms = row.forward_backward_ms
    return show(None if ms is None else 6 * row.n * row.d * row.v / ms / 1e9, ".0f")


COLUMNS: list[Column] = [
    Column("backend", lambda row: row.label, "the fastest exact one of a problem is bold"),
    Column("n", lambda row: row.rounds or "-", "rounds; times and ratios are medians over them"),
    Column("ms", "forward_backward_ms:.2f", "forward and backward pass"),
    Column("/ compiled", "ratio_to_compiled:.3f", "time / torch.compile's time in the same round"),
    Column(
        "95 %",
        lambda row: interval(row.ratio_to_compiled_low, row.ratio_to_compiled_high),
        f"bootstrap interval of that ratio; `{BASELINE} {AGAIN}` is the same function again and shows the noise",
    ),
    Column("/ product", "ratio_to_product:.2f", "time / that of one cuBLAS product N x D x V"),
    Column("/ 3 products", _to_floor, f"time / that of `{FLOOR}` in the same round, with the 95 % interval"),
    Column("TFLOP/s", _tflops, "6 N D V / time: the FLOPs of three products"),
    Column("graph ms", "graph_ms:.2f", "replay of a CUDA graph; measured where the inputs fit the L2 cache"),
    Column("forward ms", "forward_ms:.2f", "forward pass without gradients"),
    Column("forward / product", "forward_ratio_to_product:.2f", "that time / that of one product"),
    Column("backward ms", "backward_ms:.2f", "the part of *ms* after the forward pass"),
    Column("backward / eager's", "backward_ratio_to_eager:.3f", "that time / that of `standard`"),
    Column("extra MiB", "extra_mib:,.0f", "peak memory of a call beyond inputs and gradients"),
    Column("forward MiB", "forward_extra_mib:,.1f", "the same without gradients"),
    Column("loss err", "loss_err:.1e", "relative to fp64"),
    Column("dE err", _error("de"), f"of the hidden states' gradient; in parentheses as a multiple of `{BAR}`'s"),
    Column("dC err", _error("dc"), "of the head's gradient, likewise"),
    Column(
        "dC err, sum",
        lambda row: "-" if row.dc_sum_err is None else f"{row.dc_sum_err:.2e} of {row.batches}",
        "of dC summed over that many batches",
    ),
    Column("same bits", lambda row: {True: "yes", False: "no", None: "-"}[row.deterministic], "in two calls"),
    Column("first call s", "first_call_s:.1f", "the first call compiles and tunes kernels"),
]
REMARK = (
    f"`{BAR}` has fp32 logits and rounds softmax - onehot to the products' dtype: its errors are those of rounding "
    f"alone. `{FLOOR}` is the floor: cuBLAS's three products of a loss that stores N x V, and nothing between them. "
    "It has no loss, so its errors and its memory are not measured."
)
_SHOWN = ("backend", "n", "ms", "/ compiled", "95 %", "/ 3 products", "extra MiB", "dE err", "dC err", "same bits")


def table_of(rows: Sequence[Row]) -> str:
    """Rows of one problem as aligned text. Backends that did not run stand below with the reason."""
    lines = table([column for column in COLUMNS if column.head in _SHOWN], [row for row in rows if row.status == "ok"])
    cells = [line.strip("|").split("|") for line in lines if "--" not in line]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    aligned = ["".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    return "\n".join([*aligned, *_refused(rows)]) + "\n"


def write_report(rows: Sequence[Row], directory: Path, name: str) -> list[Path]:
    """Write <name>.md and <name>.png from rows of one device; returns their paths.

    The picture shows time against memory where memory was measured on at most MANY_SHAPES shapes, and time alone
    otherwise. Where rows differ in `filter_eps`, <name>_error.png shows errors against time.

    Raises:
        DataError: there are no rows.
    """
    if not rows:
        raise DataError(f"no rows of set {name} under {directory}", "measure them first: measure=true")
    pictures = []
    drawn = [row for row in rows if row.ratio_to_compiled is not None and row.backend not in (BAR, BASELINE)]
    if len({row.shape for row in rows}) <= MANY_SHAPES and any(row.extra_mib is not None for row in drawn):
        pictures.append(save(tradeoff_plot(rows), directory / f"{name}.png"))
    elif drawn:
        pictures.append(save(shapes_plot(drawn), directory / f"{name}.png"))
    if len({filter_eps(row) for row in rows} - {None}) > 1:
        pictures.append(save(error_plot(rows), directory / f"{name}_error.png"))
    runs = [run["id"] for run in runs_of(directory, [row.run for row in rows])]
    lines = [f"# The loss layer alone: {name}, {directory.name}", ""]
    lines += [line for path in pictures for line in (f"![{path.stem}]({path.name})", "")]
    lines += [REMARK, "", *meanings(COLUMNS), ""]
    for own in grouped(rows, key=lambda row: (row.dtype, row.gradients, row.logits)):
        lines += _section(own, runs)
    return [write_page(directory / f"{name}.md", lines, directory, runs), *pictures]


def _section(rows: Sequence[Row], runs: Sequence[str]) -> list[str]:
    """The tables of one kind of problem, and where each backend crosses torch.compile if the shapes are a sweep."""
    first, best = rows[0], list(winners(list(rows)).values())
    lines = [f"## {first.logits} logits, products in {first.dtype}, gradients in {first.gradients}", ""]
    columns = [Column("backend", lambda row: f"**{row.label}**" if row in best else row.label), *COLUMNS[1:]]
    if len(runs) > 1:
        columns.append(Column("run", lambda row: runs.index(row.run) + 1 if row.run in runs else "-"))
    for own in grouped(rows, key=lambda row: row.shape):
        of = f" ({own[0].trained})" if own[0].trained else ""
        nats = [f", {row.loss_nats:.3f} nats" for row in own if row.backend == BAR and row.loss_nats is not None]
        lines += [f"**{shape_in_words(own[0])}**{of}{''.join(nats)}", ""]
        lines += [*table(columns, [row for row in own if row.status == "ok"]), "", *_refused(own), ""]
    return [*lines, *_crossing(rows)]


def _refused(rows: Sequence[Row]) -> list[str]:
    return [f"* {row.label}: {row.status}. {row.reason}" for row in rows if row.status != "ok"]


def sweep_axis(rows: Sequence[Row]) -> str | None:
    """The one of n, d and v that differs between three or more shapes; None if several differ or shapes are fewer."""
    shapes = {(row.n, row.d, row.v) for row in rows}
    differing = [axis for axis in ("n", "d", "v") if len({getattr(row, axis) for row in rows}) > 1]
    return differing[0] if len(differing) == 1 and len(shapes) >= 3 else None


def _crossing(rows: Sequence[Row]) -> list[str]:
    """Where each backend crosses torch.compile along a sweep; nothing where the shapes are no sweep."""
    axis = sweep_axis(rows)
    if axis is None:
        return []
    lines = [f"Crossover with {BASELINE} along {axis.upper()}:", ""]
    timed = [row for row in rows if row.ratio_to_compiled is not None and not row.backend.startswith(BASELINE)]
    for own in grouped(sorted(timed, key=lambda row: getattr(row, axis)), key=lambda row: row.label):
        sizes, ratios = [getattr(row, axis) for row in own], [row.ratio_to_compiled or 0 for row in own]
        found = [f"{'faster' if x.faster_above else 'slower'} above {x.size:,.0f}" for x in crossovers(sizes, ratios)]
        always = f"{'faster' if ratios[0] <= 1 else 'slower'} at every size measured ({sizes[0]:,} to {sizes[-1]:,})"
        lines.append(f"* {own[0].label}: {'; '.join(found) or always}")
    return [*lines, ""]
