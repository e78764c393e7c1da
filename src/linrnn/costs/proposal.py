"""The study's proposal's own account of memory, FLOPs and traffic, to stand beside the full one.

Its formulas are kept as they were written, with what they leave out: one head's states, activations of four
tensors a layer, no projections or MLPs among the FLOPs, no weight among CCE's reads. (The formula of its chunk
states has no batch, the number beside it has.) None stands for a model that the formulas do not know.
"""

from linrnn.costs.mixers import FLOPS_OF_MIXERS, chunk_length
from linrnn.models.architecture import Architecture

BF16 = 2  # bytes


def proposal_memory(arch: Architecture, batch_size: int, seq_len: int) -> dict[str, int] | None:
    """Its table "Memory breakdown", bytes: logits, chunk states, activations, weights."""
    if arch.model not in FLOPS_OF_MIXERS:
        return None
    layers, d = arch.num_layers, arch.hidden_size
    chunks = -(-seq_len // chunk_length(arch, seq_len))
    return {
        "logits": batch_size * seq_len * arch.vocab_size * BF16,
        "chunk_states": batch_size * layers * chunks * arch.head_k_dim * arch.head_v_dim * BF16,
        "activations": batch_size * layers * seq_len * d * 4 * BF16,
        "weights": arch.n_parameters * BF16,
    }


def proposal_flops(arch: Architecture, seq_len: int) -> dict[str, int] | None:
    """Its table "Relative impact", forward FLOPs of one sequence: all layers' mixing, and the vocabulary product."""
    if arch.model not in FLOPS_OF_MIXERS:
        return None
    t, d = seq_len, arch.hidden_size
    mixing = 4 * t**2 * d if arch.model == "transformer" else 2 * t * arch.head_k_dim * arch.head_v_dim
    return {"mixing": arch.num_layers * mixing, "vocabulary": 2 * t * d * arch.vocab_size}


def proposal_traffic(arch: Architecture, n_tokens: int) -> dict[str, int]:
    """Its table "Net HBM traffic reduction", bytes of the loss layer."""
    return {"standard": 3 * n_tokens * arch.vocab_size * BF16, "cce": n_tokens * arch.hidden_size * BF16}


def recurrent_state_bytes(arch: Architecture, batch_size: int, seq_len: int, compute: int) -> int | None:
    """States of one layer at every chunk's start, all heads; 0 for attention.

    FLA makes them in a layer's forward pass, drops them, and makes them again in its backward pass: those of one
    layer exist at a time.
    """
    if arch.model not in FLOPS_OF_MIXERS:
        return None
    if arch.model == "transformer":
        return 0
    chunks = -(-seq_len // chunk_length(arch, seq_len))
    return batch_size * chunks * arch.num_heads * arch.head_k_dim * arch.head_v_dim * compute
