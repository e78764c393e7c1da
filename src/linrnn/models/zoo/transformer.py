"""Softmax attention with rotary positions, as in Llama: the baseline. Attention itself is torch's own."""

from linrnn.core.errors import ConfigError
from linrnn.models.cpu_ops import layers
from linrnn.models.facts import Architecture, Mixer, ModelFacts, register_model


class Transformer(Mixer):
    linears = 3

    def check(self, arch: Architecture) -> None:
        """Attention splits the hidden size into heads."""
        if not arch.key_dim == arch.value_dim == arch.hidden_size:
            heads = f"{arch.num_heads} heads of {arch.head_k_dim} (keys) and {arch.head_v_dim} (values)"
            raise ConfigError(
                f"size.mixers.{arch.model}: {heads} do not make up the width of {arch.hidden_size}",
                "attention needs num_heads · head_k_dim = num_heads · head_v_dim = size.hidden_size",
            )

    def saved(self, arch: Architecture, seq_len: int, compute: int) -> int:
        """Rotated q and k, v."""
        return compute * (2 * arch.key_dim + arch.value_dim)


register_model(
    ModelFacts(
        name="transformer",
        title="Transformer",
        mixer=Transformer(),
        cpu={("fla.modules.rotary.ops", "rotary_embedding"): layers.rotary_embedding},
    )
)
