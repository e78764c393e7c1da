"""The page of the benchmark of steps: a table for each model line, and a plot of all ratios."""

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from linrnn.bench.records import grouped, read_runs, runs_section
from linrnn.bench.steps.lines import titles_of
from linrnn.bench.steps.rows import AGAIN, BASELINE, EAGER, Row, ratio_of, read_rows
from linrnn.core.files import write_text
from linrnn.core.plot_style import GREY, WIDTH, looks, save, subplots
from linrnn.core.tables import Table, show

# Cells of a row, beside the eager loss's row of the same line.
_COLUMNS: dict[str, Callable[[Row, Row | None], str]] = {
    "loss": lambda row, _: f"`{row.loss}`",
    "n": lambda row, _: str(row.rounds),
    "step, ms": lambda row, _: show(row.step_ms, ".1f"),
    f"/ {BASELINE}": lambda row, _: show(row.ratio, ".4f"),
    "90 %": lambda row, _: f"{row.ratio_low:.4f}-{row.ratio_high:.4f}" if _drawn(row) else "-",
    f"/ {EAGER}, 90 %": lambda row, eager: _to_eager(row, eager),
    "tokens/s": lambda row, _: show(row.tokens_per_second, ",.0f"),
    "device, ms": lambda row, _: show(median(row.device_ms) if row.device_ms else None, ".1f"),
    "host, ms": lambda row, _: show(median(row.host_ms) if row.host_ms else None, ".1f"),
    "loss layer, ms": lambda row, _: show(row.loss_layer_ms, ".1f"),
    "share": lambda row, _: "-" if row.loss_layer_share is None else f"{row.loss_layer_share:.1%}".replace("%", " %"),
    "peak, GiB": lambda row, _: show(row.peak_gib, ".2f"),
    "loss, nats": lambda row, _: show(row.loss_nats, ".5f"),
    "gradient's norm": lambda row, _: show(row.gradient_norm, ".5g"),
}
_MEANINGS = (
    (f"`{AGAIN}`", "the same loss, built a second time: its ratio shows the noise"),
    ("n", "rounds, each with a turn of every loss; times and ratios are medians over them"),
    ("step, ms", "forward, loss, backward, clipping and optimizer, by the wall clock, from an idle to an idle device"),
    (f"/ {BASELINE}", f"time divided by that of `{BASELINE}` in the same round"),
    ("90 %", "Student's interval of that ratio, as in the study's verdicts; it holds the noise within one process"),
    (f"/ {EAGER}, 90 %", f"the same for `{EAGER}`: eager cross-entropy"),
    ("device, ms", "the same steps between two CUDA events"),
    ("host, ms", "until the host had given the device all work of the step; close to *step, ms* the host may decide"),
    (
        "loss layer, ms; share",
        "both passes of the loss layer, in steps of their own, and their share of the step; - in a CUDA graph",
    ),
    ("peak, GiB", "the most that the process had allocated during a step"),
    ("loss, gradient's norm", "before the first step of the optimizer: all losses have the same weights"),
)


def write_report(directory: Path) -> list[Path]:
    """Write steps.md, and steps.png where there are ratios; returns the paths of page and PNG.

    Raises:
        DataError: nothing was measured, or a file is damaged.
    """
    rows, paths = read_rows(directory), [directory / "steps.md"]
    if any(_drawn(row) for row in rows):
        paths.append(save(plot(rows), directory / "steps.png"))
    runs = read_runs(directory)
    ids = sorted({row.run for row in rows if row.run in runs})
    text = markdown(rows, directory.name, ids, pictured=len(paths) > 1)
    write_text(paths[0], text + "\n".join(runs_section([runs[run] for run in ids])))
    return paths


def markdown(rows: list[Row], device: str, runs: list[str], pictured: bool = False) -> str:
    """The page without its list of runs.

    Args:
        device: its directory's name.
        runs: the ids of the list, in its order.
        pictured: whether there is a plot.
    """
    lines = [f"# Training steps, the loss alone exchanged: {device}", ""]
    if pictured:
        lines += ["![Time of a step relative to torch.compile](steps.png)", ""]
    lines += [
        "One model and one optimizer serve all losses of a table. Weights and tokens are random, unless the line has "
        "`init_from` or `data`. In a round every loss has a turn of a few consecutive steps, in shuffled order. "
        "`rows.jsonl` holds the times of every round.", "",
        *Table(("name", "meaning"), _MEANINGS, words=("name", "meaning")).markdown(), "",
    ]  # fmt: skip
    titles = titles_of(rows)
    for own in grouped(rows, key=lambda row: row.line):
        first = own[0]
        lines += [
            f"## {titles[first.line]}", "",
            f"`{first.line}`: {_sizes(own)}{_start(first)}{'; '.join(_turns(own, runs))}.", "",
        ]  # fmt: skip
        eager = next((row for row in own if row.loss == EAGER), None)
        columns = _COLUMNS if len({row.batch for row in own}) == 1 else {**_COLUMNS, "sequences": _sequences}
        cells = [[cell(row, eager) for cell in columns.values()] for row in own if row.status == "ok"]
        if cells:
            lines += [*Table(list(columns), cells, words=("loss",)).markdown(), ""]
        if columns is not _COLUMNS:
            lines += ["The losses have batches of their own. Ratios are those of the time for equally many tokens.", ""]
        remarks = [f"* `{row.loss}`: {row.status}. {row.reason}" for row in own if row.status != "ok"]
        remarks += [
            f"* `{row.loss}`: the allocator called cudaMalloc {row.allocations} times within timed steps."
            for row in own
            if row.allocations
        ]
        if clocks := [mhz for row in own for mhz in row.sm_mhz]:
            remarks.append(
                f"* The GPU's clock was {min(clocks):,.0f} to {max(clocks):,.0f} MHz, read in untimed steps."
            )
        lines += [*remarks, *([""] if remarks else [])]
    return "\n".join(lines) + "\n"


