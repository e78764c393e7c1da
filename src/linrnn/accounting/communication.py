"""What the ranks of a run send each other in a step, from formulas.

Collectives in rings: of S bytes in all, W ranks each send (W − 1) / W · S to gather or to reduce and scatter them,
twice that to reduce them on all. Scalars, and what FSDP pads, are left out.
"""

from dataclasses import dataclass

from linrnn.accounting.cce import cce_scheme, filters
from linrnn.accounting.loss_memory import BF16, FP32
from linrnn.architecture import Architecture
from linrnn.config.schema import (
    CceFilterLossConfig,
    CceKahanLossConfig,
    FsdpConfig,
    LossConfig,
    ParallelConfig,
    VocabConfig,
)

ID = 8  # bytes of a token id or label
KEEPS_FP32 = ("gated_deltanet", "kda")  # models some of whose parameters FLA's kernels need in fp32


@dataclass(frozen=True)
class Communication:
    """Bytes that each rank sends in an optimizer step, by part.

    Attributes:
        within: among the ranks that hold one model between them (of DDP: all).
        across: among those that hold the same part of it (HSDP), in the last micro-step.
    """

    within: dict[str, int]
    across: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.within.values()) + sum(self.across.values())


def gathered_bytes(model: str, precision: str) -> int:
    """Bytes of an element in which FSDP gathers the blocks' weights."""
    if precision == "bf16" or (precision == "bf16_autocast" and model not in KEEPS_FP32):
        return BF16
    return FP32


def communication(
    arch: Architecture,
    parallel: ParallelConfig,
    *,
    world_size: int,
    sequences: int,
    seq_len: int,
    precision: str,
    loss: LossConfig,
    micro_steps: int = 1,
) -> Communication:
    """What each of `world_size` ranks sends in a step of `micro_steps`, of `sequences` of its own each.

    Args:
        loss: counts with VocabConfig alone.
        precision: fp32 | bf16_autocast (fp32 parameters) | bf16 (bf16 parameters).
    """
    kept = BF16 if precision == "bf16" else FP32
    compute = FP32 if precision == "fp32" else BF16
    if not isinstance(parallel, FsdpConfig):
        return Communication({"gradients": _reduced_on_all(kept * arch.n_parameters, world_size)}, {})
    ranks = parallel.shard_ranks or world_size
    replicas = world_size // ranks
    body, matrix = arch.body_parameters, arch.embedding_parameters
    gathered = gathered_bytes(arch.model, precision)
    within = {
        "blocks gathered": 2 * _gathered(gathered * body, ranks),  # forward and backward
        "blocks reduced": _gathered(FP32 * body, ranks),
    }
    matrices = 1 if arch.tie_embeddings else 2
    across = {
        "blocks": _reduced_on_all(FP32 * body // ranks, replicas),
        "embedding and head": matrices * _reduced_on_all(kept * matrix // ranks, replicas),
    }
    if isinstance(parallel, VocabConfig):
        tokens = ranks * sequences * seq_len  # of all ranks of the group
        hidden = tokens * arch.hidden_size
        within["embedding"] = _gathered(tokens * ID + 2 * hidden * kept, ranks)  # vectors and their gradients
        within["loss"] = vocabulary_loss_bytes(loss, tokens, arch.hidden_size, arch.vocab_size, compute, ranks)
    else:
        within["embedding"] = _gathered((kept + FP32) * matrix, ranks)
        within["head"] = _gathered((compute + FP32) * matrix, ranks)
    return Communication({name: micro_steps * size for name, size in within.items()}, across)


def vocabulary_loss_bytes(loss: LossConfig, tokens: int, d: int, vocab: int, compute: int, ranks: int) -> int:
    """Of the vocabulary-parallel loss over `tokens` of all ranks: labels, hidden states of `compute` bytes an element,
    their gradients in fp32, two numbers of every rank for every token.

    Where logits are made again, the gradient of every token's loss as well. A filter's statistics are sums over the
    ranks of what was kept and what was dropped of every token; so is what `filter_mass` is compared with. The unbiased
    rule ranks all entries by their logit from the mean hidden state.
    """
    assert isinstance(loss, CceKahanLossConfig)  # as no other can be cut by vocabulary
    sent = _gathered(tokens * (ID + d * (compute + FP32)), ranks) + (ranks - 1) * tokens * 2 * FP32
    shard = -(-vocab // ranks)
    if cce_scheme(loss, tokens, d, shard, compute).rows:
        return sent
    sums = logits = 0
    if isinstance(loss, CceFilterLossConfig):
        sums = 3 if loss.filter_mass else 2
        logits = shard * ranks if loss.filter_unbiased and filters(loss) else 0
    return sent + _gathered((tokens + logits) * FP32, ranks) + sums * _reduced_on_all(tokens * FP32, ranks)


def _gathered(size: int, ranks: int) -> int:
    return size * (ranks - 1) // ranks


def _reduced_on_all(size: int, ranks: int) -> int:
    return 2 * _gathered(size, ranks)
