"""FLOPs of each model's token mixing, by the model's definition and as the kernels compute them.

A new model needs an entry in `FLOPS_OF_MIXERS`. Without one its FLOPs, MFU and time are unknown; another model's
formula is never used.

Counts are FLOPs of the forward pass for one token and one head. K and V are a head's key and value dimensions, T is the
length of the sequence, and C is the number of tokens in a chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass

from linrnn.models.architecture import GLA_GATE_RANK, Architecture

DEFAULT_CHUNK = 64  # tokens per chunk of FLA's kernels if `model.chunk_size` is null


@dataclass(frozen=True)
class MixerFlops:
    """Formulas of one model. Those for one token and head take (architecture, sequence length).

    Attributes:
        projections: (inputs, outputs) of every linear layer of one mixer, as FLA builds them.
        definition: products of the recurrence, or of attention over the causal pairs.
        usual: the same, counted as :mod:`linrnn.costs.flops` does for `mfu_6n`.
        kernel: products that FLA's chunked kernel or flash attention computes.
        kernel_again: products that the kernel's backward pass recomputes.
    """

    projections: Callable[[Architecture], list[tuple[int, int]]]
    definition: Callable[[Architecture, int], int]
    usual: Callable[[Architecture, int], int]
    kernel: Callable[[Architecture, int], int]
    kernel_again: Callable[[Architecture, int], int]


def chunk_length(arch: Architecture, seq_len: int) -> int:
    """Tokens per chunk (C) of the recurrent kernel."""
    return min(arch.chunk_size or DEFAULT_CHUNK, seq_len)


# --------------------------------------------------------------------------------------------------- linear layers
def _query_key_value_output(arch: Architecture) -> list[tuple[int, int]]:
    d, keys, values = arch.hidden_size, arch.key_dim, arch.value_dim
    return [(d, keys), (d, keys), (d, values), (values, d)]


def _gla_projections(arch: Architecture) -> list[tuple[int, int]]:
    d, rank = arch.hidden_size, GLA_GATE_RANK
    return [*_query_key_value_output(arch), (d, arch.value_dim), (d, rank), (rank, arch.key_dim)]  # output gate, decay


def _gated_deltanet_projections(arch: Architecture) -> list[tuple[int, int]]:
    d, heads = arch.hidden_size, arch.num_heads
    return [*_query_key_value_output(arch), (d, arch.value_dim), (d, heads), (d, heads)]  # output gate, decay, beta


def _kda_projections(arch: Architecture) -> list[tuple[int, int]]:
    d, rank = arch.hidden_size, arch.head_v_dim
    low_rank = [(d, rank), (rank, arch.key_dim), (d, rank), (rank, arch.value_dim)]  # decay, output gate
    return [*_query_key_value_output(arch), *low_rank, (d, arch.num_heads)]  # beta


# ------------------------------------------------------------------------------------------------- by the definition
def _linear_attention(arch: Architecture, seq_len: int) -> int:
    """Updating the state, k vᵀ, and reading it, qᵀ S (Yang et al. 2024, arXiv:2312.06635, equation 3): 2 x 2KV."""
    return 4 * arch.head_k_dim * arch.head_v_dim


def _delta_rule(arch: Architecture, seq_len: int) -> int:
    """Also reading the state for the key, kᵀ S (Yang et al. 2024, arXiv:2412.06464, equation 10): 3 x 2KV."""
    return 6 * arch.head_k_dim * arch.head_v_dim


def _causal_attention(arch: Architecture, seq_len: int) -> int:
    """q kᵀ and the product with the values, over (T + 1) / 2 keys on average: (T + 1) (K + V)."""
    return (seq_len + 1) * (arch.head_k_dim + arch.head_v_dim)


def _full_attention(arch: Architecture, seq_len: int) -> int:
    """q kᵀ and the product with the values, over all T keys."""
    return 2 * seq_len * (arch.head_k_dim + arch.head_v_dim)


# ----------------------------------------------------------------------------------------------------- by the kernels
def _gla_kernel(arch: Architecture, seq_len: int) -> int:
    """The chunked form of GLA (Yang et al. 2024, arXiv:2312.06635, section 4).

    Within a chunk: scores q kᵀ (2CK) times values (2CV). Between chunks: updating the state, kᵀ v (2KV), and reading
    it, q S (2KV). Products of a chunk count as the dense C x C tiles that the kernels multiply.
    """
    k_dim, v_dim = arch.head_k_dim, arch.head_v_dim
    return 2 * chunk_length(arch, seq_len) * (k_dim + v_dim) + 4 * k_dim * v_dim


def _gla_kernel_again(arch: Architecture, seq_len: int) -> int:
    """Recomputed: the updates of the state."""
    return 2 * arch.head_k_dim * arch.head_v_dim


def _delta_rule_kernel(arch: Architecture, seq_len: int) -> int:
    """The WY form (Yang et al. 2024, arXiv:2406.06484, section 3; arXiv:2412.06464; Kimi Team 2025, arXiv:2510.26692).

    * k kᵀ and q kᵀ: 4CK.
    * The inverse of a unit lower-triangular C x C matrix: C² / 3.
    * The inverse times keys and values: 2CK + 2CV.
    * w S, the update kᵀ u and q S: 6KV.
    * Scores times u: 2CV.
    """
    k_dim, v_dim, chunk = arch.head_k_dim, arch.head_v_dim, chunk_length(arch, seq_len)
    return 2 * chunk * (3 * k_dim + 2 * v_dim) + 6 * k_dim * v_dim + chunk**2 // 3


def _delta_rule_kernel_again(arch: Architecture, seq_len: int) -> int:
    """Recomputed: the updates of the state, w, u and w S."""
    k_dim, v_dim = arch.head_k_dim, arch.head_v_dim
    return 2 * chunk_length(arch, seq_len) * (k_dim + v_dim) + 4 * k_dim * v_dim


def _flash_attention(arch: Architecture, seq_len: int) -> int:
    """Half of the T x T scores, and half of their product with the values."""
    return seq_len * (arch.head_k_dim + arch.head_v_dim)


def _flash_attention_again(arch: Architecture, seq_len: int) -> int:
    """Recomputed: q kᵀ (Dao 2023, arXiv:2307.08691, section 3.1)."""
    return seq_len * arch.head_k_dim


FLOPS_OF_MIXERS = {
    "gla": MixerFlops(_gla_projections, _linear_attention, _linear_attention, _gla_kernel, _gla_kernel_again),
    "gated_deltanet": MixerFlops(
        _gated_deltanet_projections, _delta_rule, _delta_rule, _delta_rule_kernel, _delta_rule_kernel_again
    ),
    "kda": MixerFlops(_kda_projections, _delta_rule, _delta_rule, _delta_rule_kernel, _delta_rule_kernel_again),
    "transformer": MixerFlops(
        _query_key_value_output, _causal_attention, _full_attention, _flash_attention, _flash_attention_again
    ),
}
