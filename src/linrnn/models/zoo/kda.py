"""Kimi Delta Attention (arXiv:2510.26692): delta rule with a decay for every key dimension, short convolutions."""

from linrnn.models.cpu_ops import mixers
from linrnn.models.facts import (
    FP32,
    Architecture,
    Chunks,
    MixerMemory,
    ModelFacts,
    chunk_length,
    register_model,
)
from linrnn.models.zoo import shared


def _parameters(arch: Architecture) -> int:
    """Low-rank decay and output gate (with bias); beta; A_log and dt_bias; norm."""
    d, heads, keys, values = arch.hidden_size, arch.num_heads, arch.key_dim, arch.value_dim
    low_rank = arch.head_v_dim * (2 * d + keys + values) + values
    return (
        shared.projection_parameters(arch)
        + shared.convolution_parameters(arch)
        + low_rank
        + d * heads
        + heads
        + keys
        + arch.head_v_dim
    )


def _projections(arch: Architecture) -> list[tuple[int, int]]:
    d, rank = arch.hidden_size, arch.head_v_dim
    low_rank = [(d, rank), (rank, arch.key_dim), (d, rank), (rank, arch.value_dim)]  # decay, output gate
    return [*shared.query_key_value_output(arch), *low_rank, (d, arch.num_heads)]  # beta


def _later(arch: Architecture) -> int:
    """Output projection; low-rank output gate."""
    return arch.hidden_size * arch.value_dim + arch.head_v_dim * (arch.hidden_size + arch.value_dim)


def _memory(arch: Architecture, seq_len: int, compute: int) -> tuple[int, int]:
    heads, keys, values, chunk = arch.num_heads, arch.key_dim, arch.value_dim, chunk_length(arch, seq_len)
    # as Gated DeltaNet, with a decay per key dimension, both low-rank inputs, and scores beside the inverse
    decay = keys + 2 * arch.head_v_dim
    saved = compute * (2 * (2 * keys + values) + decay + 2 * heads * chunk + heads) + 3 * FP32 * heads
    # fp32: summed decays; dq, dk and dg in two parts; the gradients of scores and inverse; beta's in two parts
    # compute dtype: w, decayed q and k; u, the new values, dv, the output's gradient
    fp32 = FP32 * (7 * keys + 2 * heads * chunk + 2 * heads)
    return saved, fp32 + compute * (3 * keys + 4 * values + shared.state_elements(arch, seq_len))


register_model(
    ModelFacts(
        name="kda",
        title="KDA",
        matched=shared.matched_by_head_dim(_parameters),
        flops=shared.delta_rule_flops(_projections),
        memory=MixerMemory(linears=6, gated=True, scan=_memory, later=_later),
        keeps_fp32=True,
        state=shared.expanded_widths,
        chunks=Chunks("fla.layers.kda", "chunk_kda", (32, 64)),
        cpu={
            ("fla.layers.kda", "chunk_kda"): mixers.gated_delta_rule,
            ("fla.layers.kda", "fused_recurrent_kda"): mixers.gated_delta_rule,
        },
    )
)
