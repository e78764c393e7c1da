"""Measurements of several GPUs against one: a JSON file for each run of scripts/bench_parallel.py."""

import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from linrnn.core.errors import DataError
from linrnn.core.files import write_json
from linrnn.core.machine import slug
from linrnn.core.tables import show
from linrnn.runs.intervals import estimate

SHARDED = ("fsdp", "vocab")
# How many times a rank sends (W − 1) / W of the whole tensor.
UNITS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


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
    def efficiency_in_words(self) -> str:
        """The efficiency; from two repeats on with its 90 % interval and their number."""
        if len(self.efficiencies) < 2:
            return show(self.efficiency, ".2f")
        found = estimate(self.efficiencies, ratios=True)
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


def parallel_overrides(mode: str, blocks_together: int, keep_gathered: bool) -> list[str]:
    """The overrides of a run for `parallel=mode`. Only modes that shard the model gather blocks."""
    if mode not in SHARDED:
        return [f"parallel={mode}"]
    gathering = f"parallel.blocks_together={blocks_together}", f"parallel.keep_gathered={keep_gathered}"
    return [f"parallel={mode}", *gathering]


def write(measured: Measured, directory: Path, part: str | None) -> Path:
    """Write `<directory>/<device>-x<ranks>[-<part>].json`. The file is whole at any time."""
    directory.mkdir(parents=True, exist_ok=True)
    stem = f"{slug(measured.device)}-x{measured.ranks}" + (f"-{part}" if part else "")
    path = directory / f"{stem}.json"
    write_json(path, asdict(measured))
    return path


def read(directory: Path) -> list[Measured]:
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
            raise DataError(f"scripts/bench_parallel.py has not written {path} ({error})", "remove it") from error
    return sorted(found, key=lambda measured: (measured.device, measured.ranks))
