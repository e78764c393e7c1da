"""GPU memory of one layer from formulas: what it saves for the backward pass, and what that pass holds in addition.

The formulas follow the source of FLA 0.6.0. They give bytes per token; saved scalars per token and head count. Those of
a mixer stand in the model's file (:mod:`linrnn.models.zoo`). Without them its memory is unknown.
"""

from dataclasses import dataclass

from linrnn.models.architecture import Architecture
from linrnn.models.facts import FP32, chunk_length, facts_of


@dataclass(frozen=True)
class LayerMemory:
    """Memory of one layer in bytes per token.

    Attributes:
        mixer: saved by the token mixer.
        mlp: saved by the MLP.
        norm: saved by each of the two norms: the residual stream before mixer or MLP.
        mlp_backward: held at the peak of the MLP's backward pass, in addition to all that the layer has saved.
        mixer_backward: the same for the mixer's backward pass, minus what has been freed by then (so it may be
            negative).
        later: parameters of the mixer's linear layers that run after the scan.
    """

    mixer: int
    mlp: int
    norm: int
    mlp_backward: int
    mixer_backward: int
    later: int

    @property
    def saved(self) -> int:
        """All that the layer saves for its backward pass."""
        return self.mixer + self.mlp + 2 * self.norm


def layer_memory(
    arch: Architecture, seq_len: int, *, compute: int, kept: int, autocast: bool, compiled: bool
) -> LayerMemory | None:
    """Memory of one layer; None for a model without formulas.

    Args:
        compute: bytes per element in products.
        kept: bytes per element of parameters and the residual stream.
        compiled: whether torch.compile compiles the blocks.

    Under autocast the residual stream is fp32 (embeddings are not cast). Each linear layer of the mixer then saves its
    own cast of the norm's output, or each graph of compiled blocks one; otherwise they share one. The second norm's
    output has the dtype of the mixer's output, and the MLP's two projections share it. A shared projection stands in
    place of those of queries, keys and values, and its result is their one input.
    """
    if (mixer := facts_of(arch.model).memory) is None:
        return None
    d, values, width = arch.hidden_size, arch.value_dim, arch.intermediate_size
    rank = arch.shared_projection_rank
    linears = mixer.linears if rank is None else mixer.linears - 2
    casts = linears if mixer.casts_compiled is None or not compiled else mixer.casts_compiled
    inputs = compute * (d * (casts if autocast else 1) + (rank or 0))
    # Attention's output is o_proj's input; a gated norm saves its two inputs and its output.
    outputs = compute * values * 3 + FP32 * arch.num_heads if mixer.gated else compute * values
    scan, scan_backward = mixer.scan(arch, seq_len, compute)
    mlp = compute * (d + 2 * width)  # input, gate and up; the product of gate and up is recomputed
    norm = kept * d + FP32
    # dz, dgate, dup and the output of swiglu; the gradient of the residual stream, and under autocast its cast
    mlp_backward = 4 * compute * width + kept * d + (compute * d if autocast else 0)
    # Freed by then: the MLP, its norm, all that follows the scan, the output gate's cast of the norm's output.
    freed = mlp + norm + outputs + (compute * d if mixer.gated and autocast else 0)
    # The gradients of the residual stream and of the first norm's output.
    mixer_backward = scan_backward + 2 * kept * d - freed
    return LayerMemory(inputs + scan + outputs, mlp, norm, mlp_backward, mixer_backward, mixer.later(arch))


def recurrent_state_bytes(arch: Architecture, batch_size: int, seq_len: int, compute: int) -> int | None:
    """Bytes of one layer's states at the start of every chunk, all heads; 0 for attention.

    FLA computes the states in a layer's forward pass, frees them, and computes them again in its backward pass. The
    states of only one layer exist at a time.
    """
    if (mixer := facts_of(arch.model).flops) is None:
        return None
    if not mixer.recurrent:
        return 0
    chunks = -(-seq_len // chunk_length(arch, seq_len))
    return batch_size * chunks * arch.num_heads * arch.head_k_dim * arch.head_v_dim * compute
