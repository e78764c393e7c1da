"""Bytes that the ranks of a run send each other in a step, from formulas.

Collectives run in rings. To gather S bytes, or to reduce and scatter them, each of W ranks sends (W − 1) / W · S. An
all-reduce takes twice that. Scalars and FSDP's padding are left out.
"""

from linrnn.config.schema import FsdpConfig, LossConfig, MuonConfig, OptimizerConfig, ParallelConfig, VocabConfig
from linrnn.costs.memory import gathered_bytes
from linrnn.losses.base import BF16, FP32
from linrnn.losses.cce import CceKahanLossConfig, cce_scheme, over_shards
from linrnn.models.architecture import Architecture

ID = 8  # bytes of a token id or label


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
    optimizer: OptimizerConfig | None = None,
) -> dict[str, int] | None:
    """Bytes by component that each of `world_size` ranks sends in a step of `micro_steps` of `sequences` per rank.

    `across, …` is sent between ranks that hold the same shard of the model (HSDP), in the last micro-step; all else
    between ranks that share one model (with DDP: all ranks). None if the formulas do not know the model, or with
    VocabConfig the loss.

    Args:
        precision: fp32 | bf16_autocast (fp32 parameters) | bf16 (bf16 parameters).
        loss: matters only with VocabConfig.
        optimizer: Muon gathers the updates of the layers' matrices, in bf16, once a step.
    """
    kept = BF16 if precision == "bf16" else FP32
    compute = FP32 if precision == "fp32" else BF16
    if not isinstance(parallel, FsdpConfig):
        return {"gradients": _reduced_on_all(kept * arch.n_parameters, world_size)}
    ranks = parallel.ranks_of_model(world_size)
    replicas = world_size // ranks
    body, matrix = arch.body_parameters, arch.embedding_parameters
    if (gathered := gathered_bytes(arch.model, precision)) is None:
        return None
    within = {
        "blocks gathered": (1 if parallel.keep_gathered else 2) * _gathered(gathered * body, ranks),
        "blocks reduced": _gathered(FP32 * body, ranks),
    }
    matrices = 1 if arch.tie_embeddings else 2
    across = {
        "across, blocks": _reduced_on_all(FP32 * body // ranks, replicas),
        "across, embedding and head": matrices * _reduced_on_all(kept * matrix // ranks, replicas),
    }
    if isinstance(parallel, VocabConfig):
        tokens = ranks * sequences * seq_len  # over all ranks of the group
        hidden = tokens * arch.hidden_size
        within["embedding"] = _gathered(tokens * ID + 2 * hidden * kept, ranks)  # vectors and their gradients
        loss_bytes = vocabulary_loss_bytes(loss, tokens, arch.hidden_size, arch.vocab_size, compute, ranks)
        if loss_bytes is None:
            return None
        within["loss"] = loss_bytes
    else:
        within["embedding"] = _gathered((kept + FP32) * matrix, ranks)
        within["head"] = _gathered((compute + FP32) * matrix, ranks)
    within = {name: micro_steps * size for name, size in within.items()}
    if isinstance(optimizer, MuonConfig):
        within["updates"] = _gathered(BF16 * sum(rows * columns for rows, columns in arch.matrices), ranks)
    return within | {name: size for name, size in across.items() if size}


def vocabulary_loss_bytes(loss: LossConfig, tokens: int, d: int, vocab: int, compute: int, ranks: int) -> int | None:
    """Bytes that each rank sends for the vocabulary-parallel loss over the `tokens` of all ranks; None: unknown.

    * Always: labels, hidden states (`compute` bytes an element) and their gradients in fp32. Two numbers per rank and
      token. (The ranks describe their arguments in the first step only, which is not counted.)
    * If logits are recomputed: a third number per rank and token, and the gradient of every token's loss.
    """
    if loss.name not in ("cce_kahan", "cce_filter"):
        return None
    loss = over_shards(loss)
    assert isinstance(loss, CceKahanLossConfig)
    sent = _gathered(tokens * (ID + d * (compute + FP32)), ranks) + (ranks - 1) * tokens * 2 * FP32
    shard = -(-vocab // ranks)
    if cce_scheme(loss, tokens, d, shard, compute).rows:
        return sent
    return sent + (ranks - 1) * tokens * FP32 + _gathered(tokens * FP32, ranks)


def _gathered(size: int, ranks: int) -> int:
    return size * (ranks - 1) // ranks


def _reduced_on_all(size: int, ranks: int) -> int:
    return 2 * _gathered(size, ranks)
