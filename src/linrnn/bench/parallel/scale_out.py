"""From 64 to 1,024 GPUs on paper: which parallelism, memory and bytes of a GPU, expected MFU.

Rates are those that scripts/bench_parallel.py has measured on a few GPUs, else assumed; its training steps are compared
with the same formulas.

The time of a step is that of its FLOPs at the share of the peak that one GPU reaches, and of what communication does
not hide behind it: blocks are gathered and reduced while others are computed; embedding, head and loss are not, nor is
DDP's last gradient, the embedding's. A ring over n ranks takes a hop's latency n − 1 times; among machines it crosses
each machine's network cards once, all of them together; a group of one GPU a machine (HSDP's replicas) has one card.
No micro-step is faster than its host launches it.
"""

import math
import statistics
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from linrnn import costs
from linrnn.bench.parallel.report import CollectiveRow, LossRow, Measured, StepRow
from linrnn.config import load_config
from linrnn.config.schema import Config, FsdpConfig, ParallelConfig, VocabConfig
from linrnn.core.errors import DataError
from linrnn.core.tables import Table
from linrnn.models.architecture import Architecture, resolve

GIB, MIB, GB = 2**30, 2**20, 1e9
GPU = "NVIDIA H200"
MACHINE = 8  # GPUs
MICRO_BATCH = 8  # sequences of a rank, at most
SEQ_LEN = 2048


@dataclass(frozen=True)
class Setting:
    """A model, and the sequences of its optimizer step."""

    model: str
    size: str
    vocab_size: int
    sequences: int


@dataclass(frozen=True)
class Rates:
    """What a GPU computes and sends.

    Attributes:
        link: bytes/s that a GPU sends in a ring within a machine.
        call: s, of a collective of one number, whatever the ranks.
        hop: s, latency of a step of a ring; of a tree over n ranks 2 log2 n of them.
        card: bytes/s of a network card, one for each GPU.
        shares: of the peak that one GPU reaches by hardware FLOPs: (model, size, share); ASSUMED_MFU for others.
        floors: s, that a micro-step takes at least, however little work a GPU has: (model, size, ddp or fsdp, s); 0
            for others.
    """

    link: float = 300 * GB
    call: float = 20e-6
    hop: float = 4e-6
    card: float = 40 * GB  # 400 Gbit/s less a fifth
    shares: tuple[tuple[str, str, float], ...] = ()
    floors: tuple[tuple[str, str, str, float], ...] = ()

    def share(self, model: str, size: str) -> float:
        found = [share for of_model, of_size, share in self.shares if (of_model, of_size) == (model, size)]
        return found[0] if found else costs.ASSUMED_MFU

    def floor(self, model: str, size: str, parallel: ParallelConfig) -> float:
        way = "fsdp" if isinstance(parallel, FsdpConfig) else parallel.name  # vocab does all that fsdp does
        return next((seconds for *of, seconds in self.floors if of == [model, size, way]), 0.0)

    def of_ring(self, ranks: int) -> float:
        """Bytes/s of a GPU in a ring over so many."""
        return self.link if ranks <= MACHINE else min(self.link, MACHINE * self.card)


ASSUMED = Rates()
Figure = TypeVar("Figure")


@dataclass(frozen=True)
class Foreseen:
    """One way to train on so many GPUs: bytes and seconds of a GPU and step."""

    parallel: str
    gpus: int
    sequences: int
    micro_steps: int
    memory: int
    sent_within: int
    sent_across: int
    compute: float
    exposed: float
    launches: float
    mfu: float


SETTINGS = (
    Setting("gla", "350m", 32000, 1024),
    Setting("gla", "1b3", 128256, 2048),
    Setting("gla", "1b3", 256000, 2048),
)
GPUS = (64, 128, 256, 512, 1024)
WAYS = {  # label -> overrides
    "ddp": ["parallel=ddp"],
    "fsdp": ["parallel=fsdp"],
    f"fsdp, shard_ranks={MACHINE}": ["parallel=fsdp", f"parallel.shard_ranks={MACHINE}"],
    f"vocab, shard_ranks={MACHINE}": ["parallel=vocab", f"parallel.shard_ranks={MACHINE}"],
}


