"""Gated DeltaNet (arXiv:2412.06464): delta rule with one decay per head, short convolutions."""

from linrnn.models.cpu_ops import layers, mixers
from linrnn.models.facts import Architecture, Chunks, MixerMemory, ModelFacts, chunk_length, register_model
from linrnn.models.zoo import shared


def _others(arch: Architecture) -> int:
    """Convolutions; A_log and dt_bias; norm."""
    return shared.convolution_parameters(arch) + 2 * arch.num_heads + arch.head_v_dim


def _projections(arch: Architecture) -> list[tuple[int, int]]:
    d, heads = arch.hidden_size, arch.num_heads
    gates = [(d, arch.value_dim), (d, heads), (d, heads)]  # output gate, decay, beta
    return [*shared.query_key_value_output(arch), *gates]


def _saved(arch: Architecture, seq_len: int, compute: int) -> int:
    """The convolutions' inputs; normalised q and k; v; the inverse."""
    inverse = arch.num_heads * chunk_length(arch, seq_len)
    return compute * (2 * (2 * arch.key_dim + arch.value_dim) + inverse)


register_model(
    ModelFacts(
        name="gated_deltanet",
        title="Gated DeltaNet",
        matched=shared.matched_by_head_dim(_projections, _others),
        flops=shared.delta_rule_flops(_projections),
        memory=MixerMemory(linears=6, gated=True, scan=_saved),
        keeps_fp32=True,
        state=shared.expanded_widths,
        chunks=Chunks("fla.layers.gated_deltanet", "chunk_gated_delta_rule", (16, 32, 64)),
        cpu={
            ("fla.layers.gated_deltanet", "chunk_gated_delta_rule"): mixers.gated_delta_rule,
            ("fla.layers.gated_deltanet", "fused_recurrent_gated_delta_rule"): mixers.gated_delta_rule,
            ("fla.layers.gated_deltanet", "causal_conv1d"): layers.causal_conv1d,
        },
    )
)
