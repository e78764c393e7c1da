"""GPU memory of one layer from formulas: what it saves for the backward pass, and what that pass holds in addition.

The formulas follow the source of FLA 0.6.0. They give bytes per token; saved scalars per token and head count. A new
model needs an entry in `MEMORY_OF_MIXERS`. Without one its memory is unknown.
"""

from collections.abc import Callable
from dataclasses import dataclass

from linrnn.costs.mixers import FLOPS_OF_MIXERS, chunk_length
from linrnn.losses.formulas import FP32
from linrnn.models.architecture import GLA_GATE_RANK, Architecture


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
    """

    mixer: int
    mlp: int
    norm: int
    mlp_backward: int
    mixer_backward: int


@dataclass(frozen=True)
class MixerMemory:
    """Formulas of one model.

    Attributes:
        linears: number of linear layers that take the first norm's output.
        gated: whether a gated norm follows the scan.
        scan: (architecture, sequence length, bytes per element in products) -> (bytes per token that the recurrent
            kernel or attention saves, bytes per token that its backward pass holds in addition).
    """

    linears: int
    gated: bool
    scan: Callable[[Architecture, int, int], tuple[int, int]]


def layer_memory(arch: Architecture, seq_len: int, *, compute: int, kept: int, autocast: bool) -> LayerMemory | None:
    """Memory of one layer; None for a model without formulas.

    Args:
        compute: bytes per element in products.
        kept: bytes per element of parameters and the residual stream.

    Under autocast the residual stream is fp32 (embeddings are not cast). Each linear layer of the mixer then saves its
    own cast of the norm's output; otherwise they share one. The second norm's output has the dtype of the mixer's
    output, and the MLP's two projections share it.
    """
    if (mixer := MEMORY_OF_MIXERS.get(arch.model)) is None:
        return None
    d, values, width = arch.hidden_size, arch.value_dim, arch.intermediate_size
    inputs = compute * d * (mixer.linears if autocast else 1)
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
    return LayerMemory(inputs + scan + outputs, mlp, norm, mlp_backward, scan_backward + 2 * kept * d - freed)


def _states(arch: Architecture, seq_len: int) -> int:
    """Elements per token of every chunk's state, and of their gradients."""
    return 2 * arch.key_dim * arch.head_v_dim // chunk_length(arch, seq_len)


def _gla(arch: Architecture, seq_len: int, compute: int) -> tuple[int, int]:
    heads, keys, values, chunk = arch.num_heads, arch.key_dim, arch.value_dim, chunk_length(arch, seq_len)
    # q, k, v; the low-rank gate before and after its logsigmoid; scores in fp32
    saved = compute * (2 * keys + values + 2 * keys + GLA_GATE_RANK) + FP32 * heads * chunk
    # summed decays; dq and dk in two parts, dg; the scores' gradient; dv and the output's gradient
    return saved, FP32 * (6 * keys + heads * chunk + _states(arch, seq_len)) + compute * 2 * values


def _gated_deltanet(arch: Architecture, seq_len: int, compute: int) -> tuple[int, int]:
    heads, keys, values, chunk = arch.num_heads, arch.key_dim, arch.value_dim, chunk_length(arch, seq_len)
    # the convolutions' inputs; normalised q and k; v; the inverse; scalars per head: two norms, decay and beta
    saved = compute * (2 * (2 * keys + values) + heads * chunk + 2 * heads) + 4 * FP32 * heads
    # w, dq, dk in two parts, dw; u, the new values, dv in two parts, the output's gradient
    return saved, compute * (5 * keys + 5 * values + _states(arch, seq_len))


def _kda(arch: Architecture, seq_len: int, compute: int) -> tuple[int, int]:
    heads, keys, values, chunk = arch.num_heads, arch.key_dim, arch.value_dim, chunk_length(arch, seq_len)
    # as Gated DeltaNet, with a decay per key dimension, both low-rank inputs, and scores beside the inverse
    decay = keys + 2 * arch.head_v_dim
    saved = compute * (2 * (2 * keys + values) + decay + 2 * heads * chunk + heads) + 3 * FP32 * heads
    # fp32: summed decays; dq, dk and dg in two parts; the gradients of scores and inverse
    # compute dtype: w, decayed q and k; u, the new values, dv, the output's gradient
    fp32 = FP32 * (7 * keys + 2 * heads * chunk)
    return saved, fp32 + compute * (3 * keys + 4 * values + _states(arch, seq_len))


def _attention(arch: Architecture, seq_len: int, compute: int) -> tuple[int, int]:
    """Saved: rotated q and k, v, log-sum-exp. Backward: their gradients and the output's."""
    keys, values = arch.key_dim, arch.value_dim
    return compute * (2 * keys + values) + FP32 * arch.num_heads, compute * (2 * keys + 2 * values)


MEMORY_OF_MIXERS = {
    "gla": MixerMemory(linears=5, gated=True, scan=_gla),
    "gated_deltanet": MixerMemory(linears=6, gated=True, scan=_gated_deltanet),
    "kda": MixerMemory(linears=6, gated=True, scan=_kda),
    "transformer": MixerMemory(linears=3, gated=False, scan=_attention),
}


def recurrent_state_bytes(arch: Architecture, batch_size: int, seq_len: int, compute: int) -> int | None:
    """Bytes of one layer's states at the start of every chunk, all heads; 0 for attention.

    FLA computes the states in a layer's forward pass, frees them, and computes them again in its backward pass. The
    states of only one layer exist at a time.
    """
    if arch.model not in FLOPS_OF_MIXERS:
        return None
    if arch.model == "transformer":
        return 0
    chunks = -(-seq_len // chunk_length(arch, seq_len))
    return batch_size * chunks * arch.num_heads * arch.head_k_dim * arch.head_v_dim * compute
