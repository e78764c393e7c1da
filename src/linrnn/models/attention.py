"""Causal attention for FLA's `Attention` layer through torch's scaled_dot_product_attention, on CPU and GPU.

FLA calls the flash_attn package, which few machines have. The two functions below have its signatures. They replace
flash_attn even where it is installed, so that results do not depend on it.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from linrnn.core.errors import UnsupportedError
from linrnn.models.fla_import import import_fla


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window_size: tuple[int, int] = (-1, -1)
) -> Tensor:
    """Causal attention of q (B, T, H, D) on k, v (B, S, H, D), S ≥ T. The last query sees all S keys."""
    if not causal or tuple(window_size) != (-1, -1):
        raise UnsupportedError(
            "attention here is causal and without a window", "use FLA's Attention without window_size"
        )
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if q.shape[2] == k.shape[2]:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    from torch.nn.attention.bias import causal_lower_right  # imports torch's compiler, a second: only here

    mask = causal_lower_right(q.shape[2], k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """As :func:`flash_attn_func` within each document of packed q, k, v (T, H, D), bounded by `cu_seqlens_q`."""
    lengths = cu_seqlens_q.diff().tolist()
    documents = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    outputs = [
        flash_attn_func(*(x[None] for x in document), causal=causal, window_size=window_size)[0]
        for document in documents
    ]
    return torch.cat(outputs)


def install_sdpa() -> None:
    """Put both functions where FLA's Attention looks them up. Calling it again changes nothing."""
    module = import_fla("fla.layers.attn")
    module.flash_attn_func = flash_attn_func
    module.flash_attn_varlen_func = torch.compiler.disable(flash_attn_varlen_func)  # imports torch's compiler
