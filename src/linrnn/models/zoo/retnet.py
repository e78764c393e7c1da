"""RetNet (arXiv:2307.08621): linear attention with a fixed decay per head, rotary positions."""

from linrnn.models.cpu_ops import mixers
from linrnn.models.facts import ModelFacts, register_model
from linrnn.models.zoo import shared

_LAYER = "fla.layers.multiscale_retention"

register_model(
    ModelFacts(
        name="retnet",
        title="RetNet",
        flops=shared.linear_attention_flops(shared.query_key_value_output),
        cpu={
            (_LAYER, "chunk_retention"): mixers.chunk_retention,
            (_LAYER, "fused_chunk_retention"): mixers.chunk_retention,
            (_LAYER, "fused_recurrent_retention"): mixers.chunk_retention,
        },
        state=lambda fla: shared.widths(fla, fla.expand_k, fla.expand_v),
    )
)
