"""HGRN2 (arXiv:2404.07904): GLA's recurrence with keys that are one minus the forget gate."""

from torch.nn import functional

from linrnn.models.cpu_ops import layers, mixers
from linrnn.models.facts import ModelFacts, register_model
from linrnn.models.zoo import shared

register_model(
    ModelFacts(
        name="hgrn2",
        title="HGRN2",
        flops=shared.linear_attention_flops(shared.query_key_value_output),
        cpu={
            ("fla.layers.hgrn2", "chunk_gla"): mixers.chunk_gla,
            ("fla.layers.hgrn2", "fused_recurrent_gla"): mixers.fused_recurrent_gla,
            ("fla.layers.hgrn2", "rms_norm_linear"): layers.rms_norm_linear,
            ("fla.layers.hgrn2", "swish"): functional.silu,
        },
        sized=lambda width, heads: {"expand_ratio": width // heads},
        state=lambda fla: (
            None if fla.attnres_block_size else (fla.num_heads, fla.expand_ratio, fla.hidden_size // fla.num_heads)
        ),
    )
)
