"""GPU memory of one layer from formulas: what it saves for the backward pass, and what that pass needs beside it.

Read off FLA 0.6.0. Bytes a token; scalars of a token and head count where they are saved. A new model gets an entry in
`MEMORY_OF_MIXERS`; without one its memory is unknown.
"""

from collections.abc import Callable
from dataclasses import dataclass

from linrnn.costs.mixers import FLOPS_OF_MIXERS, chunk_length
from linrnn.losses.formulas import FP32
from linrnn.models.architecture import GLA_GATE_RANK, Architecture


@dataclass(frozen=True)
class LayerMemory:
    """Bytes a token.

    Attributes:
        mixer: saved by the token mixer.
        mlp: saved by the MLP.
        norm: saved by each of the two norms: the residual stream before mixer or MLP.
        mlp_backward: held when the MLP's backward pass is at its peak, beside all that the layer has saved.
        mixer_backward: the same of the mixer's, less what has been freed by then (so that it may be negative).
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
        linears: linear layers that take the first norm's output.
        gated: whether a gated norm follows the scan.
        scan: (architecture, sequence length, bytes of an element in products) -> bytes a token that the recurrent
            kernel or attention saves, and that its backward pass holds beside them.
    """

    linears: int
    gated: bool
    scan: Callable[[Architecture, int, int], tuple[int, int]]


def layer_memory(arch: Architecture, seq_len: int, *, compute: int, kept: int, autocast: bool) -> LayerMemory | None:
    """Of one layer, with `compute` bytes an element in products, `kept` in parameters and the residual stream.

    None for a model without formulas. Under autocast the residual stream is fp32 (embeddings are not cast), so that
    each linear layer of the mixer saves a cast of its own of the norm's output; otherwise they share it. The second
    norm's output has the mixer output's dtype and is shared by the MLP's two.
    """
    if (mixer := MEMORY_OF_MIXERS.get(arch.model)) is None:
        return None
    d, values, width = arch.hidden_size, arch.value_dim, arch.intermediate_size
    inputs = compute * d * (mixer.linears if autocast else 1)
    # Attention's output is o_proj's input; a gated norm saves its two inputs and its output.
    outputs = compute * values * 3 + FP32 * arch.num_heads if mixer.gated else compute * values
    scan, scan_backward = mixer.scan(arch, seq_len, compute)
    mlp = compute * (d + 2 * width)  # input, gate and up; their product is computed again
    norm = kept * d + FP32
    # dz, dgate, dup and the output of swiglu; the gradient of the residual stream, under autocast with a cast of it
    mlp_backward = 4 * compute * width + kept * d + (compute * d if autocast else 0)
    # Gone: the MLP, its norm, what the scan's output went through, the output gate's cast of the norm's output.
    freed = mlp + norm + outputs + (compute * d if mixer.gated and autocast else 0)
    # The gradients of the residual stream and of the first norm's output.
    return LayerMemory(inputs + scan + outputs, mlp, norm, mlp_backward, scan_backward + 2 * kept * d - freed)


def _states(arch: Architecture, seq_len: int) -> int:
    """Elements a token of every chunk's state, and their gradients."""
    return 2 * arch.key_dim * arch.head_v_dim // chunk_length(arch, seq_len)


def _gla(arch: Architecture, seq_len: int, compute: int) -> tuple[int, int]:
    heads, keys, values, chunk = arch.num_heads, arch.key_dim, arch.value_dim, chunk_length(arch, seq_len)
    # q, k, v; the low-rank gate, before and after its logsigmoid; scores in fp32
    saved = compute * (2 * keys + values + 2 * keys + GLA_GATE_RANK) + FP32 * heads * chunk
    # decays summed up; dq and dk in two parts, dg; the scores' gradient; dv, its output's
    return saved, FP32 * (6 * keys + heads * chunk + _states(arch, seq_len)) + compute * 2 * values


def _gated_deltanet(arch: Architecture, seq_len: int, compute: int) -> tuple[int, int]:
    heads, keys, values, chunk = arch.num_heads, arch.key_dim, arch.value_dim, chunk_length(arch, seq_len)
    # the convolutions' inputs; normalised q and k, v; the inverse; scalars per head: two norms, decay and beta
    saved = compute * (2 * (2 * keys + values) + heads * chunk + 2 * heads) + 4 * FP32 * heads
    # w, dq, dk in two parts, dw; u, the new values, dv in two parts, its output's
    return saved, compute * (5 * keys + 5 * values + _states(arch, seq_len))


def _kda(arch: Architecture, seq_len: int, compute: int) -> tuple[int, int]:
    heads, keys, values, chunk = arch.num_heads, arch.key_dim, arch.value_dim, chunk_length(arch, seq_len)
    # as Gated DeltaNet's, with the decay per key dimension, both low-rank inputs, scores beside the inverse
    decay = keys + 2 * arch.head_v_dim
    saved = compute * (2 * (2 * keys + values) + decay + 2 * heads * chunk + heads) + 3 * FP32 * heads
    # decays summed up; dq, dk and dg in two parts; the gradients of scores and inverse; w, q and k decayed; u, the new
    # values, dv, its output's
    fp32 = FP32 * (7 * keys + 2 * heads * chunk)
    return saved, fp32 + compute * (3 * keys + 4 * values + _states(arch, seq_len))


def _attention(arch: Architecture, seq_len: int, compute: int) -> tuple[int, int]:
    """Rotated q and k, v, log-sum-exp; their gradients and the output's."""
    keys, values = arch.key_dim, arch.value_dim
    return compute * (2 * keys + values) + FP32 * arch.num_heads, compute * (2 * keys + 2 * values)


MEMORY_OF_MIXERS = {
    "gla": MixerMemory(linears=5, gated=True, scan=_gla),
    "gated_deltanet": MixerMemory(linears=6, gated=True, scan=_gated_deltanet),
    "kda": MixerMemory(linears=6, gated=True, scan=_kda),
    "transformer": MixerMemory(linears=3, gated=False, scan=_attention),
}


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
