"""FLA's recurrent kernels in plain torch, with the signatures that FLA's layers call (see `chunked`).

Shapes: q, k (B, T, H, K); v (B, T, H, V); states (N, H, K, V), or (N, H, V, K) with `state_v_first`. `chunk_size`
changes only the speed. In a packed row (`cu_seqlens`) every document starts from an empty state.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from linrnn.core.errors import UnsupportedError
from linrnn.models.cpu_ops import chunked


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated linear attention with log forget gates g (B, T, H, K)."""
    _check_packing(cu_seqlens, initial_state, output_final_state)
    with torch.autocast(q.device.type, enabled=False):
        output, state = chunked.gla(
            q,
            k,
            v,
            g,
            scale or q.shape[-1] ** -0.5,
            _k_first(initial_state, state_v_first),
            cu_seqlens,
            chunk_size,
        )
    return output, _k_first(state, state_v_first) if output_final_state else None


def fused_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The function that FLA's layer calls at 64 tokens or fewer."""
    return chunk_gla(q, k, v, gk, None, initial_state, output_final_state, state_v_first, cu_seqlens)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule of Gated DeltaNet (g (B, T, H)) and of KDA (g (B, T, H, K)); beta (B, T, H).

    With `use_gate_in_kernel` the log-decay is −exp(A_log) · softplus(g + dt_bias), A_log (H,), dt_bias (H,) or (H·K,).
    The signature is wide because this function replaces FLA's, which has the same one.
    """
    _check_packing(cu_seqlens, initial_state, output_final_state)
    if q.shape[2] != v.shape[2] or safe_gate or lower_bound is not None:
        raise UnsupportedError(
            "grouped values and bounded gates have no CPU version in linrnn.models.cpu_ops", "run it on a GPU"
        )
    with torch.autocast(q.device.type, enabled=False):
        g = g.unsqueeze(-1) if g.dim() == 3 else g
        if use_qk_l2norm_in_kernel:
            q, k = _l2_normalised(q), _l2_normalised(k)
        if use_beta_sigmoid_in_kernel:
            beta = torch.sigmoid(_fp32(beta)) * (2 if allow_neg_eigval else 1)
        if use_gate_in_kernel:
            assert A_log is not None
            g = _fp32(g) if dt_bias is None else _fp32(g) + dt_bias.view(g.shape[2], -1)
            g = -_fp32(A_log).exp()[:, None] * F.softplus(g)
        output, state = chunked.delta_rule(
            q,
            k,
            v,
            g,
            beta,
            scale or q.shape[-1] ** -0.5,
            _k_first(initial_state, state_v_first),
            cu_seqlens,
            chunk_size,
        )
    return output, _k_first(state, state_v_first) if output_final_state else None


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """DeltaNet's rule: the gated delta rule without decay."""
    return gated_delta_rule(
        q,
        k,
        v,
        torch.zeros_like(beta, dtype=torch.float32),
        beta,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
    )


def chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """RetNet's retention: head h decays by 1 − 2^(−5−h) at every token (Sun et al. 2023, arXiv:2307.08621)."""
    heads = torch.arange(q.shape[2], dtype=torch.float32, device=q.device)
    g = torch.log1p(-torch.exp2(-5 - heads)).view(1, 1, -1, 1).expand(*q.shape[:3], 1)
    return chunk_gla(q, k, v, g, None, initial_state, output_final_state, False, cu_seqlens)


def chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention without decay."""
    if normalize:
        raise UnsupportedError(
            "linear attention whose output is normalised has no CPU version in linrnn.models.cpu_ops", "run it on a GPU"
        )
    g = torch.zeros(*q.shape[:3], 1, device=q.device)
    return chunk_gla(q, k, v, g, None, initial_state, output_final_state, False, cu_seqlens)


def _l2_normalised(x: Tensor) -> Tensor:
    x = _fp32(x)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _k_first(state: Tensor | None, state_v_first: bool) -> Tensor | None:
    return state.mT if state is not None and state_v_first else state


def _check_packing(cu_seqlens: Tensor | None, initial_state: Tensor | None, output_final_state: bool) -> None:
    if cu_seqlens is not None and (initial_state is not None or output_final_state):
        raise UnsupportedError(
            "packed documents with a state have no CPU version in linrnn.models.cpu_ops",
            "pass use_cache=False, or one document per row",
        )
