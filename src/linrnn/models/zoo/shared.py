"""Formulas that several models share.

K and V are a head's key and value dimensions, and C is the number of tokens in a chunk.
"""

from typing import Any

from linrnn.core.errors import ConfigError
from linrnn.models.facts import Architecture, Mixer, chunk_length

CONV_SIZE = 4  # taps of the short convolutions of the delta-rule models
MAX_KEY_DIM = 256  # per head; FLA's delta-rule kernels take no more


class LinearAttention(Mixer):
    """A state with decays, as GLA's. FLA's configuration has ratios of the width, `expand_k` and `expand_v`.

    Products: updating the state, k vᵀ, and reading it, qᵀ S (Yang et al. 2024, arXiv:2312.06635, equation 3): 2 x 2KV.
    """

    products = 4
    gated = True

    def settings(self, arch: Architecture) -> dict[str, Any]:
        ratios = {"expand_k": arch.key_dim / arch.hidden_size, "expand_v": arch.value_dim / arch.hidden_size}
        return super().settings(arch) | ratios

    def kernel(self, arch: Architecture, seq_len: int) -> int:
        """The chunked form (Yang et al. 2024, arXiv:2312.06635, section 4).

        Within a chunk: scores q kᵀ (2CK) times values (2CV). Between chunks: updating the state, kᵀ v (2KV), and
        reading it, q S (2KV). Products of a chunk count as the dense C x C tiles that the kernels multiply.
        """
        k_dim, v_dim = arch.head_k_dim, arch.head_v_dim
        return 2 * chunk_length(arch, seq_len) * (k_dim + v_dim) + 4 * k_dim * v_dim

    def kernel_again(self, arch: Architecture, seq_len: int) -> int:
        """The updates of the state."""
        return 2 * arch.head_k_dim * arch.head_v_dim


class DeltaRule(LinearAttention):
    """A state with a delta rule. FLA's configuration has `head_dim` for keys, and `expand_v` values for each of them.

    Products: also reading the state for the key, kᵀ S (Yang et al. 2024, arXiv:2412.06464, equation 10): 3 x 2KV.
    """

    products = 6

    def settings(self, arch: Architecture) -> dict[str, Any]:
        return Mixer.settings(self, arch) | {"head_dim": arch.head_k_dim, "expand_v": arch.head_v_dim / arch.head_k_dim}

    def check(self, arch: Architecture) -> None:
        """FLA's delta-rule layers take the value dimension as a ratio."""
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

    def kernel(self, arch: Architecture, seq_len: int) -> int:
        """The WY form (Yang et al. 2024, arXiv:2406.06484, section 3; arXiv:2412.06464; Kimi 2025, arXiv:2510.26692).

        * k kᵀ and q kᵀ: 4CK.
        * The inverse of a unit lower-triangular C x C matrix: C² / 3.
        * The inverse times keys and values: 2CK + 2CV.
        * w S, the update kᵀ u and q S: 6KV.
        * Scores times u: 2CV.
        """
        k_dim, v_dim, chunk = arch.head_k_dim, arch.head_v_dim, chunk_length(arch, seq_len)
        return 2 * chunk * (3 * k_dim + 2 * v_dim) + 6 * k_dim * v_dim + chunk**2 // 3

    def kernel_again(self, arch: Architecture, seq_len: int) -> int:
        """The updates of the state, w, u and w S: as many as GLA's kernel."""
        return super().kernel(arch, seq_len)


def convolution_parameters(arch: Architecture) -> int:
    """Of the short convolutions of queries, keys and values."""
    return CONV_SIZE * (2 * arch.key_dim + arch.value_dim)


def by_width(products: int, fla: Any) -> int | None:
    """FLOPs of a recurrence whose dimensions are ratios of the width; None with residuals over several layers."""
    keys, values = (round(fla.hidden_size * ratio) // fla.num_heads for ratio in (fla.expand_k, fla.expand_v))
    return None if fla.attnres_block_size else products * fla.num_heads * keys * values


def by_head_dim(products: int, fla: Any) -> int | None:
    """FLOPs of a recurrence with `head_dim` keys a head; None for grouped values, and as :func:`by_width`."""
    if fla.num_v_heads not in (None, fla.num_heads) or fla.attnres_block_size is not None:
        return None
    return products * fla.num_heads * fla.head_dim * int(fla.head_dim * fla.expand_v)
