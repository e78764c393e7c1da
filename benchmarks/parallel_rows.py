"""Rows of benchmarks/parallel.py, a JSON file for each run, and the page of all runs on one kind of GPU."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.common import Column, Point, forest, meanings, runs_section, table
from linrnn.core.errors import DataError
from linrnn.core.files import write_json, write_text
from linrnn.core.machine import slug
from linrnn.core.plot_style import save
from linrnn.core.tables import show
from linrnn.runs.intervals import Estimate, estimate

AnyRow = TypeVar("AnyRow")


@dataclass
class CollectiveRow:
    """A collective of NCCL (on a CPU: gloo) over all ranks, with nothing beside it.

    Attributes:
        mib: size of the whole tensor (fp32). A rank has all or a part of it. 0: one number a rank.
        ms: median of the slowest rank's times.
        gb_per_second: what a rank sends in a ring, divided by the time. Null where the time is latency alone.
    """

    operation: str
    ranks: int
    mib: int
    ms: float
    gb_per_second: float | None


@dataclass
class LossRow:
    """Forward and backward pass of a loss over N tokens, of all ranks together and of one GPU alone.

    Attributes:
        ms: the ranks together.
        ms_alone: one GPU that does everything.
        ms_shard: one GPU that does a rank's share alone: all tokens, a rank's rows of the head.
        mib, mib_alone: memory of a rank beyond inputs and gradients.
        sent_mib: what each rank sends, from formulas.
        efficiency: ms_alone / (ranks · ms).
        error_hidden, error_weight: relative errors of rank 0's gradients against one GPU's.
    """

    shape: str
    tokens: int
    width: int
    vocabulary: int
    ranks: int
    ms: float
    ms_alone: float
    ms_shard: float
    mib: float | None
    mib_alone: float | None
    sent_mib: float | None
    efficiency: float
    error_hidden: float
    error_weight: float


@dataclass
class StepRow:
    """Training steps of a model.

    Attributes:
        scaling: `alone` (each rank by itself), `weak` (each rank keeps its sequences) or `strong` (the ranks share
            the sequences).
        efficiency: tokens/s against that of as many GPUs alone, each with the sequences of `weak`; the median of
            `efficiencies`.
        gib: peak memory of the rank that holds most. Null on a CPU.
        sent_gib: what each rank sends in a step, from formulas.
        gib_is_own: whether `gib` counts all that the row held. Where it is false, FSDP's row comes after DDP's and
            lacks the gradients of DDP that NCCL still held.
        blocks_together, keep_gathered: those of `parallel`, if it shards the model.
        cuda_graph: the passes are a CUDA graph, as with trainer.cuda_graph=true.
        host_ms: time in which the slowest rank's host issues a step to a GPU that is idle before it: the median of
            `host_times_ms`, or the first repeat's in a committed row without that list.
        times_ms, host_times_ms: both times in each repeat. The median of the first is `step_ms`.
        efficiencies: in each repeat, against the GPUs alone in that repeat.
    """

    model: str
    size: str
    vocab_size: int
    precision: str
    parallel: str
    scaling: str
    ranks: int
    sequences_of_rank: int
    seq_len: int
    step_ms: float
    tokens_per_second: float
    efficiency: float | None
    gib: float | None
    sent_gib: float | None
    gib_is_own: bool = False  # the committed rows lack this key and the next ones
    blocks_together: int = 1
    keep_gathered: bool = False
    cuda_graph: bool = False
    host_ms: float | None = None
    times_ms: list[float] = field(default_factory=list)
    efficiencies: list[float] = field(default_factory=list)
    host_times_ms: list[float] = field(default_factory=list)

    def repeat(self, again: "StepRow", alone: "StepRow | None") -> None:
        """Take up another measurement of this row. `alone` is the one GPU's row, whose last time is that repeat's."""
        self.times_ms.append(again.step_ms)
        self.step_ms = statistics.median(self.times_ms)
        if again.host_ms is not None:
            self.host_times_ms.append(again.host_ms)
            self.host_ms = statistics.median(self.host_times_ms)
        self.tokens_per_second = again.tokens_per_second * again.step_ms / self.step_ms
        if alone is not None:
            # A step of one GPU alone has alone.sequences_of_rank; this row's ranks have their own number.
            self.efficiencies.append(
                alone.times_ms[-1] / again.step_ms * again.sequences_of_rank / alone.sequences_of_rank
            )
            self.efficiency = statistics.median(self.efficiencies)

    @property
    def interval(self) -> Estimate | None:
        """Of the efficiency, over the repeats; None with fewer than two."""
        return estimate(self.efficiencies, ratios=True) if len(self.efficiencies) > 1 else None

    @property
    def efficiency_in_words(self) -> str:
        """The efficiency; from two repeats on with its 90 % interval and their number."""
        if (found := self.interval) is None:
            return show(self.efficiency, ".2f")
        return f"{found.value:.3f} ({found.low:.3f} to {found.high:.3f}), n = {found.n}"

    @property
    def method(self) -> str:
        """`parallel`, how blocks are gathered if not one by one for each pass, and whether a CUDA graph is replayed."""
        together = f", {self.blocks_together} blocks together" if self.blocks_together > 1 else ""
        kept, graph = ", kept" if self.keep_gathered else "", ", CUDA graph" if self.cuda_graph else ""
        return self.parallel + together + kept + graph

    @property
    def memory(self) -> str:
        """GiB. A row of FSDP that lacks DDP's gradients shows a lower bound."""
        return ("≥ " if self.parallel == "fsdp" and not self.gib_is_own and self.gib else "") + show(self.gib, ".1f")


