"""Kimi Delta Attention (arXiv:2510.26692): delta rule with a decay for every key dimension, short convolutions."""

from functools import partial

from linrnn.models.cpu_ops import mixers
from linrnn.models.facts import Architecture, Chunks, ModelFacts, chunk_length, register_model
from linrnn.models.zoo import shared


class KDA(shared.DeltaRule):
    linears = 6

    def saved(self, arch: Architecture, seq_len: int, compute: int) -> int:
        """As Gated DeltaNet, with a decay per key dimension, both low-rank inputs, and scores beside the inverse."""
        keys, values, scores = arch.key_dim, arch.value_dim, arch.num_heads * chunk_length(arch, seq_len)
        return compute * (2 * (2 * keys + values) + keys + 2 * arch.head_v_dim + 2 * scores)


register_model(
    ModelFacts(
        name="kda",
        title="KDA",
        mixer=KDA(),
        chunks=Chunks("fla.layers.kda", "chunk_kda", (32, 64)),
        cpu={
            ("fla.layers.kda", "chunk_kda"): mixers.gated_delta_rule,
            ("fla.layers.kda", "fused_recurrent_kda"): mixers.gated_delta_rule,
        },
        recurrence=partial(shared.by_head_dim, shared.DELTA),
    )
)
