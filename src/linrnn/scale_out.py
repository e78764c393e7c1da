"""From 64 to 1,024 GPUs on paper: which parallelism, memory and bytes of a GPU, expected MFU. Nothing is measured here.

The time of a step is that of its FLOPs at the share of the peak that one GPU reaches, and of what communication does
not hide behind it: blocks are gathered and reduced while others are computed; embedding, head and loss are not, nor is
DDP's last gradient, the embedding's. A ring over n ranks takes a hop's latency n − 1 times; among machines it crosses
each machine's network cards once, all of them together; a group of one GPU a machine (HSDP's replicas) has one card.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

from linrnn import accounting
from linrnn.architecture import Architecture, resolve
from linrnn.config import load_config
from linrnn.config.schema import Config, FsdpConfig, VocabConfig

GIB, GB = 2**30, 1e9
GPU = "NVIDIA H200"
MACHINE = 8  # GPUs
NVLINK = 300 * GB  # bytes/s that a GPU sends in a ring within a machine
CARD = 40 * GB  # bytes/s of a network card, one for each GPU: 400 Gbit/s less a fifth
HOP = 4e-6  # s, latency of a step of a ring; of a tree over n ranks 2 log2 n of them
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


@lru_cache
def foresee(setting: Setting, way: str, gpus: int, precision: str = "bf16_autocast") -> Foreseen:
    """What a step takes; all GPUs share `setting.sequences` out evenly."""
    config = _config(setting, way)
    arch = resolve(config.model, config.size, setting.vocab_size)
    parallel = config.parallel
    of_gpu = setting.sequences // gpus
    sequences = math.gcd(of_gpu, MICRO_BATCH)
    micro_steps = of_gpu // sequences
    shard_ranks = (parallel.shard_ranks or gpus) if isinstance(parallel, FsdpConfig) else 1
    memory = accounting.memory_estimate(
        arch, batch_size=sequences, seq_len=SEQ_LEN, precision=precision, loss=config.loss,
        activation_checkpointing="none", accumulation_steps=max(micro_steps, 2 if shard_ranks == 1 else 1),
        shard_ranks=shard_ranks, by_vocabulary=isinstance(parallel, VocabConfig),
    )  # fmt: skip
    sent = accounting.communication(
        arch, parallel, world_size=gpus, sequences=sequences, seq_len=SEQ_LEN, precision=precision,
        micro_steps=micro_steps,
    )  # fmt: skip
    flops = accounting.step_flops(arch, of_gpu, SEQ_LEN, config.loss, "none")
    peak = accounting.peak_flops_per_second(GPU, precision)
    assert peak is not None
    compute = flops.hardware / (peak * accounting.ASSUMED_MFU)
    share = 1 - sum(part["vocabulary"] for part in (flops.forward, flops.backward)) / flops.model
    exposed = _exposed(arch, parallel, sent, gpus, shard_ranks, micro_steps, share * compute)
    return Foreseen(
        way, gpus, sequences, micro_steps, memory.peak, sum(sent.within.values()), sum(sent.across.values()), compute,
        exposed, flops.model / (compute + exposed) / peak,
    )  # fmt: skip


def _exposed(
    arch: Architecture,
    parallel: object,
    sent: accounting.Communication,
    gpus: int,
    shard_ranks: int,
    micro_steps: int,
    body: float,
) -> float:
    """Seconds of communication that the `body`'s seconds of computation do not hide."""
    if not isinstance(parallel, FsdpConfig):  # beside the backward pass of the last micro-step
        seconds = sent.total / _rate(gpus) + 2 * math.log2(gpus) * HOP * math.ceil(sent.total / 50e6)
        last = 2 * 4 * arch.embedding_parameters / _rate(gpus)
        return max(last, seconds - body * 2 / 3 / micro_steps)
    rate, latency = _rate(shard_ranks), (shard_ranks - 1) * HOP
    hidden = (sent.within["blocks gathered"] + sent.within["blocks reduced"]) / rate
    hidden += 3 * arch.num_layers * micro_steps * latency
    open_parts = sum(size for name, size in sent.within.items() if not name.startswith("blocks"))
    shown = open_parts / rate + 4 * micro_steps * latency
    replicas = gpus // shard_ranks
    if replicas > 1:
        tree = 2 * math.log2(replicas) * HOP
        hidden += sent.across["blocks"] / CARD + arch.num_layers * tree
        shown += sent.across["embedding and head"] / CARD + 2 * tree
    return max(0.0, hidden - body) + shown


def _rate(ranks: int) -> float:
    """Bytes/s of a GPU in a ring over so many."""
    return NVLINK if ranks <= MACHINE else min(NVLINK, MACHINE * CARD)


def page() -> str:
    """The page, as Markdown."""
    lines = [
        "# 64 to 1,024 GPUs, on paper", "",
        "Made by `python scripts/scale_out.py` from `linrnn.accounting`; nothing here is measured. H200s, 8 a machine: "
        f"{NVLINK / GB:.0f} GB/s of a GPU within a machine, {CARD / GB:.0f} GB/s of its network card, "
        f"{HOP * 1e6:.0f} µs a hop; one GPU reaches {accounting.ASSUMED_MFU:.0%} of its peak by hardware FLOPs. "
        f"`bf16_autocast`, T = {SEQ_LEN}, `cce_kahan`, no activation checkpointing. The tokens of a step are the same "
        "for any number of GPUs.", "",
        "Communication of the blocks counts only as far as it takes longer than their computation; *exposed* is what "
        "is left of it, and all of embedding, head and loss. Bytes are those that a GPU sends in a step.", "",
    ]  # fmt: skip
    for setting in SETTINGS:
        rows = [foresee(setting, way, gpus) for gpus in GPUS for way in WAYS]
        tokens = setting.sequences * SEQ_LEN / 1e6
        lines += [
            f"## {setting.model} {setting.size}, V = {setting.vocab_size:,}, {tokens:.1f} M tokens a step", "",
            "| GPUs | parallel | B x micro-steps | GiB a GPU | GB sent within | GB across replicas | ms computing | "
            "ms exposed | expected MFU |",
            "|--:|---|--:|--:|--:|--:|--:|--:|--:|",
        ]  # fmt: skip
        for row in rows:
            best = row.mfu >= max(other.mfu for other in rows if other.gpus == row.gpus) - 5e-4
            mfu = f"**{row.mfu:.3f}**" if best else f"{row.mfu:.3f}"
            lines.append(
                f"| {row.gpus} | {row.parallel} | {row.sequences} x {row.micro_steps} | {row.memory / GIB:.1f} | "
                f"{row.sent_within / GB:.2f} | {row.sent_across / GB:.2f} | {row.compute * 1e3:.0f} | "
                f"{row.exposed * 1e3:.1f} | {mfu} |"
            )
        lines.append("")
    return "\n".join(lines)
