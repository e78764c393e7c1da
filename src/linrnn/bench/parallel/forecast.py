"""Formulas beside the measurements on several GPUs: the time and memory of a step, the time of the loss.

The forecast of a step's time is one GPU's measured step plus the communication that computation does not hide. The
rates of communication are measured, too.

* FSDP gathers and reduces blocks while others are computed. Embedding, head and loss hide nothing.
* DDP reduces gradients during the backward pass. The last gradient, the embedding's, is not hidden.
* A ring over n ranks takes the latency of n − 1 hops. A tree over n ranks takes 2 log2 n hops.
"""

import math
import statistics
from dataclasses import dataclass

from linrnn import costs
from linrnn.bench.parallel.rows import CollectiveRow, LossRow, Measured, StepRow, parallel_overrides
from linrnn.config import load_config
from linrnn.config.schema import Config, FsdpConfig, VocabConfig
from linrnn.models.architecture import Architecture, resolve

MIB, GB = 2**20, 1e9
BUCKET = 50e6  # bytes that DDP reduces at once
PASSES_OF_BLOCKS = 3  # a block is gathered forward and backward, and its gradient is reduced
OPEN_COLLECTIVES = 4  # of embedding, head and loss in a step


@dataclass(frozen=True)
class Rates:
    """How fast the GPUs of one machine communicate.

    Attributes:
        link: bytes/s that a GPU sends in a ring.
        call: seconds of a collective of one number, without its hops.
        hop: seconds of latency from one rank to the next.
    """

    link: float
    call: float
    hop: float

    def ring(self, ranks: int) -> float:
        """Seconds of latency of a ring."""
        return self.call + (ranks - 1) * self.hop


def measured_rates(runs: list[Measured]) -> Rates | None:
    """Rates from all runs on one kind of GPU; None unless collectives over two numbers of ranks were measured.

    The link is the median over the largest tensors on the most ranks. Call and hop are a line through the medians of
    one number a rank, over the fewest and the most ranks.
    """
    rows = [row for run in runs for row in run.collectives]
    most = max(((row.ranks, row.mib) for row in rows), default=None)
    large = [row.gb_per_second * GB for row in rows if (row.ranks, row.mib) == most and row.gb_per_second]
    small = [row for row in rows if not row.mib]
    seconds = {ranks: _median_seconds(small, ranks) for ranks in {row.ranks for row in small}}
    if not large or len(seconds) < 2:
        return None
    few, many = min(seconds), max(seconds)
    hop = max(0.0, (seconds[many] - seconds[few]) / (many - few))
    return Rates(statistics.median(large), max(0.0, seconds[few] - (few - 1) * hop), hop)


def _median_seconds(rows: list[CollectiveRow], ranks: int) -> float:
    return statistics.median(row.ms / 1e3 for row in rows if row.ranks == ranks)


@dataclass(frozen=True)
class StepForecast:
    """A measured training step on several GPUs, and what the formulas say of it.

    Attributes:
        ms: time of the step.
        exposed_ms: the communication in `ms` that computation does not hide.
        memory: of a rank.
    """

    row: StepRow
    ms: float
    exposed_ms: float
    memory: costs.MemoryEstimate


def step_forecasts(run: Measured, rates: Rates) -> list[StepForecast]:
    """One forecast for each row of several GPUs, if the same run has measured the model on one GPU.

    A model without formulas has no forecast.
    """
    alone = {(row.model, row.size): row for row in run.steps if row.parallel == "none"}
    found = []
    for row in run.steps:
        one = alone.get((row.model, row.size))
        if row.parallel == "none" or one is None:
            continue
        compute = one.step_ms / 1e3 * row.sequences_of_rank / one.sequences_of_rank
        exposed, memory = _exposed(row, compute, rates), step_memory(row)
        if exposed is not None and memory is not None:
            found.append(StepForecast(row, (compute + exposed) * 1e3, exposed * 1e3, memory))
    return found


def _exposed(row: StepRow, compute: float, rates: Rates) -> float | None:
    """Seconds of communication that `compute` seconds of computation do not hide; None without formulas."""
    config, arch = _config(row), _architecture(row)
    sent = costs.communication(
        arch, config.parallel, world_size=row.ranks, sequences=row.sequences_of_rank, seq_len=row.seq_len,
        precision=row.precision, loss=config.loss,
    )  # fmt: skip
    flops = costs.kernel_flops(arch, row.sequences_of_rank, row.seq_len, config.loss, "none")
    if sent is None or flops is None:
        return None
    body = _share_of_body(flops) * compute
    if not isinstance(config.parallel, FsdpConfig):
        latency = rates.call + 2 * math.log2(row.ranks) * rates.hop
        seconds = sent.total / rates.link + latency * math.ceil(sent.total / BUCKET)
        last = 2 * 4 * arch.embedding_parameters / rates.link
        return max(last, seconds - body * 2 / 3)
    of_blocks = sent.within["blocks gathered"] + sent.within["blocks reduced"]
    groups = math.ceil(arch.num_layers / row.blocks_together)
    passes = PASSES_OF_BLOCKS - row.keep_gathered
    hidden = of_blocks / rates.link + passes * groups * rates.ring(row.ranks)
    others = sum(sent.within.values()) - of_blocks
    return max(0.0, hidden - body) + others / rates.link + OPEN_COLLECTIVES * rates.ring(row.ranks)


def _share_of_body(flops: costs.KernelFlops) -> float:
    """The share of a step's FLOPs outside the loss layer, without what is computed again."""
    parts = (flops.forward, flops.backward)
    return 1 - sum(part["vocabulary"] for part in parts) / sum(sum(part.values()) for part in parts)


def step_memory(row: StepRow) -> costs.MemoryEstimate | None:
    """A rank's memory in that step; None without formulas. DDP holds the gradients all the time, as its buckets."""
    config = _config(row)
    return costs.memory_estimate(
        _architecture(row), batch_size=row.sequences_of_rank, seq_len=row.seq_len, precision=row.precision,
        loss=config.loss, activation_checkpointing="none", optimizer=config.optimizer,
        accumulation_steps=2 if row.parallel == "ddp" else 1,
        shard_ranks=row.ranks if isinstance(config.parallel, FsdpConfig) else 1,
        by_vocabulary=isinstance(config.parallel, VocabConfig),
        blocks_together=row.blocks_together, keep_gathered=row.keep_gathered, cuda_graph=row.cuda_graph,
    )  # fmt: skip


def sending_ms(row: LossRow, rates: Rates) -> float | None:
    """Three rings: hidden states, two numbers a row, gradients. None where the bytes are not known."""
    if row.sent_mib is None:
        return None
    return (row.sent_mib * MIB / rates.link + 3 * rates.ring(row.ranks)) * 1e3


def _config(row: StepRow) -> Config:
    parallel = parallel_overrides(row.parallel, row.blocks_together, row.keep_gathered)
    return load_config([f"model={row.model}", f"size={row.size}", "loss=cce_kahan", *parallel])


def _architecture(row: StepRow) -> Architecture:
    config = _config(row)
    return resolve(config.model, config.size, row.vocab_size)
