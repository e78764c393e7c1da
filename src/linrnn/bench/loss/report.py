"""The loss benchmark as people read it: tables, plots of time against memory, sweeps with their crossovers."""

import math
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from linrnn.bench.loss.rows import AGAIN, BAR, Row, crossovers, winners
from linrnn.core.errors import DataError
from linrnn.core.tables import Table, show

_MARKERS = "osD^v<>pPXh*8d"
_AXES = {"n": "tokens N", "d": "hidden dimensions D", "v": "vocabulary V"}


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
        _plot_sweep(rows, axis, plot, name)
        paths.append(plot)
    elif any(row.extra_mib is not None for row in rows):
        _plot_tradeoff(rows, plot, name)
        paths.append(plot)
    if len({filter_eps(row) for row in rows} - {None}) > 1:
        paths.append(directory / f"{name}_error.png")
        _plot_errors(rows, paths[-1], name)
    paths[0].write_text(_markdown(rows, runs, name, axis, [path.name for path in paths[1:]]), encoding="utf-8")
    return paths


def filter_eps(row: Row) -> float | None:
    """The threshold that a row's text gives."""
    found = re.search(r"\bfilter_eps=(\S+)", row.backend)
    return float(found[1]) if found else None


def sweep_axis(rows: list[Row]) -> str | None:
    """The one of n, d and v in which three or more shapes differ; None if they differ in several or are fewer."""
    shapes = {(row.n, row.d, row.v) for row in rows}
    differing = [axis for axis in _AXES if len({getattr(row, axis) for row in rows}) > 1]
    return differing[0] if len(differing) == 1 and len(shapes) >= 3 else None


# ----------------------------------------------------------------------------------------------------- markdown
def _markdown(rows: list[Row], runs: dict[str, dict[str, Any]], name: str, axis: str | None, plots: list[str]) -> str:
    lines = [f"# The loss layer alone: {name}", ""]
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
    for (gradients, logits), own in _panels(rows).items():
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
            lines += [f"Crossover with compiled along {_AXES[axis]}:", ""]
            for label, points in _series(own, axis, "ratio_to_compiled").items():
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


# --------------------------------------------------------------------------------------------------------- plots
def _panels(rows: list[Row]) -> dict[tuple[str, str], list[Row]]:
    """Rows by dtype of gradients and kind of logits."""
    panels: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        panels.setdefault((row.gradients, row.logits), []).append(row)
    return panels


def _series(rows: list[Row], axis: str, field: str) -> dict[str, list[tuple[int, float]]]:
    """(size, value) by backend, ascending; sizes at which the value is missing are left out."""
    series: dict[str, list[tuple[int, float]]] = {}
    for row in sorted(rows, key=lambda row: getattr(row, axis)):
        value = getattr(row, field)
        if value is not None and not row.backend.endswith(AGAIN) and row.backend != BAR:
            series.setdefault(row.label, []).append((getattr(row, axis), value))
    return series


def _styles(rows: list[Row]) -> dict[str, dict[str, Any]]:
    """Colour and marker of every backend that has a time; ours stand out by their size."""
    labels = dict.fromkeys(row.label for row in rows if row.ratio_to_compiled is not None)
    return {
        label: {
            "color": f"C{number % 10}",
            "marker": _MARKERS[number % len(_MARKERS)],
            "markersize": 10 if label.startswith("cce_kahan") else 7,
            "zorder": 3 if label.startswith("cce_kahan") else 2,
        }
        for number, label in enumerate(label for label in labels if not label.endswith(AGAIN))
    }


