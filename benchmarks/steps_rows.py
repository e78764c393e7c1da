"""Rows of benchmarks/steps.py, one line of JSON each in rows.jsonl, their ratios, and their page."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks import common
from benchmarks.common import Column, Point, grouped, interval, section
from linrnn.core.plot_style import save
from linrnn.core.tables import show
from linrnn.runs.intervals import Estimate, estimate

BASELINE = "compiled"
EAGER = "standard"  # the study's second baseline
AGAIN = f"{BASELINE}, again"  # the baseline once more, as a backend of its own: its ratio shows the noise
START = "init_from"  # the key of a line that names the weights of another run
WITHOUT_EFFECT = ("parallel=none", "trainer.accumulation_steps=1")  # words of a line


@dataclass
class Row:
    """Training steps of one model with one loss.

    Times are in ms. Lists hold one entry for each round: the mean over the `steps` consecutive steps of a turn.
    """

    line: str  # of the configuration: overrides of train.py
    model: str
    size: str
    parameters: int
    batch: int
    seq: int
    d: int  # hidden dimensions
    v: int  # vocabulary entries
    precision: str
    loss: str  # as in the configuration, or AGAIN
    run: str  # id in runs.jsonl
    steps: int  # of a turn
    weights: str | None = None  # directory of the checkpoint that the steps start from; null: random weights
    text: str | None = None  # fingerprint of the prepared data behind the batch; null: random tokens
    status: str = "ok"  # ok | unsupported | out_of_memory | failed
    reason: str = ""
    wall_ms: list[float] = field(default_factory=list)  # from an idle device to an idle device
    device_ms: list[float] = field(default_factory=list)  # between CUDA events; empty on a CPU
    host_ms: list[float] = field(default_factory=list)  # until the host has given the device all work of the turn
    sm_mhz: list[float] = field(default_factory=list)  # the GPU's clock, read in untimed steps; empty on a CPU
    ratio: float | None = None  # median of the rounds' ratios of wall_ms to BASELINE's, for equally many tokens
    ratio_low: float | None = None  # Student's interval of 90 %, of the ratios' logarithms
    ratio_high: float | None = None
    allocations: int | None = None  # cudaMalloc calls within the timed steps; null on a CPU
    peak_gib: float | None = None  # the most that the process had allocated during a step; null on a CPU
    loss_forward_ms: float | None = None  # the loss layer's passes, medians over own `steps`; null in CUDA graphs
    loss_backward_ms: float | None = None
    loss_nats: float | None = None  # with the weights that all losses begin with
    gradient_norm: float | None = None  # likewise, all parameters, before clipping
    kernel_choices: str | None = None  # fingerprint of those of the model's kernels; null where none has any
    first_s: float | None = None  # of the first passes, in which the loss's kernels are compiled and tuned

    @property
    def rounds(self) -> int:
        return len(self.wall_ms)

    @property
    def step_ms(self) -> float | None:
        """The median over the rounds."""
        return median(self.wall_ms) if self.wall_ms else None

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.step_ms is None else self.batch * self.seq / self.step_ms * 1e3

    @property
    def loss_layer_ms(self) -> float | None:
        """Both passes of the loss layer."""
        if self.loss_forward_ms is None or self.loss_backward_ms is None:
            return None
        return self.loss_forward_ms + self.loss_backward_ms

    @property
    def loss_layer_share(self) -> float | None:
        """Of the step's time."""
        if self.loss_layer_ms is None or self.step_ms is None:
            return None
        return self.loss_layer_ms / self.step_ms


def ratio_of(row: Row, base: Row | None) -> Estimate | None:
    """Time divided by the base's in the same round, for equally many tokens; None without rounds of one process."""
    if base is None or row.run != base.run or not row.status == base.status == "ok" or not row.rounds:
        return None
    more = row.batch / base.batch
    ratios = [ms / of_base / more for ms, of_base in zip(row.wall_ms, base.wall_ms, strict=True)]
    return estimate(ratios, ratios=True)


def read_rows(directory: Path) -> list[Row]:
    """The last row of every model line and loss, in the order of their first rows.

    Raises:
        DataError: nothing was measured, or the file is damaged.
    """
    return common.last_rows(directory, Row, key=lambda row: (row.line, row.loss))


