"""Kimi Delta Attention (arXiv:2510.26692): delta rule with a decay for every key dimension, short convolutions."""

from linrnn.models.cpu_ops import mixers
from linrnn.models.facts import Architecture, Chunks, MixerMemory, ModelFacts, chunk_length, register_model
from linrnn.models.zoo import shared


def _others(arch: Architecture) -> int:
    """Convolutions; the output gate's bias; A_log and dt_bias; norm."""
    return shared.convolution_parameters(arch) + arch.value_dim + arch.num_heads + arch.key_dim + arch.head_v_dim


def _projections(arch: Architecture) -> list[tuple[int, int]]:
    d, rank = arch.hidden_size, arch.head_v_dim
    low_rank = [(d, rank), (rank, arch.key_dim), (d, rank), (rank, arch.value_dim)]  # decay, output gate
    return [*shared.query_key_value_output(arch), *low_rank, (d, arch.num_heads)]  # beta


def _saved(arch: Architecture, seq_len: int, compute: int) -> int:
    """As Gated DeltaNet, with a decay per key dimension, both low-rank inputs, and scores beside the inverse."""
    keys, values, scores = arch.key_dim, arch.value_dim, arch.num_heads * chunk_length(arch, seq_len)
    return compute * (2 * (2 * keys + values) + keys + 2 * arch.head_v_dim + 2 * scores)


register_model(
    ModelFacts(
        name="kda",
        title="KDA",
        matched=shared.matched_by_head_dim(_projections, _others),
        flops=shared.delta_rule_flops(_projections),
        memory=MixerMemory(linears=6, gated=True, scan=_saved),
        keeps_fp32=True,
        state=shared.expanded_widths,
        chunks=Chunks("fla.layers.kda", "chunk_kda", (32, 64)),
        cpu={
            ("fla.layers.kda", "chunk_kda"): mixers.gated_delta_rule,
            ("fla.layers.kda", "fused_recurrent_kda"): mixers.gated_delta_rule,
        },
    )
)