@lru_cache
def _config(setting: Setting, way: str) -> Config:
    return load_config([f"model={setting.model}", f"size={setting.size}", "loss=cce_kahan", *WAYS[way]])


def _known(figure: Figure | None) -> Figure:
    """Raises DataError: the page cannot be written without it."""
    if figure is None:
        raise DataError(
            "results/scale_out.md foresees a model or a loss that linrnn.costs has no formulas for",
            "register its formulas, or take its measurements out of the page",
        )
    return figure


@lru_cache
def foresee(
    setting: Setting, way: str, gpus: int, rates: Rates = ASSUMED, precision: str = "bf16_autocast"
) -> Foreseen:
    """What a step takes; all GPUs share `setting.sequences` out evenly."""
    config = _config(setting, way)
    arch = resolve(config.model, config.size, setting.vocab_size)
    parallel = config.parallel
    of_gpu = setting.sequences // gpus
    sequences = math.gcd(of_gpu, MICRO_BATCH)
    micro_steps = of_gpu // sequences
    shard_ranks = (parallel.shard_ranks or gpus) if isinstance(parallel, FsdpConfig) else 1
    memory = _known(costs.memory_estimate(
        arch, batch_size=sequences, seq_len=SEQ_LEN, precision=precision, loss=config.loss,
        activation_checkpointing="none", accumulation_steps=max(micro_steps, 2 if shard_ranks == 1 else 1),
        shard_ranks=shard_ranks, by_vocabulary=isinstance(parallel, VocabConfig),
    ))  # fmt: skip
    sent = _known(costs.communication(
        arch, parallel, world_size=gpus, sequences=sequences, seq_len=SEQ_LEN, precision=precision, loss=config.loss,
        micro_steps=micro_steps,
    ))  # fmt: skip
    flops = _known(costs.kernel_flops(arch, of_gpu, SEQ_LEN, config.loss, "none"))
    needed = _known(costs.model_flops(arch, of_gpu, SEQ_LEN))
    peak = _known(costs.peak_flops_per_second(GPU, precision))
    compute = flops.total / (peak * rates.share(setting.model, setting.size))
    exposed = _exposed(arch, parallel, sent, gpus, shard_ranks, micro_steps, _body(flops) * compute, rates)
    launches = micro_steps * rates.floor(setting.model, setting.size, parallel)
    return Foreseen(
        way, gpus, sequences, micro_steps, memory.peak, sum(sent.within.values()), sum(sent.across.values()), compute,
        exposed, launches, needed / max(compute + exposed, launches) / peak,
    )  # fmt: skip


def _body(flops: costs.KernelFlops) -> float:
    """The share of a step's FLOPs that is not the loss layer's, without what is computed again."""
    parts = (flops.forward, flops.backward)
    return 1 - sum(part["vocabulary"] for part in parts) / sum(sum(part.values()) for part in parts)


def _exposed(
    arch: Architecture,
    parallel: ParallelConfig,
    sent: costs.Communication,
    gpus: int,
    shard_ranks: int,
    micro_steps: int,
    body: float,
    rates: Rates,
) -> float:
    """Seconds of communication that the `body`'s seconds of computation do not hide."""
    if not isinstance(parallel, FsdpConfig):  # beside the backward pass of the last micro-step
        latency = rates.call + 2 * math.log2(gpus) * rates.hop
        seconds = sent.total / rates.of_ring(gpus) + latency * math.ceil(sent.total / 50e6)
        last = 2 * 4 * arch.embedding_parameters / rates.of_ring(gpus)
        return max(last, seconds - body * 2 / 3 / micro_steps)
    rate, latency = rates.of_ring(shard_ranks), rates.call + (shard_ranks - 1) * rates.hop
    hidden = (sent.within["blocks gathered"] + sent.within["blocks reduced"]) / rate
    hidden += 3 * arch.num_layers * micro_steps * latency
    open_parts = sum(size for name, size in sent.within.items() if not name.startswith("blocks"))
    shown = open_parts / rate + 4 * micro_steps * latency
    replicas = gpus // shard_ranks
    if replicas > 1:
        tree = rates.call + 2 * math.log2(replicas) * rates.hop
        hidden += sent.across["blocks"] / rates.card + arch.num_layers * tree
        shown += sent.across["embedding and head"] / rates.card + 2 * tree
    return max(0.0, hidden - body) + shown


