"""DeltaNet (arXiv:2406.06484): delta rule without decay, short convolutions."""

from linrnn.models.cpu_ops import mixers
from linrnn.models.facts import ModelFacts, register_model
from linrnn.models.zoo import shared

register_model(
    ModelFacts(
        name="delta_net",
        title="DeltaNet",
        flops=shared.delta_rule_flops(shared.query_key_value_output),
        cpu={
            ("fla.layers.delta_net", "chunk_delta_rule"): mixers.chunk_delta_rule,
            ("fla.layers.delta_net", "fused_recurrent_delta_rule"): mixers.chunk_delta_rule,
        },
        state=lambda fla: shared.widths(fla, fla.expand_k, fla.expand_v),
    )
)
