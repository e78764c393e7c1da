"""Models that `model=fla` alone trains, and that need a GPU: FLOPs of their recurrences, for one token in one layer.

As :mod:`linrnn.costs.flops` counts, from the model's definition: a product of the K x V state with a vector, and an
update of the state by the outer product of two vectors, are 2KV each. Decays and softmax do not count.
"""

from typing import Any

from linrnn.models.facts import ModelFacts, register_model


def gated_delta_product(fla: Any) -> int:
    """A product of n Householder matrices (arXiv:2502.10297, section 3): n times reading and updating, then qᵀ S."""
    values = fla.num_heads * int(fla.head_dim * fla.expand_v)
    return 2 * (2 * fla.num_householder + 1) * fla.head_dim * values


def gated_slot_attention(fla: Any) -> int:
    """Two GLAs, whose states are slots x keys and slots x values (arXiv:2409.07146, section 3.2): 2 x 2KV of each."""
    keys, values = (int(fla.hidden_size * ratio) for ratio in (fla.expand_k, fla.expand_v))
    return 4 * (fla.num_slots or keys // fla.num_heads) * (keys + values)


def hgrn2(fla: Any) -> int:
    """GLA's, with `expand_ratio` keys for each head (arXiv:2404.07904): 2 x 2KV."""
    return 4 * fla.expand_ratio * fla.hidden_size


def mamba2(fla: Any) -> int:
    """Updating the state, B xᵀ, and reading it, Cᵀ S (arXiv:2405.21060, section 3): 2 x 2KV."""
    return 4 * fla.state_size * fla.num_heads * fla.head_dim


def retnet(fla: Any) -> int:
    """Linear attention with a fixed decay for each head (arXiv:2307.08621): 2 x 2KV."""
    keys, values = (round(fla.hidden_size * ratio) for ratio in (fla.expand_k, fla.expand_v))
    return 4 * keys * values // fla.num_heads


def rwkv7(fla: Any) -> int | None:
    """S (diag(w) - κ̂ᵀ (a ⊙ κ̂)) + vᵀ k̃, read by r (arXiv:2503.14456, equation 17): two reads, two updates, 2KV each."""
    [*values] = set(fla.value_dim)
    return 8 * fla.head_dim * values[0] if len(values) == 1 else None


register_model(ModelFacts("gated_deltaproduct", "Gated DeltaProduct", recurrence=gated_delta_product))
register_model(ModelFacts("gsa", "Gated Slot Attention", recurrence=gated_slot_attention))
register_model(
    ModelFacts("hgrn2", "HGRN2", recurrence=hgrn2, sized=lambda width, heads: {"expand_ratio": width // heads})
)
register_model(ModelFacts("linear_attn", "Linear attention"))
register_model(ModelFacts("mamba2", "Mamba-2", recurrence=mamba2))
register_model(ModelFacts("retnet", "RetNet", recurrence=retnet))
register_model(ModelFacts("rwkv7", "RWKV-7", recurrence=rwkv7))
