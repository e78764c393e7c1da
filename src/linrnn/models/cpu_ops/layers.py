"""FLA's small fused functions in plain torch, with the signatures that FLA's layers call.

Norms and rotations compute in fp32 and return the dtype of their input, as FLA's kernels do. A convolution's state is
the last W inputs of each sequence, (N, D, W).
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from linrnn.core.errors import UnsupportedError


def _not_here(option: str) -> UnsupportedError:
    return UnsupportedError(f"{option} has no CPU version in linrnn.models.cpu_ops", "run it on a GPU")


def documents(cu_seqlens: Tensor, *packed: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The parts of tensors (1, T, …) that belong to each document, bounded by `cu_seqlens` (n_documents + 1,).

    A document without tokens has no part.
    """
    lengths = [length for length in cu_seqlens.diff().tolist() if length]
    return zip(*(x.split(lengths, 1) for x in packed), strict=True)


# --------------------------------------------------------------------------------------- norms and MLP
def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """RMSNorm of x (+ residual). With `prenorm` it also returns the sum, in the residual's dtype."""
    total = x if residual is None else x + residual
    total = total.float() if residual_in_fp32 else total
    y = _normalised(total, weight, eps).to(x.dtype)
    if bias is not None:
        y = y + bias
    return (y, total) if prenorm else y


def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    """RMSNorm of x, times the activation of the gate g (`swish`, `silu` or `sigmoid`); both (…, D)."""
    if bias is not None or residual is not None or prenorm or residual_in_fp32:
        raise _not_here("a gated norm with bias or residual")
    gate = torch.sigmoid(g.float()) if activation == "sigmoid" else F.silu(g.float())
    return (_normalised(x, weight, eps) * gate).to(x.dtype)


def _normalised(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.rms_norm(x, x.shape[-1:], None if weight is None else weight.to(x.dtype), eps)


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    """silu(x) · y."""
    return F.silu(x) * y


def swiglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(silu(x) · y) Wᵀ + bias."""
    return F.linear(swiglu(x, y), weight, bias)


# ----------------------------------------------------------------------------------- position and time
def rotary_embedding(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> Tensor:
    """Rotate the two halves of each head of x (B, T, H, D) by tables cos, sin (positions, D / 2).

    Positions start at `seqlen_offsets`. In a packed row they start again in each document.
    """
    if interleaved or inplace or isinstance(seqlen_offsets, Tensor):
        raise _not_here("an interleaved, in-place or per-sequence rotary embedding")
    lengths = [x.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist()
    positions_T = torch.cat([torch.arange(length, device=x.device) for length in lengths])
    cos_T1D, sin_T1D = (table[positions_T + seqlen_offsets, None].float() for table in (cos, sin))
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos_T1D - second * sin_T1D, second * cos_T1D + first * sin_T1D], -1).to(x.dtype)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = "triton",
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Depthwise causal convolution of x (B, T, D) with weight (D, W). It does not cross document borders."""
    if residual is not None or (cu_seqlens is not None and (initial_state is not None or output_final_state)):
        raise _not_here("a convolution with a residual, or with documents and a state,")
    if cu_seqlens is not None:
        parts = [causal_conv1d(one, weight, bias, activation=activation)[0] for (one,) in documents(cu_seqlens, x)]
        return torch.cat(parts, 1), None
    n_tokens, width = x.shape[1], weight.shape[1]
    if initial_state is None:
        padded = F.pad(x, (0, 0, width - 1, 0))
    else:
        padded = torch.cat([initial_state[..., 1:].mT.to(x.dtype), x], 1)
    y = x * weight[:, -1]
    for lag in range(1, width):
        y = y + padded[:, width - 1 - lag :][:, :n_tokens] * weight[:, -1 - lag]
    state = F.pad(padded, (0, 0, 1, 0))[:, -width:].mT if output_final_state else None
    return _activated(y, bias, activation), state


def causal_conv1d_update(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """One token per sequence: x (N, 1, D), weight (D, W). The state (N, D, W) is updated in place."""
    if residual is not None or weight is None:
        raise _not_here("a convolution step with a residual or without weights")
    cache.copy_(torch.cat([cache[..., 1:], x.reshape(len(cache), -1, 1)], -1))
    return _activated((cache * weight).sum(-1), bias, activation).view_as(x).to(x.dtype), cache


def _activated(y: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    y = y if bias is None else y + bias
    return y if activation is None else F.silu(y)
