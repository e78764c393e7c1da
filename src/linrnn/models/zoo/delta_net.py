"""DeltaNet (arXiv:2406.06484): delta rule without decay, short convolutions."""

from functools import partial

from linrnn.models.cpu_ops import mixers
from linrnn.models.facts import ModelFacts, register_model
from linrnn.models.zoo import shared

register_model(
    ModelFacts(
        name="delta_net",
        title="DeltaNet",
        cpu={
            ("fla.layers.delta_net", "chunk_delta_rule"): mixers.chunk_delta_rule,
            ("fla.layers.delta_net", "fused_recurrent_delta_rule"): mixers.chunk_delta_rule,
        },
        recurrence=partial(shared.by_width, shared.DELTA),
    )
)
