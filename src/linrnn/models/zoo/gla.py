"""Gated Linear Attention (arXiv:2312.06635): a decay for every key dimension."""

from linrnn.models.chunk_size import chunk_gla
from linrnn.models.cpu_ops import mixers
from linrnn.models.facts import FP32, Architecture, Chunks, MixerMemory, ModelFacts, chunk_length, register_model
from linrnn.models.zoo import shared

GLA_GATE_RANK = 16  # inner width of the low-rank forget gate


def _projections(arch: Architecture) -> list[tuple[int, int]]:
    d, rank = arch.hidden_size, GLA_GATE_RANK
    gates = [(d, arch.value_dim), (d, rank), (rank, arch.key_dim)]  # output gate, decay
    return [*shared.query_key_value_output(arch), *gates]


def _saved(arch: Architecture, seq_len: int, compute: int) -> int:
    """q, k, v; the low-rank gate before and after its logsigmoid; scores in fp32."""
    scores = FP32 * arch.num_heads * chunk_length(arch, seq_len)
    return compute * (4 * arch.key_dim + arch.value_dim + GLA_GATE_RANK) + scores


register_model(
    ModelFacts(
        name="gla",
        title="GLA",
        matched=shared.matched_by_width(_projections, lambda arch: arch.key_dim + arch.head_v_dim),  # gate's bias, norm
        flops=shared.linear_attention_flops(_projections),
        memory=MixerMemory(linears=5, gated=True, scan=_saved),
        keeps_fp32=False,
        # FLA fixes chunks of 64. 256 is too large: its backward pass would hold 256 x 256 fp32 scores (256 KiB) in
        # shared memory, which has at most 227 KiB.
        chunks=Chunks("fla.layers.gla", "chunk_gla", (64, 128), own=chunk_gla, recurrent_tokens=64),
        cpu={
            ("fla.layers.gla", "chunk_gla"): mixers.chunk_gla,
            ("fla.layers.gla", "fused_recurrent_gla"): mixers.fused_recurrent_gla,
        },
        state=lambda fla: shared.widths(fla, fla.expand_k, fla.expand_v),
    )
)
