"""Softmax attention with rotary positions, as in Llama: the baseline. Attention itself is torch's own."""

from linrnn.core.errors import ConfigError
from linrnn.models.cpu_ops import layers
from linrnn.models.facts import Architecture, Matched, MixerFlops, MixerMemory, ModelFacts, register_model
from linrnn.models.zoo import shared


def _check(arch: Architecture) -> None:
    """Attention splits the hidden size into heads, and rotates pairs of a head's dimensions."""
    where = f"size.mixers.{arch.model}"
    if not arch.key_dim == arch.value_dim == arch.hidden_size:
        raise ConfigError(
            f"{where}: {arch.num_heads} heads of {arch.head_k_dim} do not make up the width of {arch.hidden_size}",
            "attention needs num_heads · head_k_dim = num_heads · head_v_dim = size.hidden_size",
        )
    if arch.head_k_dim % 2:
        raise ConfigError(f"{where}.head_k_dim={arch.head_k_dim} is odd", "rotary positions need an even one")


def _causal_attention(arch: Architecture, seq_len: int) -> int:
    """q kᵀ and the product with the values, over (T + 1) / 2 keys on average: (T + 1) (K + V)."""
    return (seq_len + 1) * (arch.head_k_dim + arch.head_v_dim)


def _full_attention(arch: Architecture, seq_len: int) -> int:
    """q kᵀ and the product with the values, over all T keys."""
    return 2 * seq_len * (arch.head_k_dim + arch.head_v_dim)


def _flash_attention(arch: Architecture, seq_len: int) -> int:
    """Half of the T x T scores, and half of their product with the values."""
    return seq_len * (arch.head_k_dim + arch.head_v_dim)


def _flash_attention_again(arch: Architecture, seq_len: int) -> int:
    """Recomputed: q kᵀ (Dao 2023, arXiv:2307.08691, section 3.1)."""
    return seq_len * arch.head_k_dim


def _saved(arch: Architecture, seq_len: int, compute: int) -> int:
    """Rotated q and k, v."""
    return compute * (2 * arch.key_dim + arch.value_dim)


register_model(
    ModelFacts(
        name="transformer",
        title="Transformer",
        matched=Matched(
            lambda arch: shared.sum_of_products(shared.query_key_value_output(arch)),
            settings=lambda arch: {},
            check=_check,
        ),
        flops=MixerFlops(
            shared.query_key_value_output,
            _causal_attention,
            _full_attention,
            _flash_attention,
            _flash_attention_again,
            recurrent=False,
        ),
        memory=MixerMemory(linears=3, gated=False, scan=_saved),
        keeps_fp32=False,
        cpu={("fla.modules.rotary.ops", "rotary_embedding"): layers.rotary_embedding},
        state=lambda fla: shared.widths(fla, 1, 1) if fla.window_size is None else None,
    )
)