@dataclass
class Measured:
    """What one run has measured so far, on `ranks` GPUs of one kind."""

    command: str
    device: str
    ranks: int
    environment: dict[str, Any]
    collectives: list[CollectiveRow] = field(default_factory=list)
    loss: list[LossRow] = field(default_factory=list)
    steps: list[StepRow] = field(default_factory=list)


def write(measured: Measured, directory: Path, part: str | None) -> Path:
    """Write `<directory>/<device>-x<ranks>[-<part>].json`. The file is whole at any time."""
    directory.mkdir(parents=True, exist_ok=True)
    stem = f"{slug(measured.device)}-x{measured.ranks}" + (f"-{part}" if part else "")
    path = directory / f"{stem}.json"
    write_json(path, asdict(measured))
    return path


def read_rows(directory: Path) -> list[Measured]:
    """All runs in a directory, by device, ranks and name. Empty where the directory does not exist.

    Raises:
        DataError: no run has written one of the files.
    """
    found = []
    for path in sorted(directory.glob("*-x*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            for name, kind in (("collectives", CollectiveRow), ("loss", LossRow), ("steps", StepRow)):
                content[name] = [kind(**row) for row in content[name]]
            found.append(Measured(**content))
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(f"benchmarks/parallel.py has not written {path} ({error})", "remove it") from error
    return sorted(found, key=lambda measured: (measured.device, measured.ranks))


# ----------------------------------------------------------------------------------------------------------- page
def write_pages(directory: Path) -> list[Path]:
    """Write `<directory>/<device>.md` and its picture of the weak scaling from all runs of that device."""
    runs, paths = read_rows(directory), []
    for device in sorted({run.device for run in runs}):
        own = [run for run in runs if run.device == device]
        paths.append(directory / f"{slug(device)}.md")
        picture = weak_scaling(own)
        write_text(paths[-1], markdown(own, f"{slug(device)}.png" if picture else None))
        if picture:
            paths.append(save(picture, directory / f"{slug(device)}.png"))
    return paths


_COLLECTIVES = [
    Column("operation", "operation:", "alone on the links"),
    Column("GPUs", "ranks:d"),
    Column("MiB", "mib:d", "size of the whole tensor, fp32; 0: one number a rank"),
    Column("ms", "ms:.3g"),
    Column("GB/s", "gb_per_second:.3g", "sent in a ring: (W − 1) / W of the tensor, for an all-reduce twice that"),
]
_LOSSES = [
    Column("N × D × V", lambda row: f"{row.tokens} × {row.width} × {row.vocabulary}", "tokens and head are shared"),
    Column("GPUs", "ranks:d"),
    Column("ms", "ms:.1f", "forward and backward pass of `cce_kahan`, bf16, peaked logits"),
    Column("ms on one", "ms_alone:.1f", "one GPU does everything"),
    Column("ms of a shard", "ms_shard:.1f", "one GPU: all tokens and one rank's rows of the head"),
    Column("efficiency", "efficiency:.2f", "time on one GPU / (GPUs × time)"),
    Column("MiB a rank", "mib:.0f", "memory beyond inputs and gradients"),
    Column("MiB on one", "mib_alone:.0f"),
    Column("MiB sent", "sent_mib:.0f", "by a rank, from formulas"),
    Column("dE", "error_hidden:.1e", "relative error of the gradient against one GPU's"),
    Column("dC", "error_weight:.1e", "likewise"),
]
_STEPS = [
    Column("model", lambda row: f"{row.model} {row.size}", "trained with `loss=cce_kahan` and AdamW"),
    Column("parallel", "method:"),
    Column("scaling", "scaling:", "`weak`: each rank keeps its sequences; `strong`: the ranks share them"),
    Column("GPUs", "ranks:d"),
    Column("B of a rank", "sequences_of_rank:d", "sequences of a rank in one step"),
    Column("ms", "step_ms:.0f", "of a step, of the slowest rank"),
    Column("host ms", "host_ms:.0f", "in which the host issues a step; near *ms* the GPU waits for the host"),
    Column("tokens/s", "tokens_per_second:,.0f"),
    Column("efficiency", "efficiency_in_words:", "tokens/s against as many GPUs `alone`"),
    Column("GiB", "memory:", "peak of a rank; ≥: without gradients of DDP's row before, which NCCL still held"),
    Column("GiB sent", "sent_gib:.2f", "by a rank in a step, from formulas"),
]


def markdown(runs: Sequence[Measured], picture: str | None = None) -> str:
    """The tables of all runs on one kind of device. The last column is the number of the run."""
    lines = [f"# Several GPUs against one: {runs[0].device}", ""]
    lines += [f"![Weak scaling of training steps]({picture})", ""] if picture else []
    lines += [
        "A row comes from one run, whose number stands in the last column. An efficiency with a 90 % interval has n "
        "repeats: each copies the model, on one GPU and then spread, one right after the other. All other rows are "
        "measured once (n = 1). A time is the median over the rounds of its run, of the slowest rank.", "",
    ]  # fmt: skip
    lines += _section("Collectives", _COLLECTIVES, [run.collectives for run in runs])
    lines += _section("The vocabulary-parallel loss", _LOSSES, [run.loss for run in runs])
    lines += _section("Training steps", _STEPS, [run.steps for run in runs])
    listed = [
        {"command": run.command, "environment": {"gpus": [], "cpu": run.device} | run.environment} for run in runs
    ]
    return "\n".join([*lines, *runs_section(listed)])


def _section(title: str, columns: Sequence[Column], rows_of_runs: Sequence[Sequence[AnyRow]]) -> list[str]:
    """A heading, what the columns mean, and the table; nothing where no run has such rows."""
    numbers = {id(row): number for number, rows in enumerate(rows_of_runs, start=1) for row in rows}
    if not numbers:
        return []
    numbered = [*columns, Column("run", lambda row: numbers[id(row)])]
    rows = [row for rows in rows_of_runs for row in rows]
    return [f"## {title}", "", *meanings(columns), "", *table(numbered, rows), ""]


def weak_scaling(runs: Sequence[Measured]) -> Any:
    """Efficiency of every row of weak scaling, a heading for each model and batch; None if no run measured any."""
    groups: dict[str, list[Point]] = {}
    for row in sorted((row for run in runs for row in run.steps), key=lambda row: (row.method, row.ranks)):
        if row.scaling == "weak" and row.efficiency is not None:
            found = row.interval or Estimate(1, row.efficiency, None, None)
            heading = f"{row.model} {row.size}, {row.sequences_of_rank} sequences a rank"
            point = Point(f"{row.method} on {row.ranks} GPUs", row.efficiency, found.low, found.high, f"n = {found.n}")
            groups.setdefault(heading, []).append(point)
    axis = "tokens/s of N GPUs / (N x tokens/s of one); hollow: one measurement, bars: 90 % intervals"
    return forest(dict(sorted(groups.items())), "Weak scaling of training steps", axis) if groups else None
