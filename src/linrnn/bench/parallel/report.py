"""The page on several GPUs against one: measured tables, then the same rows beside the formulas' forecast."""

from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from linrnn.bench.parallel.forecast import GB, Rates, measured_rates, sending_ms, step_forecasts
from linrnn.bench.parallel.plot import weak_scaling
from linrnn.bench.parallel.rows import CollectiveRow, LossRow, Measured, StepRow, read
from linrnn.core.files import write_text
from linrnn.core.machine import GIB, slug
from linrnn.core.plot_style import save
from linrnn.core.tables import Table, show
from linrnn.costs.utilisation import mfu_of_summary
from linrnn.runs.environment import commit_in_words

Row = TypeVar("Row", CollectiveRow, LossRow, StepRow)
WORDS = ("model", "parallel", "scaling", "operation", "N × D × V", "column", "meaning")
REPEATS = (
    "A row comes from one run. An efficiency with a 90 % interval has n repeats: each copies the model, on one GPU "
    "and then spread, one right after the other. All other rows are measured once (n = 1). Rows of one setting from "
    "several runs show how far runs differ. A time is the median over the rounds of its run, of the slowest rank. The "
    "column *run* is the run's number in the list above."
)


def write_pages(directory: Path) -> list[Path]:
    """Write `<directory>/<device>.md` and its picture from all runs of that device."""
    runs = read(directory)
    paths = []
    for device in sorted({run.device for run in runs}):
        own = [run for run in runs if run.device == device]
        paths.append(directory / f"{slug(device)}.md")
        write_text(paths[-1], markdown(own))
        if (figure := weak_scaling(own)) is not None:
            paths.append(save(figure, directory / f"{slug(device)}.png"))
    return paths


def two_digits(value: float | None) -> str:
    """A positive number with two significant digits, never as a power of ten; `-` where there is none."""
    if value is None:
        return "-"
    rounded = float(f"{value:.2g}")
    return f"{rounded:.0f}" if rounded >= 10 else f"{rounded:#.2g}" if rounded >= 1e-4 else "0"


def markdown(runs: list[Measured]) -> str:
    """The tables of all runs on one kind of device."""
    lines = [f"# Several GPUs against one: {runs[0].device}", ""]
    for number, run in enumerate(runs, start=1):
        packages, commit = run.environment["packages"], commit_in_words(run.environment["git"], digits=12)
        lines.append(
            f"{number}. `{run.command}`; commit {commit}, torch {packages['torch']}, Triton {packages['triton']}"
        )
    lines += ["", REPEATS]
    if collectives := _numbered([run.collectives for run in runs]):
        lines += _collectives(collectives)
    if losses := _numbered([run.loss for run in runs]):
        lines += _losses(losses)
    if steps := _numbered([run.steps for run in runs]):
        lines += _steps(steps, runs[0].device)
        if any(row.scaling == "weak" and row.efficiency is not None for row, _ in steps):
            lines += ["", f"![Weak scaling of training steps]({slug(runs[0].device)}.png)"]
    if rates := measured_rates(runs):
        lines += _step_forecasts(runs, rates)
        lines += _loss_forecasts(losses, rates)
    return "\n".join(lines) + "\n"


def _numbered(rows_of_runs: list[list[Row]]) -> list[tuple[Row, int]]:
    """Each row with the number of its run."""
    return [(row, number) for number, rows in enumerate(rows_of_runs, start=1) for row in rows]


def _collectives(rows: list[tuple[CollectiveRow, int]]) -> list[str]:
    meanings = (
        ("MiB", "size of the whole tensor, fp32; 0: one number a rank"),
        ("ms", "time of one collective with nothing beside it"),
        ("GB/s", "what a rank sends in a ring: (W − 1) / W of the whole tensor, for an all-reduce twice that"),
    )
    cells = [
        (row.operation, row.ranks, row.mib, two_digits(row.ms), two_digits(row.gb_per_second), number)
        for row, number in rows
    ]
    return _section("Collectives", meanings, ("operation", "GPUs", "MiB", "ms", "GB/s", "run"), cells)


def _losses(rows: list[tuple[LossRow, int]]) -> list[str]:
    meanings = (
        ("ms", "forward and backward pass of `cce_kahan`, bf16, peaked logits; the ranks share tokens and head"),
        ("ms on one", "one GPU does everything"),
        ("ms of a shard", "one GPU has all tokens and one rank's rows of the head"),
        ("efficiency", "time on one GPU / (GPUs × time)"),
        ("MiB", "memory beyond inputs and gradients"),
        ("dE, dC", "relative error of the gradients against one GPU's"),
    )
    columns = (
        *("N × D × V", "GPUs", "ms", "ms on one", "ms of a shard", "efficiency", "MiB a rank", "MiB on one"),
        *("MiB sent", "dE", "dC", "run"),
    )
    cells = [
        (
            *(_shape(row), row.ranks, f"{row.ms:.1f}", f"{row.ms_alone:.1f}", f"{row.ms_shard:.1f}"),
            *(show(row.efficiency, ".2f"), show(row.mib, ".0f"), show(row.mib_alone, ".0f")),
            *(show(row.sent_mib, ".0f"), f"{row.error_hidden:.1e}", f"{row.error_weight:.1e}", number),
        )
        for row, number in rows
    ]
    return _section("The vocabulary-parallel loss", meanings, columns, cells)