# ------------------------------------------------------------------------------------------------------- measured
def measured_rates(runs: list[Measured]) -> Rates:
    """Rates of a machine from all runs on this kind of GPU; what they lack stays as it is assumed.

    Link: of collectives by themselves, over as many ranks as were measured, of the largest tensor. Latency: of one
    number, a line through the medians over the fewest and the most ranks. Shares of the peak: of training steps of one
    GPU, the fastest run's. Floors: the shortest step of strong scaling, an upper bound of what its launches take.
    """
    runs = [run for run in runs if run.device == GPU]
    large = _of_most_ranks([row for run in runs for row in run.collectives if row.gb_per_second])
    call, hop = _latency([row for run in runs for row in run.collectives if not row.mib])
    shares: dict[tuple[str, str], float] = {}
    floors: dict[tuple[str, str, str], float] = {}
    for row in (row for run in runs for row in run.steps):
        if row.parallel == "none":
            shares[row.model, row.size] = max(_share_of_peak(row), shares.get((row.model, row.size), 0.0))
        elif row.scaling == "strong":
            key = (row.model, row.size, row.parallel)
            floors[key] = min(row.step_ms / 1e3, floors.get(key, math.inf))
    return Rates(
        link=statistics.median(large) if large else ASSUMED.link,
        call=call,
        hop=hop,
        shares=tuple((*key, share) for key, share in sorted(shares.items())),
        floors=tuple((*key, seconds) for key, seconds in sorted(floors.items())),
    )


def _of_most_ranks(rows: list[CollectiveRow]) -> list[float]:
    """Bytes/s of the largest tensors over the most ranks."""
    most = max(((row.ranks, row.mib) for row in rows), default=None)
    return [row.gb_per_second * GB for row in rows if (row.ranks, row.mib) == most and row.gb_per_second]


def _latency(rows: list[CollectiveRow]) -> tuple[float, float]:
    """s of a collective of one number, and of a hop; as assumed, unless two numbers of ranks were measured."""
    seconds = {n: statistics.median(row.ms / 1e3 for row in rows if row.ranks == n) for n in {r.ranks for r in rows}}
    if len(seconds) < 2:
        return ASSUMED.call, ASSUMED.hop
    few, many = min(seconds), max(seconds)
    hop = max(0.0, (seconds[many] - seconds[few]) / (many - few))
    return max(0.0, seconds[few] - (few - 1) * hop), hop


def _share_of_peak(row: StepRow) -> float:
    peak = _known(costs.peak_flops_per_second(GPU, row.precision))
    flops = _known(costs.kernel_flops(_arch(row), row.sequences_of_rank, row.seq_len, _run(row).loss, "none"))
    return flops.total / (row.step_ms / 1e3) / peak


def _run(row: StepRow) -> Config:
    return load_config([f"model={row.model}", f"size={row.size}", "loss=cce_kahan", f"parallel={row.parallel}"])


def _arch(row: StepRow) -> Architecture:
    run = _run(row)
    return resolve(run.model, run.size, row.vocab_size)


@dataclass(frozen=True)
class Compared:
    """A training step on several GPUs, as foreseen from one GPU's and the rates, and as measured."""

    row: StepRow
    foreseen_ms: float
    exposed_ms: float
    foreseen_gib: float


def step_memory(row: StepRow) -> costs.MemoryEstimate:
    """A rank's memory in that step. Of DDP with the gradients all the time: they are views of its buckets."""
    config = _run(row)
    return _known(costs.memory_estimate(
        _arch(row), batch_size=row.sequences_of_rank, seq_len=row.seq_len, precision=row.precision, loss=config.loss,
        activation_checkpointing="none", accumulation_steps=2 if row.parallel == "ddp" else 1,
        shard_ranks=row.ranks if isinstance(config.parallel, FsdpConfig) else 1,
        by_vocabulary=isinstance(config.parallel, VocabConfig),
    ))  # fmt: skip


