"""The page of the benchmark of models: a table for each model, and a plot of time against memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from linrnn.bench.models.rows import Row, read_rows
from linrnn.bench.records import grouped, read_runs, runs_section
from linrnn.core.files import write_text
from linrnn.core.plot_style import GREY, WIDTH, in_words, legend_below, looks, save, subplots
from linrnn.core.tables import Table, show
from linrnn.losses.hugging_face import MEANINGS

_COLUMNS: dict[str, Callable[[Row], str]] = {
    "loss": lambda row: f"`{row.loss}`",
    "n": lambda row: str(row.rounds),
    "step, ms": lambda row: show(row.step_ms, ".1f"),
    "/ standard": lambda row: show(row.ratio, ".3f"),
    "95 %": lambda row: "-" if row.ratio_low is None else f"{row.ratio_low:.3f}-{row.ratio_high:.3f}",
    "tokens/s": lambda row: show(row.tokens_per_second, ",.0f"),
    "peak, GiB": lambda row: show(row.peak_gib, ".1f"),
    "loss, nats": lambda row: show(row.loss_nats, ".5f"),
    "loss err": lambda row: show(row.loss_err, ".1e"),
    "gradient's norm": lambda row: show(row.gradient_norm, ".4g"),
}
_MEANINGS = (
    *MEANINGS,
    ("n", "rounds; times and ratios are medians over them"),
    ("step, ms", "forward, backward and AdamW"),
    ("/ standard", "time divided by that of `standard` in the same round, with the 95 % bootstrap interval"),
    ("peak, GiB", "the most that the process had allocated during a step"),
    ("loss, gradient's norm", "before the first step of the optimizer: all losses have the same weights"),
    ("loss err", "relative to fp64 logits of the same hidden states"),
)


def write_report(directory: Path) -> list[Path]:
    """Write models.md, and models.png where memory was measured; returns their paths.

    Raises:
        DataError: nothing was measured, or a file is damaged.
    """
    rows, paths = read_rows(directory), [directory / "models.md"]
    if any(row.peak_gib is not None for row in rows):
        paths.append(save(plot(rows), directory / "models.png"))
    runs = read_runs(directory)
    origins = [runs[run] for run in sorted({row.run for row in rows}) if run in runs]
    text = markdown(rows, directory.name, pictured=len(paths) > 1) + "\n".join(runs_section(origins))
    write_text(paths[0], text)
    return paths


def markdown(rows: list[Row], device: str, pictured: bool = False) -> str:
    """The page without its list of runs."""
    lines = [f"# Training steps of Hugging Face models: {device}", ""]
    if pictured:
        lines += ["![Time against memory](models.png)", ""]
    lines += [
        "One model and one optimizer (AdamW) serve all losses of a table, so that the loss alone differs. Weights and "
        "tokens are random. A round runs one step with each loss, in shuffled order.", "",
        *Table(("name", "meaning"), _MEANINGS, words=("name", "meaning")).markdown(), "",
    ]  # fmt: skip
    for own in grouped(rows, key=lambda row: row.problem):
        first = own[0]
        checkpointed = "with" if first.checkpointing else "without"
        lines += [
            f"## {first.model}, {first.batch} x {first.seq} tokens", "",
            f"{first.parameters / 1e6:,.0f} M parameters, {first.d} hidden dimensions, {first.v:,} vocabulary entries, "
            f"{first.dtype}, {checkpointed} gradient checkpointing.", "",
        ]  # fmt: skip
        cells = [[cell(row) for cell in _COLUMNS.values()] for row in own if row.status == "ok"]
        lines += [*Table(list(_COLUMNS), cells, words=("loss",)).markdown(), ""]
        refused = [f"* `{row.loss}`: {row.status}. {row.reason}" for row in own if row.status != "ok"]
        lines += [*refused, *([""] if refused else [])]
    return "\n".join(lines) + "\n"


def plot(rows: list[Row]) -> Any:
    """Time of a step relative to `standard` against peak memory, a panel a model. Down and to the left is better."""
    drawn = [row for row in rows if row.ratio is not None and row.peak_gib is not None]
    groups = grouped(drawn, key=lambda row: row.problem)
    found = looks(row.loss for own in groups for row in own)
    figure, [panels] = subplots(1, len(groups), figsize=(WIDTH, 3.6), squeeze=False, sharey=True)
    for panel, own in zip(panels, groups, strict=True):
        for row in own:
            look = found[row.loss]
            panel.plot([row.peak_gib] * 2, [row.ratio_low, row.ratio_high], color=look.colour, linewidth=1.5)
            panel.plot([row.peak_gib], [row.ratio], **look.point)
        panel.axhline(1, color=GREY, linewidth=0.8, zorder=1)
        panel.set_xlim(left=0)
        panel.margins(x=0.1, y=0.15)
        panel.set(xlabel="peak memory, GiB", title=f"{own[0].model}\n{own[0].batch} x {own[0].seq} tokens")
    panels[0].set_ylabel("step, time / transformers' default")
    figure.suptitle("Training steps of Hugging Face models (better: down and left)")
    lines = {in_words(loss): panels[0].plot([], [], **look.point)[0] for loss, look in found.items()}
    legend_below(figure, lines, "Bars: 95 % intervals.")
    return figure
