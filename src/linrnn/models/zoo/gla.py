"""Gated Linear Attention (arXiv:2312.06635): a decay for every key dimension."""

from functools import partial

from linrnn.models.chunk_size import chunk_gla
from linrnn.models.cpu_ops import mixers
from linrnn.models.facts import FP32, Architecture, Chunks, ModelFacts, chunk_length, register_model
from linrnn.models.zoo import shared

GATE_RANK = 16  # inner width of the low-rank forget gate


class GLA(shared.LinearAttention):
    linears = 5

    def saved(self, arch: Architecture, seq_len: int, compute: int) -> int:
        """q, k, v; the low-rank gate before and after its logsigmoid; scores in fp32."""
        scores = FP32 * arch.num_heads * chunk_length(arch, seq_len)
        return compute * (4 * arch.key_dim + arch.value_dim + GATE_RANK) + scores


register_model(
    ModelFacts(
        name="gla",
        title="GLA",
        mixer=GLA(),
        # FLA fixes chunks of 64, and at 64 tokens or fewer it calls a kernel without chunks. 256 is too large: its
        # backward pass would hold 256 x 256 fp32 scores (256 KiB) in shared memory, which has at most 227 KiB.
        chunks=Chunks("fla.layers.gla", "chunk_gla", (64, 128), own=chunk_gla),
        cpu={
            ("fla.layers.gla", "chunk_gla"): mixers.chunk_gla,
            ("fla.layers.gla", "fused_recurrent_gla"): mixers.fused_recurrent_gla,
        },
        recurrence=partial(shared.by_width, shared.DECAY),
    )
)