def compare(run: Measured, rates: Rates) -> list[Compared]:
    """Every row of several GPUs for whose model the same run has one of a GPU alone."""
    alone = {(row.model, row.size): row for row in run.steps if row.parallel == "none"}
    found = []
    for row in run.steps:
        one = alone.get((row.model, row.size))
        if row.parallel == "none" or one is None:
            continue
        arch, config = _arch(row), _run(row)
        compute = one.step_ms / 1e3 * row.sequences_of_rank / one.sequences_of_rank
        sent = _known(costs.communication(
            arch, config.parallel, world_size=row.ranks, sequences=row.sequences_of_rank, seq_len=row.seq_len,
            precision=row.precision, loss=config.loss,
        ))  # fmt: skip
        shard_ranks = row.ranks if isinstance(config.parallel, FsdpConfig) else 1
        flops = _known(costs.kernel_flops(arch, row.sequences_of_rank, row.seq_len, config.loss, "none"))
        exposed = _exposed(arch, config.parallel, sent, row.ranks, shard_ranks, 1, _body(flops) * compute, rates)
        found.append(Compared(row, (compute + exposed) * 1e3, exposed * 1e3, step_memory(row).peak / GIB))
    return found


# ----------------------------------------------------------------------------------------------------------- page
def _comparison(runs: list[Measured], rates: Rates) -> list[str]:
    """Tables of what was foreseen and what was measured."""
    runs = [run for run in runs if run.device == GPU]
    steps = [compared for run in runs for compared in compare(run, rates)]
    losses = [row for run in runs for row in run.loss]
    lines = []
    if steps:
        lines += [
            "## Training steps, foreseen and measured", "",
            "Foreseen: the step of one GPU with as many sequences (in proportion, where fewer), and what the formulas "
            "leave exposed of communication at the rates above. Memory: a rank's, from formulas alone; with ≥, less "
            "what NCCL still held of the gradients of DDP's row before.", "",
        ]  # fmt: skip
        columns = (
            *("model", "parallel", "scaling", "GPUs", "B of a rank", "ms foreseen", "of it exposed", "ms measured"),
            *("measured / foreseen", "GiB foreseen", "GiB measured"),
        )
        rows = [
            (
                *(f"{c.row.model} {c.row.size}", c.row.parallel, c.row.scaling, c.row.ranks, c.row.sequences_of_rank),
                *(f"{c.foreseen_ms:.1f}", f"{c.exposed_ms:.1f}", f"{c.row.step_ms:.1f}"),
                *(f"{c.row.step_ms / c.foreseen_ms:.3f}", f"{c.foreseen_gib:.1f}", c.row.memory),
            )
            for c in steps
        ]
        lines += [*Table(columns, rows, words=("model", "parallel", "scaling")).markdown(), ""]
    if losses:
        lines += [
            "## The vocabulary-parallel loss, foreseen and measured", "",
            "A rank's share of the work on a GPU by itself, what it sends at the measured rates, and both one after "
            "the other, as if nothing were hidden.", "",
        ]  # fmt: skip
        shards = (
            *("N × D × V", "GPUs", "ms of a shard", "ms sending", "ms foreseen", "ms measured"),
            "measured / foreseen",
        )
        of_shards = []
        for row in losses:
            sending = _sending_ms(row, rates)
            foreseen = row.ms_shard + sending
            times = (row.ms_shard, sending, foreseen, row.ms)
            shape = f"{row.tokens} × {row.width} × {row.vocabulary}"
            of_shards.append((shape, row.ranks, *(f"{ms:.2f}" for ms in times), f"{row.ms / foreseen:.3f}"))
        lines += [*Table(shards, of_shards, words=("N × D × V",)).markdown(), ""]
    return lines


