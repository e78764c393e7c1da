"""Models that `model=fla` alone trains, and that need a GPU: FLOPs of their recurrences, for one token in one layer.

As :mod:`linrnn.costs.flops` counts, from the model's definition: a product of the K x V state with a vector, and an
update of the state by the outer product of two vectors, are 2KV each. Decays and softmax do not count.
"""

from functools import partial
from typing import Any

from linrnn.models.facts import ModelFacts, register_model
from linrnn.models.zoo import shared


def hgrn2(fla: Any) -> int:
    """GLA's, with `expand_ratio` keys for each head (arXiv:2404.07904): 2 x 2KV."""
    return 4 * fla.expand_ratio * fla.hidden_size


def mamba2(fla: Any) -> int:
    """Updating the state, B xᵀ, and reading it, Cᵀ S (arXiv:2405.21060, section 3): 2 x 2KV."""
    return 4 * fla.state_size * fla.num_heads * fla.head_dim


def rwkv7(fla: Any) -> int | None:
    """S (diag(w) - κ̂ᵀ (a ⊙ κ̂)) + vᵀ k̃, read by r (arXiv:2503.14456, equation 17): two reads, two updates, 2KV each."""
    [*values] = set(fla.value_dim)
    return 8 * fla.head_dim * values[0] if len(values) == 1 else None


register_model(
    ModelFacts("hgrn2", "HGRN2", recurrence=hgrn2, sized=lambda width, heads: {"expand_ratio": width // heads})
)
register_model(ModelFacts("mamba2", "Mamba-2", recurrence=mamba2))
register_model(ModelFacts("retnet", "RetNet", recurrence=partial(shared.by_width, shared.DECAY)))
register_model(ModelFacts("rwkv7", "RWKV-7", recurrence=rwkv7))