# --------------------------------------------------------------------------------------------------------- titles
def title_of(line: str, model: str, size: str, batch: int, seq: int, v: int) -> str:
    """A line as a heading. Of the starting weights it has the last folder's name, of the data nothing."""
    of_label = ("model", "model.config", "model.shared_projection_rank")
    told = (*of_label, "size", "size.vocab_size", "trainer.batch_size", "trainer.seq_len")
    rest = [
        f"{START}={Path(word.split('=', 1)[1]).name}" if key_of(word) == START else word
        for word in line.split()
        if key_of(word) not in told and key_of(word).split(".")[0] != "data" and word not in WITHOUT_EFFECT
    ]
    head = f"{model} {size}, {batch} x {seq:,} tokens, V = {v:,}"
    return ", ".join([head, *(word.removeprefix("trainer.") for word in rest)])


def titles_of(rows: Sequence[Row]) -> dict[str, str]:
    """The lines of these rows as headings. Lines that would share a heading also have the words that tell them apart.

    Such lines differ in their data, say.
    """
    first = {row.line: row for row in reversed(rows)}  # later rows of a line may have batches of their own
    titles = {
        line: title_of(line, row.model, row.size, row.batch, row.seq, row.v) for line, row in reversed(first.items())
    }
    alike: dict[str, list[list[str]]] = {}
    for line, title in titles.items():
        alike.setdefault(title, []).append(line.split())
    return {
        line: ", ".join([title, *(word for word in line.split() if not all(word in words for words in alike[title]))])
        for line, title in titles.items()
    }


def key_of(word: str) -> str:
    return word.split("=")[0].lstrip("+~")


# ----------------------------------------------------------------------------------------------------------- page
def _interval(found: Row | Estimate) -> str:
    low, high = (found.low, found.high) if isinstance(found, Estimate) else (found.ratio_low, found.ratio_high)
    return interval(low, high, ".4f")


def _to_eager(row: Row, rows: Sequence[Row]) -> str:
    """The ratio to the eager loss of the same line, with its interval if it says something."""
    eager = next((one for one in rows if one.line == row.line and one.loss == EAGER), None)
    if row.loss == EAGER or (found := ratio_of(row, eager)) is None:
        return "-"
    ends = "" if found.low is None else f" ({_interval(found)})"
    return f"{found.value:.4f}{ends}"


def _median(name: str) -> Callable[[Row], str]:
    return lambda row: show(median(values) if (values := getattr(row, name)) else None, ".1f")


def columns_of(rows: Sequence[Row]) -> list[Column]:
    """The columns of the tables of these rows."""
    again, fair = f"`{AGAIN}` is the same loss, built a second time: its ratio shows the noise", "equally many tokens"
    columns = [
        Column("loss", lambda row: f"`{row.loss}`", again),
        Column("n", "rounds:d", "rounds, each with a turn of every loss; times and ratios are medians over them"),
        Column("step, ms", "step_ms:.1f", "of the whole step, by the wall clock, from an idle to an idle device"),
        Column(f"/ {BASELINE}", "ratio:.4f", f"time / `{BASELINE}`'s in the same round, for {fair}"),
        Column("90 %", lambda row: _interval(row) if _drawn(row) else "-", "Student's interval of that ratio"),
        Column(f"/ {EAGER}, 90 %", lambda row: _to_eager(row, rows), "the same for eager cross-entropy"),
        Column("tokens/s", "tokens_per_second:,.0f"),
        Column("device, ms", _median("device_ms"), "the same steps between two CUDA events"),
        Column("host, ms", _median("host_ms"), "until the device has all work; near *step, ms* the host may decide"),
        Column("loss layer, ms", "loss_layer_ms:.1f", "both passes, in steps of their own; - in a CUDA graph"),
        Column("share", "loss_layer_share:.1%", "of the loss layer, of the step"),
        Column("peak, GiB", "peak_gib:.2f", "the most that the process had allocated during a step"),
        Column("loss, nats", "loss_nats:.5f", "before the first step: all losses have the same weights"),
        Column("gradient's norm", "gradient_norm:.5g", "likewise"),
    ]
    if any(len({row.batch for row in own}) > 1 for own in grouped(rows, key=lambda row: row.line)):
        columns.append(Column("sequences", "batch:d", f"where they differ, ratios are for {fair}"))
    return columns