def _sending_ms(row: LossRow, rates: Rates) -> float:
    """Hidden states, numbers and gradients, each a ring."""
    return (
        _known(row.sent_mib) * MIB / rates.of_ring(row.ranks) + 3 * (rates.call + (row.ranks - 1) * rates.hop)
    ) * 1e3


def _measurements(runs: list[Measured]) -> str:
    if not any(run.device == GPU for run in runs):
        return "assumed rates; no run of `scripts/bench_parallel.py` has measured any yet"
    return "the runs of `scripts/bench_parallel.py` in [bench_parallel](bench_parallel)"


def _sources(rates: Rates) -> str:
    """Where the rates come from, in words."""

    def source(measured: bool) -> str:
        return "measured" if measured else "assumed"

    shares = [f"{model} {size} {share:.0%}" for model, size, share in rates.shares]
    others = "of its peak by hardware FLOPs"
    reached = f"one GPU reaches {', '.join(shares)} {others} (measured)" if shares else ""
    missing = {(setting.model, setting.size) for setting in SETTINGS} - {share[:2] for share in rates.shares}
    if missing:
        reached += f"{'; others' if shares else 'one GPU reaches'} {costs.ASSUMED_MFU:.0%}"
        reached += f"{'' if shares else ' ' + others} (assumed)"
    return (
        f"{rates.link / GB:.0f} GB/s of a GPU within a machine ({source(rates.link != ASSUMED.link)}), "
        f"{rates.card / GB:.0f} GB/s of its network card (assumed), {rates.call * 1e6:.0f} µs a collective and "
        f"{rates.hop * 1e6:.1f} µs a hop ({source(rates.hop != ASSUMED.hop)}); {reached}"
    )


def page(runs: list[Measured]) -> str:
    """The page, as Markdown, with the rates that the runs have measured."""
    rates = measured_rates(runs)
    lines = [
        "# 64 to 1,024 GPUs, on paper", "",
        f"Made by `python scripts/maintain/scale_out.py` from `linrnn.costs` and {_measurements(runs)}. "
        f"H200s, 8 a machine: {_sources(rates)}. "
        f"`bf16_autocast`, T = {SEQ_LEN}, `cce_kahan`, no activation checkpointing. The tokens of a step are the same "
        "for any number of GPUs.", "",
        "Communication of the blocks counts only as far as it takes longer than their computation; *exposed* is what "
        "is left of it, and all of embedding, head and loss. *Launches*: what the host takes for the micro-steps, at "
        "most: the shortest step measured in strong scaling, which no number of GPUs shortens (0: not measured); "
        "expected MFU is of the longer one. Bytes are those that a GPU sends in a step.", "",
        *_comparison(runs, rates),
    ]  # fmt: skip
    for setting in SETTINGS:
        rows = [foresee(setting, way, gpus, rates) for gpus in GPUS for way in WAYS]
        tokens = setting.sequences * SEQ_LEN / 1e6
        lines += [
            f"## {setting.model} {setting.size}, V = {setting.vocab_size:,}, {tokens:.1f} M tokens a step", "",
        ]  # fmt: skip
        columns = (
            *("GPUs", "parallel", "B x micro-steps", "GiB a GPU", "GB sent within", "GB across replicas"),
            *("ms computing", "ms exposed", "ms launches", "expected MFU"),
        )
        cells = []
        for row in rows:
            best = row.mfu >= max(other.mfu for other in rows if other.gpus == row.gpus) - 5e-4
            mfu = f"**{row.mfu:.3f}**" if best else f"{row.mfu:.3f}"
            cells.append(
                (
                    *(row.gpus, row.parallel, f"{row.sequences} x {row.micro_steps}", f"{row.memory / GIB:.1f}"),
                    *(f"{row.sent_within / GB:.2f}", f"{row.sent_across / GB:.2f}", f"{row.compute * 1e3:.0f}"),
                    *(f"{row.exposed * 1e3:.1f}", f"{row.launches * 1e3:.0f}", mfu),
                )
            )
        lines += [*Table(columns, cells, words=("parallel",)).markdown(), ""]
    return "\n".join(lines)
