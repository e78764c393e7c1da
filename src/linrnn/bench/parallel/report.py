"""Measurements of several GPUs against one: a JSON file for every run of scripts/bench_parallel.py, and their page."""

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from linrnn.core.errors import DataError
from linrnn.core.tables import Table, show
from linrnn.costs.utilisation import mfu_of_summary

UNITS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # (W − 1) / W of the whole, so many times, a rank sends


@dataclass
class CollectiveRow:
    """A collective of NCCL (on a CPU: gloo) over all ranks, by itself.

    Attributes:
        mib: of the whole tensor (fp32), of which a rank has all or a part; 0: one number a rank.
        gb_per_second: what a rank sends, in a ring, by the time; null where that is latency alone.
    """

    operation: str
    ranks: int
    mib: int
    ms: float
    gb_per_second: float | None


@dataclass
class LossRow:
    """Forward and backward pass of a loss over N tokens, of all ranks together, and of one GPU alone.

    Attributes:
        ms, ms_alone: of the ranks together; of one GPU that does all.
        ms_shard: of one GPU that does a rank's share without the others: all tokens, a rank's rows of the head.
        mib, mib_alone: memory of a rank beyond inputs and gradients.
        sent_mib: by each rank, from formulas.
        efficiency: ms_alone / (ranks · ms).
        error_hidden, error_weight: of the gradients against one GPU's, relative; of rank 0's part.
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
        scaling: `alone` (each rank by itself), `weak` (the same sequences a rank), `strong` (the same in all).
        efficiency: tokens/s against that of as many GPUs alone, each with the sequences of `weak`.
        gib: peak memory of the rank that has most; null on a CPU.
        sent_gib: by each rank in a step, from formulas.
        gib_is_own: whether `gib` is all that the row held. Where not, the row after DDP's, which is FSDP's, lacks what
            NCCL still held of DDP's gradients.
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
    gib_is_own: bool = False

    @property
    def memory(self) -> str:
        """GiB; a lower bound where that is all that was measured."""
        return ("≥ " if self.parallel == "fsdp" and not self.gib_is_own and self.gib else "") + show(self.gib, ".1f")


@dataclass
class Measured:
    """What one run has measured so far, on so many ranks of one kind of device."""

    command: str
    device: str
    ranks: int
    environment: dict[str, Any]
    collectives: list[CollectiveRow] = field(default_factory=list)
    loss: list[LossRow] = field(default_factory=list)
    steps: list[StepRow] = field(default_factory=list)


def write(measured: Measured, directory: Path, part: str | None) -> Path:
    """`<directory>/<device>-x<ranks>[-<part>].json`, whole at any time."""
    directory.mkdir(parents=True, exist_ok=True)
    stem = f"{slug(measured.device)}-x{measured.ranks}" + (f"-{part}" if part else "")
    return _replace(directory / f"{stem}.json", json.dumps(asdict(measured), indent=1) + "\n")


def read(directory: Path) -> list[Measured]:
    """All runs in a directory, by device, ranks and name; none where there is no directory.

    Raises:
        DataError: a file that no run has written.
    """
    found = []
    for path in sorted(directory.glob("*-x*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            for name, kind in (("collectives", CollectiveRow), ("loss", LossRow), ("steps", StepRow)):
                content[name] = [kind(**row) for row in content[name]]
            found.append(Measured(**content))
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(f"{path} is not of scripts/bench_parallel.py ({error})", "remove it") from error
    return sorted(found, key=lambda measured: (measured.device, measured.ranks))


def write_pages(directory: Path) -> list[Path]:
    """`<directory>/<device>.md` from all runs of that device."""
    runs = read(directory)
    devices = sorted({run.device for run in runs})
    return [
        _replace(directory / f"{slug(device)}.md", markdown([run for run in runs if run.device == device]))
        for device in devices
    ]


def slug(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", device.lower())


def _replace(path: Path, text: str) -> Path:
    aside = path.with_suffix(".part")
    aside.write_text(text, encoding="utf-8")
    return aside.replace(path)


def markdown(runs: list[Measured]) -> str:
    """The tables of all runs on one kind of device; the last column is the number of the run that made a row."""
    lines = [f"# Several GPUs against one: {runs[0].device}", ""]
    for number, run in enumerate(runs, start=1):
        packages, commit = run.environment["packages"], (run.environment["git"] or {}).get("commit") or "unknown"
        versions = f"commit {commit[:12]}, torch {packages['torch']}, Triton {packages['triton']}"
        lines.append(f"{number}. `{run.command}`; {versions}")
    collectives = [(row, number) for number, run in enumerate(runs, start=1) for row in run.collectives]
    if collectives:
        lines += _table(
            "Collectives",
            "One at a time, fp32; the slowest rank's median. GB/s: what a rank sends in a ring, (W − 1) / W of the "
            "whole, for an all-reduce twice that.",
            ("operation", "GPUs", "MiB", "ms", "GB/s", "run"),
            [(r.operation, r.ranks, r.mib, f"{r.ms:.3f}", show(r.gb_per_second, ".0f"), n) for r, n in collectives],
        )
    losses = [(row, number) for number, run in enumerate(runs, start=1) for row in run.loss]
    if losses:
        lines += _table(
            "The vocabulary-parallel loss",
            "`cce_kahan`, forward and backward, bf16, peaked logits; each rank has its share of the tokens and of the "
            "head's rows. *Shard*: one GPU with all tokens and one rank's rows. Efficiency: time of one / (ranks × "
            "time). Errors: relative to the gradients of one GPU.",
            (
                "N × D × V", "GPUs", "ms", "ms on one", "ms of a shard", "efficiency", "MiB a rank", "MiB on one",
                "MiB sent", "dE", "dC", "run",
            ),
            [
                (
                    f"{r.tokens} × {r.width} × {r.vocabulary}", r.ranks, f"{r.ms:.2f}", f"{r.ms_alone:.2f}",
                    f"{r.ms_shard:.2f}", f"{r.efficiency:.3f}", show(r.mib, ".0f"), show(r.mib_alone, ".0f"),
                    show(r.sent_mib, ".0f"), f"{r.error_hidden:.1e}", f"{r.error_weight:.1e}", number,
                )
                for r, number in losses
            ],
        )  # fmt: skip
    steps = [(row, number) for number, run in enumerate(runs, start=1) for row in run.steps]
    if steps:
        lines += _table(
            "Training steps",
            "`loss=cce_kahan`, AdamW. Efficiency: tokens/s against as many GPUs alone, each with the B of the row "
            "`alone`. GiB with ≥: less what NCCL still held of the gradients of DDP's row before.",
            (
                "model", "parallel", "scaling", "GPUs", "B of a rank", "ms", "tokens/s", "efficiency", "MFU", "by 6N",
                "GiB", "GiB sent", "run",
            ),
            [
                (
                    f"{r.model} {r.size}", r.parallel, r.scaling, r.ranks, r.sequences_of_rank, f"{r.step_ms:.1f}",
                    f"{r.tokens_per_second:,.0f}", show(r.efficiency, ".3f"),
                    *(show(share, ".3f") for share in _mfu_of_rank(r, runs[0].device).values()),
                    r.memory, show(r.sent_gib, ".2f"), number,
                )
                for r, number in steps
            ],
        )  # fmt: skip
    return "\n".join(lines) + "\n"


def _mfu_of_rank(row: StepRow, device: str) -> dict[str, float | None]:
    """`mfu` and `mfu_6n` of each rank's GPU."""
    speed = row.sequences_of_rank * row.seq_len / row.step_ms * 1e3
    return mfu_of_summary({**vars(row), "device": device, "tokens_per_second": speed, "world_size": 1})


def _table(title: str, text: str, columns: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> list[str]:
    words = ("model", "parallel", "scaling", "operation", "N × D × V")
    return ["", f"## {title}", "", text, "", *Table(columns, list(rows), words).markdown()]