def write_report(directory: Path) -> list[Path]:
    """Write steps.md, and steps.png where there are ratios; returns the paths of page and PNG.

    Raises:
        DataError: nothing was measured, or a file is damaged.
    """
    rows = read_rows(directory)
    titles, columns = titles_of(rows), columns_of(rows)
    lines = [f"# Training steps, the loss alone exchanged: {directory.name}", ""]
    pictures = []
    if any(_drawn(row) for row in rows):
        pictures.append(save(picture(rows), directory / "steps.png"))
        lines += ["![Time of a step relative to torch.compile](steps.png)", ""]
    lines += [
        "One model and one optimizer serve all losses of a table. Weights and tokens are random, unless the line has "
        "`init_from` or `data`. In a round every loss has a turn of a few consecutive steps, in shuffled order. "
        "`rows.jsonl` holds the times of every round.", "",
        *common.meanings(columns), "",
    ]  # fmt: skip
    ids = [run["id"] for run in common.runs_of(directory, [row.run for row in rows])]
    for own in grouped(rows, key=lambda row: row.line):
        lines += section(titles[own[0].line], _about(own, ids), columns, own, *_remarks(own))
    return [common.write_page(directory / "steps.md", lines, directory, ids), *pictures]


def _about(rows: Sequence[Row], ids: Sequence[str]) -> str:
    """The line's overrides, the model's sizes, what weights and batch come from, and the runs that measured it."""
    first, told = rows[0], []
    if built := next((row for row in rows if row.parameters), None):
        sizes = f"{built.parameters / 1e6:,.1f} M parameters, {built.d:,} hidden dimensions"
        told.append(f"{sizes}, {built.precision}")
    told += [f"weights `{first.weights}`"] if first.weights else []
    told += [f"text of fingerprint `{first.text[:8]}`"] if first.text else []
    calls = grouped(rows, key=lambda row: (row.run, row.steps))
    for own in calls:
        number = f"run {ids.index(own[0].run) + 1}" if own[0].run in ids else "a run that is not listed"
        which = f" ({' '.join(f'`{row.loss}`' for row in own)})" if len(calls) > 1 else ""
        told.append(f"{number}, {own[0].steps} steps a turn{which}")
    return f"`{first.line}`: {'; '.join(told)}."


def _remarks(rows: Sequence[Row]) -> list[str]:
    found = [
        f"* `{row.loss}`: the allocator called cudaMalloc {row.allocations} times within timed steps."
        for row in rows
        if row.allocations
    ]
    if clocks := [mhz for row in rows for mhz in row.sm_mhz]:
        found.append(f"* The GPU's clock was {min(clocks):,.0f} to {max(clocks):,.0f} MHz, read in untimed steps.")
    return found


def _drawn(row: Row) -> bool:
    """Whether a row has an interval that says something."""
    return row.ratio is not None and row.ratio_low is not None and row.loss != BASELINE


def picture(rows: Sequence[Row]) -> object:
    """Ratio of a step's time to the baseline's, with intervals: a line for each loss of each model line."""
    titles, lines, groups = titles_of(rows), grouped(rows, key=lambda row: row.line), {}
    several = any(len({row.batch for row in own}) > 1 for own in lines)
    for own in lines:
        shown = len({row.batch for row in own}) > 1
        points = [
            Point(
                f"{row.loss}, {row.batch} x {row.seq:,}" if shown else row.loss,
                row.ratio, row.ratio_low, row.ratio_high, common.time_and_memory(row.step_ms, row.peak_gib),
            )
            for row in own
            if _drawn(row) and row.ratio is not None
        ]  # fmt: skip
        if points:
            groups[titles[own[0].line]] = points
    what = "time for equally many tokens" if several else "step, time"
    axis = f"{what} / {BASELINE} in the same round (better: left); bars: 90 % intervals"
    return common.forest(groups, "Training steps, the loss alone exchanged", axis)