def _steps(rows: list[tuple[StepRow, int]], device: str) -> list[str]:
    meanings = (
        ("scaling", "`alone`: one GPU; `weak`: each rank keeps its sequences; `strong`: the ranks share them"),
        ("B of a rank", "sequences of a rank in one step"),
        ("ms", "one step with `loss=cce_kahan` and AdamW"),
        ("host ms", "in which the host issues a step; if that is nearly the whole step, the GPU waits for the host"),
        ("efficiency", "tokens/s against as many GPUs alone, each with the B of the row `alone`"),
        ("MFU", "share of the GPU's peak FLOPs; *by 6N* counts six FLOPs a parameter and token"),
        ("GiB", "peak memory of a rank; with ≥ the row lacks gradients of DDP's row before, which NCCL still held"),
        ("GiB sent", "what a rank sends in a step, from formulas"),
    )
    columns = (
        *("model", "parallel", "scaling", "GPUs", "B of a rank", "ms", "host ms", "tokens/s", "efficiency"),
        *("MFU", "by 6N", "GiB", "GiB sent", "run"),
    )
    cells = [
        (
            *(f"{row.model} {row.size}", row.method, row.scaling, row.ranks, row.sequences_of_rank),
            *(f"{row.step_ms:.0f}", show(row.host_ms, ".0f")),
            *(f"{float(f'{row.tokens_per_second:.3g}'):,.0f}", row.efficiency_in_words),
            *(two_digits(share) for share in _mfu_of_rank(row, device).values()),
            *(row.memory, show(row.sent_gib, ".2f"), number),
        )
        for row, number in rows
    ]
    return _section("Training steps", meanings, columns, cells)


def _step_forecasts(runs: list[Measured], rates: Rates) -> list[str]:
    meanings = (
        (
            "ms forecast",
            "the step of one GPU in the same run, in proportion to B, plus the communication that nothing hides",
        ),
        (
            "of it exposed",
            f"that communication, at the measured rates: {rates.link / GB:.0f} GB/s of a GPU, "
            f"{rates.call * 1e6:.0f} µs a collective, {rates.hop * 1e6:.1f} µs a hop",
        ),
        ("GiB forecast", "a rank's memory with today's kernels, from formulas alone"),
        ("GiB measured", "as above"),
    )
    columns = (
        *("model", "parallel", "scaling", "GPUs", "B of a rank", "ms forecast", "of it exposed", "ms measured"),
        *("measured / forecast", "GiB forecast", "GiB measured", "run"),
    )
    cells = [
        (
            *(f"{step.row.model} {step.row.size}", step.row.method, step.row.scaling, step.row.ranks),
            *(step.row.sequences_of_rank, f"{step.ms:.0f}", f"{step.exposed_ms:.1f}", f"{step.row.step_ms:.0f}"),
            *(f"{step.row.step_ms / step.ms:.2f}", show(step.memory.peak, ".1f", GIB), step.row.memory, number),
        )
        for number, run in enumerate(runs, start=1)
        for step in step_forecasts(run, rates)
    ]
    return _section("Training steps, forecast and measured", meanings, columns, cells) if cells else []


def _loss_forecasts(rows: list[tuple[LossRow, int]], rates: Rates) -> list[str]:
    meanings = (
        ("ms of a shard", "a rank's share of the work on one GPU, measured"),
        ("ms sending", "what a rank sends, at the measured rates"),
        ("ms forecast", "both, one after the other, as if nothing were hidden"),
    )
    columns = ("N × D × V", "GPUs", "ms of a shard", "ms sending", "ms forecast", "ms measured", "measured / forecast")
    cells = []
    for row, number in rows:
        if (sending := sending_ms(row, rates)) is not None:
            total = row.ms_shard + sending
            times = (f"{row.ms_shard:.1f}", f"{sending:.2f}", f"{total:.1f}", f"{row.ms:.1f}")
            cells.append((_shape(row), row.ranks, *times, f"{row.ms / total:.2f}", number))
    title = "The vocabulary-parallel loss, forecast and measured"
    return _section(title, meanings, (*columns, "run"), cells) if cells else []


def _shape(row: LossRow) -> str:
    return f"{row.tokens} × {row.width} × {row.vocabulary}"


def _mfu_of_rank(row: StepRow, device: str) -> dict[str, float | None]:
    """`mfu` and `mfu_6n` of each rank's GPU."""
    speed = row.sequences_of_rank * row.seq_len / row.step_ms * 1e3
    return mfu_of_summary({**vars(row), "device": device, "tokens_per_second": speed, "world_size": 1})


def _section(
    title: str, meanings: tuple[tuple[str, str], ...], columns: tuple[str, ...], rows: Iterable[tuple[object, ...]]
) -> list[str]:
    """A heading, what the columns mean, and the table."""
    explained = Table(("column", "meaning"), meanings, WORDS).markdown()
    return ["", f"## {title}", "", *explained, "", *Table(columns, list(rows), WORDS).markdown()]
