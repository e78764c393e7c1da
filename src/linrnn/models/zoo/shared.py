"""What several models share: how FLA's configurations take heads, and the FLOPs of recurrences."""

from typing import Any

from linrnn.core.errors import ConfigError
from linrnn.models.facts import Architecture, Mixer

# FLOPs of a recurrence by its definition, for each entry of the K x V state of a head. A product of the state with a
# vector is 2KV, and so is an update by an outer product.
DECAY = 4  # updating the state, k vᵀ, and reading it, qᵀ S (Yang et al. 2024, arXiv:2312.06635, equation 3)
DELTA = 6  # also reading the state for the key, kᵀ S (Yang et al. 2024, arXiv:2412.06464, equation 10)
MAX_KEY_DIM = 256  # per head; FLA's delta-rule kernels take no more


class LinearAttention(Mixer):
    """A state with decays, as GLA's. FLA's configuration has ratios of the width, `expand_k` and `expand_v`."""

    gated = True

    def settings(self, arch: Architecture) -> dict[str, Any]:
        ratios = {"expand_k": arch.key_dim / arch.hidden_size, "expand_v": arch.value_dim / arch.hidden_size}
        return super().settings(arch) | ratios


class DeltaRule(LinearAttention):
    """A state with a delta rule. FLA's configuration has `head_dim` for keys and `expand_v` values for each of them."""

    def settings(self, arch: Architecture) -> dict[str, Any]:
        return Mixer.settings(self, arch) | {"head_dim": arch.head_k_dim, "expand_v": arch.head_v_dim / arch.head_k_dim}

    def check(self, arch: Architecture) -> None:
        if arch.head_k_dim > MAX_KEY_DIM:
            raise ConfigError(
                f"size.mixers.{arch.model}.head_k_dim={arch.head_k_dim} is above {MAX_KEY_DIM}, the most kernels take",
                f"use more heads with head_k_dim={MAX_KEY_DIM} or less",
            )


def by_width(products: int, fla: Any) -> int | None:
    """FLOPs of a recurrence whose dimensions are ratios of the width; None with residuals over several layers."""
    keys, values = (round(fla.hidden_size * ratio) // fla.num_heads for ratio in (fla.expand_k, fla.expand_v))
    return None if fla.attnres_block_size else products * fla.num_heads * keys * values


def by_head_dim(products: int, fla: Any) -> int | None:
    """FLOPs of a recurrence with `head_dim` keys a head; None for grouped values, and as :func:`by_width`."""
    if fla.num_v_heads not in (None, fla.num_heads) or fla.attnres_block_size is not None:
        return None
    return products * fla.num_heads * fla.head_dim * int(fla.head_dim * fla.expand_v)
