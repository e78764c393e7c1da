"""Formulas that several models share: parameters, and FLOPs of attention and of delta rules.

FLOPs are those of the forward pass for one token and one head. K and V are a head's key and value dimensions, T is the
length of the sequence, and C is the number of tokens in a chunk.
"""

from collections.abc import Callable
from typing import Any

from linrnn.core.errors import ConfigError
from linrnn.models.facts import Architecture, Matched, MixerFlops, chunk_length

Projections = Callable[[Architecture], list[tuple[int, int]]]

CONV_SIZE = 4  # taps of the short convolutions of Gated DeltaNet and KDA
MAX_KEY_DIM = 256  # per head; FLA's delta-rule kernels take no more


# ------------------------------------------------------------------------------------------------------- parameters
def sum_of_products(matrices: list[tuple[int, int]]) -> int:
    """The entries of all matrices."""
    return sum(rows * columns for rows, columns in matrices)


def convolution_parameters(arch: Architecture) -> int:
    """Of the short convolutions of queries, keys and values."""
    return CONV_SIZE * (2 * arch.key_dim + arch.value_dim)


def query_key_value_output(arch: Architecture) -> list[tuple[int, int]]:
    """(inputs, outputs) of the four linear layers that every mixer has."""
    d, keys, values = arch.hidden_size, arch.key_dim, arch.value_dim
    return [(d, keys), (d, keys), (d, values), (values, d)]


def check_ratio(arch: Architecture) -> None:
    """Reject heads that FLA's delta-rule layers cannot express. They take the value dimension as a ratio."""
    where = f"size.mixers.{arch.model}"
    k_dim, v_dim = arch.head_k_dim, arch.head_v_dim
    if k_dim > MAX_KEY_DIM:
        raise ConfigError(
            f"{where}.head_k_dim={k_dim} is above {MAX_KEY_DIM}, the most FLA's kernels take",
            f"use more heads with head_k_dim={MAX_KEY_DIM} or less",
        )
    if int(k_dim * (v_dim / k_dim)) != v_dim:
        raise ConfigError(
            f"{where}: FLA takes the value dimension as a ratio, and {v_dim}/{k_dim} is not exact",
            "use a head_v_dim that is a multiple of head_k_dim, or half of it",
        )


def widths(fla: Any, expand_k: float, expand_v: float) -> tuple[int, int, int] | None:
    """(heads, key dimension, value dimension) from ratios of the width; None with residuals over several layers."""
    heads, d = fla.num_heads, fla.hidden_size
    return None if fla.attnres_block_size else (heads, round(d * expand_k) // heads, round(d * expand_v) // heads)


# ------------------------------------------------------------------------------------------------------------ FLOPs
def linear_attention(arch: Architecture, seq_len: int) -> int:
    """Updating the state, k vᵀ, and reading it, qᵀ S (Yang et al. 2024, arXiv:2312.06635, equation 3): 2 x 2KV."""
    return 4 * arch.head_k_dim * arch.head_v_dim


def delta_rule(arch: Architecture, seq_len: int) -> int:
    """Also reading the state for the key, kᵀ S (Yang et al. 2024, arXiv:2412.06464, equation 10): 3 x 2KV."""
    return 6 * arch.head_k_dim * arch.head_v_dim


def delta_rule_kernel(arch: Architecture, seq_len: int) -> int:
    """The WY form (Yang et al. 2024, arXiv:2406.06484, section 3; arXiv:2412.06464; Kimi Team 2025, arXiv:2510.26692).

    * k kᵀ and q kᵀ: 4CK.
    * The inverse of a unit lower-triangular C x C matrix: C² / 3.
    * The inverse times keys and values: 2CK + 2CV.
    * w S, the update kᵀ u and q S: 6KV.
    * Scores times u: 2CV.
    """
    k_dim, v_dim, chunk = arch.head_k_dim, arch.head_v_dim, chunk_length(arch, seq_len)
    return 2 * chunk * (3 * k_dim + 2 * v_dim) + 6 * k_dim * v_dim + chunk**2 // 3


def gla_kernel(arch: Architecture, seq_len: int) -> int:
    """The chunked form of GLA (Yang et al. 2024, arXiv:2312.06635, section 4).

    Within a chunk: scores q kᵀ (2CK) times values (2CV). Between chunks: updating the state, kᵀ v (2KV), and reading
    it, q S (2KV). Products of a chunk count as the dense C x C tiles that the kernels multiply.
    """
    k_dim, v_dim = arch.head_k_dim, arch.head_v_dim
    return 2 * chunk_length(arch, seq_len) * (k_dim + v_dim) + 4 * k_dim * v_dim


def gla_kernel_again(arch: Architecture, seq_len: int) -> int:
    """Recomputed: the updates of the state."""
    return 2 * arch.head_k_dim * arch.head_v_dim


# ------------------------------------------------------------------------------------------------------------ facts
def linear_attention_flops(projections: Projections) -> MixerFlops:
    """FLOPs of a mixer with GLA's recurrence and kernel."""
    return MixerFlops(projections, linear_attention, linear_attention, gla_kernel, gla_kernel_again)


def delta_rule_flops(projections: Projections) -> MixerFlops:
    """FLOPs of a mixer with a delta rule. Recomputed are the updates of the state, w, u and w S: as many as GLA's."""
    return MixerFlops(projections, delta_rule, delta_rule, delta_rule_kernel, kernel_again=gla_kernel)


def matched_by_head_dim(projections: Projections, others: Callable[[Architecture], int]) -> Matched:
    """A matched model whose configuration has `head_dim` for keys, and `expand_v` values for each of them.

    Args:
        projections: (inputs, outputs) of the linear layers of one mixer.
        others: number of the mixer's other parameters.
    """
    return Matched(
        lambda arch: sum_of_products(projections(arch)) + others(arch),
        settings=lambda arch: {"head_dim": arch.head_k_dim, "expand_v": arch.head_v_dim / arch.head_k_dim},
        check=check_ratio,
    )


def matched_by_width(projections: Projections, others: Callable[[Architecture], int]) -> Matched:
    """A matched model whose configuration has ratios of the width, `expand_k` and `expand_v`. Arguments as above."""
    return Matched(
        lambda arch: sum_of_products(projections(arch)) + others(arch),
        settings=lambda arch: {
            "expand_k": arch.key_dim / arch.hidden_size,
            "expand_v": arch.value_dim / arch.hidden_size,
        },
    )


def expanded_widths(fla: Any) -> tuple[int, int, int] | None:
    """Heads, and a head's key and value dimensions, of such a configuration; None for grouped values."""
    if fla.num_v_heads not in (None, fla.num_heads) or fla.attnres_block_size is not None:
        return None
    return fla.num_heads, fla.head_dim, int(fla.head_dim * fla.expand_v)
