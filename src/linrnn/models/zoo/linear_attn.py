"""Linear attention without decay, with a feature map of queries and keys."""

from linrnn.models.cpu_ops import mixers
from linrnn.models.facts import ModelFacts, register_model

_LAYER = "fla.layers.linear_attn"

# No FLOPs: FLA's default feature map has linear layers that each head takes, and others change the keys' dimension.
register_model(
    ModelFacts(
        name="linear_attn",
        title="Linear attention",
        cpu={
            (_LAYER, "chunk_linear_attn"): mixers.chunk_linear_attn,
            (_LAYER, "fused_chunk_linear_attn"): mixers.chunk_linear_attn,
            (_LAYER, "fused_recurrent_linear_attn"): mixers.chunk_linear_attn,
        },
    )
)
