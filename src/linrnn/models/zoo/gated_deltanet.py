"""Gated DeltaNet (arXiv:2412.06464): delta rule with one decay per head, short convolutions."""

from functools import partial

from linrnn.models.cpu_ops import layers, mixers
from linrnn.models.facts import Architecture, Chunks, ModelFacts, chunk_length, register_model
from linrnn.models.zoo import shared


class GatedDeltaNet(shared.DeltaRule):
    linears = 6

    def saved(self, arch: Architecture, seq_len: int, compute: int) -> int:
        """The convolutions' inputs; normalised q and k; v; the inverse."""
        inverse = arch.num_heads * chunk_length(arch, seq_len)
        return compute * (2 * (2 * arch.key_dim + arch.value_dim) + inverse)


register_model(
    ModelFacts(
        name="gated_deltanet",
        title="Gated DeltaNet",
        mixer=GatedDeltaNet(),
        chunks=Chunks("fla.layers.gated_deltanet", "chunk_gated_delta_rule", (16, 32, 64)),
        cpu={
            ("fla.layers.gated_deltanet", "chunk_gated_delta_rule"): mixers.gated_delta_rule,
            ("fla.layers.gated_deltanet", "fused_recurrent_gated_delta_rule"): mixers.gated_delta_rule,
            ("fla.layers.gated_deltanet", "causal_conv1d"): layers.causal_conv1d,
        },
        recurrence=partial(shared.by_head_dim, shared.DELTA),
    )
)