def _sequences(row: Row, _: Row | None) -> str:
    return f"{row.batch}"


def _to_eager(row: Row, eager: Row | None) -> str:
    """The ratio to the eager loss, with its interval if it says something."""
    if row.loss == EAGER or (found := ratio_of(row, eager)) is None:
        return "-"
    interval = "" if found.low is None else f" ({found.low:.4f}-{found.high:.4f})"
    return f"{found.value:.4f}{interval}"


def _sizes(rows: list[Row]) -> str:
    """Of the model; empty if it could not be built."""
    built = next((row for row in rows if row.parameters), None)
    if built is None:
        return ""
    return f"{built.parameters / 1e6:,.1f} M parameters, {built.d:,} hidden dimensions, {built.precision}; "


def _start(row: Row) -> str:
    """What weights and batch come from; empty if both are random, or were not recorded."""
    named = [f"weights `{row.weights}`"] if row.weights else []
    named += [f"text of fingerprint `{row.text[:8]}`"] if row.text else []
    return "".join(f"{name}; " for name in named)


def _turns(rows: list[Row], runs: list[str]) -> list[str]:
    """Which runs of the list measured the rows, and the steps of a turn. Times of different runs cannot be compared."""
    found: dict[tuple[str, int], list[str]] = {}
    for row in rows:
        found.setdefault((row.run, row.steps), []).append(f"`{row.loss}`")
    texts = []
    for (run, steps), losses in found.items():
        number = f"run {runs.index(run) + 1}" if run in runs else "a run that is not listed"
        texts.append(f"{number}, {steps} steps a turn" + (f" ({' '.join(losses)})" if len(found) > 1 else ""))
    return texts


def _drawn(row: Row) -> bool:
    """Whether a row has an interval that says something."""
    return row.ratio is not None and row.ratio_low is not None and row.loss != BASELINE


def plot(rows: list[Row]) -> Any:
    """Ratio of a step's time to the baseline's, with intervals: a row for each loss of each model line."""
    lines = grouped(rows, key=lambda row: row.line)
    groups = [own for line in lines if (own := [row for row in line if _drawn(row)])]
    found = looks(label for own in groups for row in own for label in (BASELINE, row.loss.replace(",", "")))
    height = 1.1 + sum(0.34 + 0.26 * len(own) for own in groups)
    figure, panel = subplots(figsize=(WIDTH, height))
    places: list[float] = []
    names: list[str] = []
    titles = titles_of(rows)
    batches = {line[0].line: {row.batch for row in line} for line in lines}
    y = 0.0
    for own in groups:
        y -= 1.3
        panel.text(0, y, titles[own[0].line], transform=panel.get_yaxis_transform(), va="center", weight="bold", size=9)
        for row in own:
            y -= 1
            look = found[row.loss.replace(",", "")]
            panel.plot([row.ratio_low, row.ratio_high], [y, y], color=look.colour, linewidth=1.5)
            panel.plot([row.ratio], [y], **look.point)
            places.append(y)
            names.append(row.loss if len(batches[row.line]) == 1 else f"{row.loss}, {row.batch} x {row.seq:,}")
            peak = "" if row.peak_gib is None else f", {row.peak_gib:.1f} GiB"
            panel.text(
                1.01, y, f"{row.step_ms:,.1f} ms{peak}", transform=panel.get_yaxis_transform(), va="center", size=8.5
            )
    panel.axvline(1, color=GREY, linewidth=0.8, zorder=1)
    panel.set_yticks(places, names)
    panel.set_ylim(y - 0.8, -0.4)
    panel.grid(axis="y", visible=False)
    panel.margins(x=0.08)
    what = "step, time" if all(len(own) == 1 for own in batches.values()) else "time for equally many tokens"
    panel.set_xlabel(f"{what} / {BASELINE} in the same round (better: left); bars: 90 % intervals")
    figure.suptitle("Training steps, the loss alone exchanged")
    figure.tight_layout()
    return figure
