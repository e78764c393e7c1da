"""FLOPs of a training step: every matrix product of the model, by component.

An (m, k) by (k, n) product counts 2mkn. Elementwise work, norms and the short convolutions (4 taps a
channel) are left out, as is usual for MFU. The backward pass of a product is two products of its size.
"""

from dataclasses import dataclass

from linrnn.accounting.cce import BF16, cce_scheme
from linrnn.architecture import GLA_GATE_RANK, Architecture
from linrnn.config.schema import CceAppleLossConfig, CceKahanLossConfig, LossConfig, TorchNativeLossConfig

DEFAULT_CHUNK = 64  # tokens per chunk of FLA's kernels where `model.chunk_size` is null


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of a step by component.

    The components are mixer_projections, mixer_scan (a Transformer's attention), mlp and vocabulary.

    Attributes:
        forward: the products of the forward pass.
        backward: twice those: the gradients of both factors.
        recomputed: what is computed a second time to save memory (activation checkpointing, a loss layer that
            remakes its logits, kernels that remake their states or scores). The device does it; MFU does
            not count it.
    """

    forward: dict[str, int]
    backward: dict[str, int]
    recomputed: dict[str, int]

    @property
    def model(self) -> int:
        """Forward and backward, without recomputation: what MFU counts."""
        return sum(self.forward.values()) + sum(self.backward.values())

    @property
    def hardware(self) -> int:
        """All that the device computes."""
        return self.model + sum(self.recomputed.values())


def model_flops(arch: Architecture, n_sequences: int, seq_len: int) -> int:
    """Forward and backward FLOPs of the model over `n_sequences` of `seq_len` tokens: what MFU counts."""
    return 3 * sum(forward_flops(arch, n_sequences, seq_len).values())


def step_flops(
    arch: Architecture,
    n_sequences: int,
    seq_len: int,
    loss: LossConfig,
    activation_checkpointing: str,
    compute: int = BF16,
) -> StepFlops:
    """FLOPs of a step over `n_sequences` (all micro-steps) of `seq_len` tokens.

    Args:
        loss: decides whether the backward pass computes the logits again.
        activation_checkpointing: none | full (every block's forward pass is computed again).
        compute: bytes of an element of hidden states and head.
    """
    forward = forward_flops(arch, n_sequences, seq_len)
    tokens = n_sequences * seq_len
    again = {"mixer_scan": tokens * _scan_recomputed_per_token(arch, seq_len)}
    if recomputes_logits(loss, tokens, arch.hidden_size, arch.vocab_size, compute):
        again["vocabulary"] = forward["vocabulary"]
    if activation_checkpointing == "full":
        for component in ("mixer_projections", "mixer_scan", "mlp"):
            again[component] = again.get(component, 0) + forward[component]
    return StepFlops(forward, {name: 2 * flops for name, flops in forward.items()}, again)


def forward_flops(arch: Architecture, n_sequences: int, seq_len: int) -> dict[str, int]:
    """FLOPs of a forward pass by component, with the logits of every token."""
    tokens, layers = n_sequences * seq_len, arch.num_layers
    projections = sum(rows * columns for rows, columns in projection_shapes(arch))
    return {
        "mixer_projections": 2 * tokens * layers * projections,
        "mixer_scan": tokens * layers * arch.num_heads * _scan_per_token_and_head(arch, seq_len),
        "mlp": 2 * tokens * layers * arch.mlp_parameters,
        "vocabulary": 2 * tokens * arch.embedding_parameters,
    }


def projection_shapes(arch: Architecture) -> list[tuple[int, int]]:
    """(inputs, outputs) of every linear layer of one mixer, as FLA builds them."""
    d, heads, keys, values = arch.hidden_size, arch.num_heads, arch.key_dim, arch.value_dim
    shapes = [(d, keys), (d, keys), (d, values), (values, d)]  # q, k, v, output
    if arch.model == "gla":
        rank = GLA_GATE_RANK
        shapes += [(d, values), (d, rank), (rank, keys)]  # output gate, forget gate
    elif arch.model == "gated_deltanet":
        shapes += [(d, values), (d, heads), (d, heads)]  # output gate, decay, beta
    elif arch.model == "kda":
        rank = arch.head_v_dim
        shapes += [(d, rank), (rank, keys), (d, rank), (rank, values), (d, heads)]  # decay, output gate, beta
    return shapes


def chunk_length(arch: Architecture, seq_len: int) -> int:
    """Tokens per chunk (C) of the recurrent kernel."""
    return min(arch.chunk_size or DEFAULT_CHUNK, seq_len)


def recomputes_logits(loss: LossConfig, n_tokens: int, d: int, vocab: int, compute: int) -> bool:
    """Whether a backend takes 4 products (it computes the logits again in the backward pass), not 3.

    Exact for the backends that do not filter; filtering skips a share of the products that depends on the
    data.
    """
    if isinstance(loss, CceAppleLossConfig):
        return loss.variant != "torch_compile"
    if isinstance(loss, TorchNativeLossConfig):
        return loss.reduction == "none"
    if isinstance(loss, CceKahanLossConfig):
        return cce_scheme(loss, n_tokens, d, vocab, compute).products == 4
    return False


def _scan_per_token_and_head(arch: Architecture, seq_len: int) -> int:
    """Products of the token mixing itself, forward; K and V are a head's key and value dimensions.

    Attention, causal: half of the T x T scores and of their product with the values: T (K + V).

    GLA in chunks of C (Yang et al. 2024, arXiv:2312.06635, section 4): scores q kᵀ (2CK) times values
    (2CV) within a chunk, the state's update kᵀ v (2KV) and reading q S (2KV).

    Gated DeltaNet and KDA in the WY form (Yang et al. 2024, arXiv:2406.06484, section 3; arXiv:2412.06464;
    Kimi Team 2025, arXiv:2510.26692): k kᵀ and q kᵀ (4CK), the inverse of a unit lower-triangular C x C
    matrix (C² / 3), that times keys and values (2CK + 2CV), w S, the update kᵀ u and q S (6KV), scores
    times u (2CV).

    Products of a chunk count as the dense C x C tiles that the kernels multiply.
    """
    k_dim, v_dim, chunk = arch.head_k_dim, arch.head_v_dim, chunk_length(arch, seq_len)
    if arch.model == "transformer":
        return seq_len * (k_dim + v_dim)
    if arch.model == "gla":
        return 2 * chunk * (k_dim + v_dim) + 4 * k_dim * v_dim
    return 2 * chunk * (3 * k_dim + 2 * v_dim) + 6 * k_dim * v_dim + chunk**2 // 3


def _scan_recomputed_per_token(arch: Architecture, seq_len: int) -> int:
    """What the kernels' own backward passes compute again: scores (attention) or chunk states (the others).

    Attention (Dao 2023, arXiv:2307.08691, section 3.1): q kᵀ. GLA: the state updates. Delta rule: also w,
    u and w S.
    """
    k_dim, v_dim, chunk = arch.head_k_dim, arch.head_v_dim, chunk_length(arch, seq_len)
    if arch.model == "transformer":
        per_head = seq_len * k_dim
    elif arch.model == "gla":
        per_head = 2 * k_dim * v_dim
    else:
        per_head = 2 * chunk * (k_dim + v_dim) + 4 * k_dim * v_dim
    return arch.num_layers * arch.num_heads * per_head