def _round_ticks(axis: Any, values: list[float]) -> None:
    """Ticks of a logarithmic axis at powers of ten or, where these are few, at 1, 2 and 5 times them."""
    from matplotlib.ticker import LogLocator, NullFormatter

    decades = math.log10(max(values) / min(values)) if values else 0
    axis.set_major_locator(LogLocator(subs=(1,) if decades > 1.5 else (1, 2, 5)))
    axis.set_major_formatter("{x:,.0f}")
    axis.set_minor_formatter(NullFormatter())


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def _plot_tradeoff(rows: list[Row], path: Path, title: str) -> None:
    """Time relative to torch.compile against extra memory: a column per shape, a row per kind of problem."""
    pyplot = _pyplot()
    panels, shapes, styles = _panels(rows), list(dict.fromkeys(row.shape for row in rows)), _styles(rows)
    size = (4.2 * len(shapes), 3.4 * len(panels) + 1.2)
    figure, axes = pyplot.subplots(len(panels), len(shapes), figsize=size, squeeze=False, layout="constrained")
    for line, ((gradients, logits), own) in zip(axes, panels.items(), strict=True):
        for panel, shape in zip(line, shapes, strict=True):
            points = [row for row in own if row.shape == shape and row.label in styles]
            for row in points:
                if row.extra_mib is not None and row.ratio_to_compiled is not None:
                    panel.plot(max(row.extra_mib, 1), row.ratio_to_compiled, linestyle="none", **styles[row.label])
            panel.axhline(1, color="0.6", linewidth=1, zorder=1)
            panel.set(xscale="log", yscale="log", title=f"{_wrapped(shape)}\n{logits} logits, {gradients} gradients")
            _plain_ticks(panel, [row.ratio_to_compiled for row in points])
            _round_ticks(panel.xaxis, [max(row.extra_mib, 1) for row in points if row.extra_mib is not None])
            panel.set_xlabel("memory beyond inputs and gradients, MiB")
            panel.grid(which="major", color="0.92")
        line[0].set_ylabel("forward + backward time / torch.compile's")
    _legend(figure, styles, title)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _plot_errors(rows: list[Row], path: Path, title: str) -> None:
    """Error of each gradient, and of dC summed over batches, against time: a column per problem; the settings of a rule
    are joined, from the largest threshold to the smallest. Problems without one are not drawn."""
    pyplot = _pyplot()
    fields = {"de_err": "dE error", "dc_err": "dC error", "dc_sum_err": "dC error, sum over batches"}
    fields = {field: label for field, label in fields.items() if any(getattr(row, field) is not None for row in rows)}
    problems = list(dict.fromkeys(row.problem for row in rows if filter_eps(row) is not None))
    timed = [row for row in rows if row.ratio_to_compiled is not None and not row.backend.endswith(AGAIN)]
    styles = {
        rule: {"color": f"C{i % 10}", "marker": _MARKERS[i % len(_MARKERS)]} for i, rule in enumerate(_rules(timed))
    }
    size = (4.4 * len(problems), 3.4 * len(fields) + 1.2)
    figure, axes = pyplot.subplots(len(fields), len(problems), figsize=size, squeeze=False, layout="constrained")
    for line, (field, label) in zip(axes, fields.items(), strict=True):
        for panel, problem in zip(line, problems, strict=True):
            points = [row for row in timed if row.problem == problem and getattr(row, field) is not None]
            for rule, own in _rules(points).items():
                places = [(row.ratio_to_compiled, getattr(row, field)) for row in own]
                panel.plot(*zip(*places, strict=True), linewidth=0, **styles[rule])
                named = {eps: place for row, place in zip(own, places, strict=True) if (eps := filter_eps(row))}
                if named:
                    panel.plot(*zip(*named.values(), strict=True), linewidth=1, color=styles[rule]["color"])
                for eps, place in named.items():
                    panel.annotate(power(eps), place, xytext=(4, 3), textcoords="offset points", fontsize=7)
            panel.axvline(1, color="0.6", linewidth=1, zorder=1)
            panel.set(yscale="log", title=f"{_wrapped(problem[0])}\n{problem[3]} logits, {problem[2]} gradients")
            panel.set_xlabel("forward + backward time / torch.compile's")
            panel.grid(which="major", color="0.92")
        line[0].set_ylabel(f"{label}, relative to fp64")
    _legend(figure, styles, title)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _wrapped(shape: str) -> str:
    """A shape's name, which may be that of a run, in lines no wider than a panel."""
    return textwrap.fill(shape, 40)


def _rules(rows: list[Row]) -> dict[str, list[Row]]:
    """Rows by backend without its threshold, those of a rule in the order of their thresholds."""
    rules: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: -(filter_eps(row) or 0)):
        rules.setdefault(" ".join(word for word in row.label.split() if "filter_eps=" not in word), []).append(row)
    return rules


def power(value: float) -> str:
    """2^k where that is exact, else the number."""
    exponent = math.log2(value)
    return f"2^{exponent:g}" if exponent.is_integer() else f"{value:g}"


def _plot_sweep(rows: list[Row], axis: str, path: Path, title: str) -> None:
    """Time relative to torch.compile, and extra memory, along one dimension: a column per kind of problem."""
    pyplot = _pyplot()
    panels, styles = _panels(rows), _styles(rows)
    size = (max(7.0, 5.5 * len(panels)), 8.5)
    figure, axes = pyplot.subplots(2, len(panels), figsize=size, squeeze=False, sharex=True, layout="constrained")
    first = rows[0]
    fixed = ", ".join(f"{name.upper()} = {getattr(first, name):,}" for name in _AXES if name != axis)
    for (upper, lower), ((gradients, logits), own) in zip(axes.T, panels.items(), strict=True):
        for panel, field in ((upper, "ratio_to_compiled"), (lower, "extra_mib")):
            for label, points in _series(own, axis, field).items():
                if label in styles:
                    panel.plot(*zip(*points, strict=True), linewidth=1.3, **styles[label])
            panel.set(xscale="log", yscale="log")
            panel.grid(which="major", color="0.92")
        sizes = sorted({getattr(row, axis) for row in own})
        lower.set_xticks(sizes, [f"{s // 1024}K" if s % 1024 == 0 else f"{s:,}" for s in sizes], rotation=45)
        lower.set_xticks([], minor=True)
        upper.set_title(f"{fixed}; {logits} logits, {gradients} gradients")
        _plain_ticks(upper, [row.ratio_to_compiled for row in own])
        lower.set_xlabel(_AXES[axis])
        lower.yaxis.set_major_formatter("{x:,.0f}")
        if not _series(own, axis, "extra_mib"):
            lower.set_yticks([])
            lower.text(0.5, 0.5, "not measured on a CPU", ha="center", transform=lower.transAxes)
    axes[0][0].set_ylabel("forward + backward time / torch.compile's")
    axes[1][0].set_ylabel("memory beyond inputs and gradients, MiB")
    _legend(figure, styles, title)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _plain_ticks(panel: Any, ratios: list[float | None]) -> None:
    """Ratios on a logarithmic axis, ticked with plain numbers."""
    low, high = (bound([1.0, *(ratio for ratio in ratios if ratio is not None)]) for bound in (min, max))
    ticks = [
        tick for tick in (0.25, 0.5, 0.7, 0.85, 1, 1.25, 1.5, 2, 3, 5, 10, 20, 50) if low / 1.5 < tick < high * 1.5
    ]
    panel.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.set_yticks([], minor=True)


def _legend(figure: Any, styles: dict[str, dict[str, Any]], title: str) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], linestyle="none", label=label, **style) for label, style in styles.items()]
    columns = max(1, min(len(handles), int(figure.get_figwidth() / 2.8)))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns)
    figure.suptitle(f"Loss layer alone: {title}")
