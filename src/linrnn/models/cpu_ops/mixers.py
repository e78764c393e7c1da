"""FLA's recurrent kernels in plain torch, chunked, with the signatures that FLA's layers call. Autograd differentiates.

Per head, with a state S (K × V) and log-decays g ≤ 0 (a vector over K, or one number for Gated DeltaNet):

    GLA          S_t = diag(exp g_t) S_{t−1} + k_t v_tᵀ
    delta rules  S_t = diag(exp g_t) S_{t−1} + β_t k_t (v_t − S̃ᵀ k_t)ᵀ     with S̃ = diag(exp g_t) S_{t−1}
    output       o_t = scale · S_tᵀ q_t

Inside a chunk of C tokens the recurrence is a masked product. A Python loop over the T / C chunks carries the state.
Decays enter as exp(b_i − b_j) with i ≥ j and b the running sum of g. All such factors are at most 1, so nothing
overflows, however strong the gate.

Sources: GLA, arXiv:2312.06635, section 4; the WY form of the delta rule, arXiv:2406.06484, section 3, with decay as in
arXiv:2412.06464 and arXiv:2510.26692.

Shapes: q, k (B, T, H, K); v (B, T, H, V); g (B, T, H, K) or (B, T, H, 1); beta (B, T, H); states (N, H, K, V) for N
sequences, whatever `state_v_first` says: FLA's layers hand them back as they got them. In a packed row (`cu_seqlens`)
every document starts from an empty state. `chunk_size` changes only the speed. Work is done in fp32 (fp64 for fp64
inputs); results have v's dtype.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from linrnn.core.errors import UnsupportedError
from linrnn.models.cpu_ops.layers import documents

CHUNK_SIZE = 64
Result = tuple[Tensor, Tensor | None]


def split(x_BTHD: Tensor, size: int) -> Tensor:
    """(B, T, H, D) to chunks (B, H, n, size, D). The last one is filled up with zeros."""
    padded = F.pad(x_BTHD, (0, 0, 0, 0, 0, -x_BTHD.shape[1] % size))
    return padded.unflatten(1, (-1, size)).permute(0, 3, 1, 2, 4).contiguous()


def join(x_BHNCD: Tensor, n_tokens: int) -> Tensor:
    """The inverse of `split`."""
    return x_BHNCD.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :n_tokens]


def running_sum(g: Tensor) -> Tensor:
    """Inclusive sums along the chunk (…, C, D). A product with a triangle of ones is faster than cumsum."""
    return torch.ones(g.shape[-2], g.shape[-2], dtype=g.dtype, device=g.device).tril() @ g


def decayed_scores(rows: Sequence[Tensor], keys: Tensor, b: Tensor) -> list[Tensor]:
    """For each x in `rows`: A[i, j] = Σ_d x[i, d] keys[j, d] exp(b[i, d] − b[j, d]) for j ≤ i, else 0.

    With one decay per token the differences b[i] − b[j] are formed directly. With a vector of decays that would take
    C·K numbers per token. Instead the triangle is built from blocks whose size doubles each time. A block of later rows
    against earlier keys uses decays relative to the last earlier key m: b[i] − b[m] and b[m] − b[j], both ≤ 0.

    Args:
        rows, keys: (…, C, K), C a power of two.
        b: running sums of the log-decay, (…, C, K), or (…, C, 1) for one decay per token.
    """
    size = keys.shape[-2]
    if b.shape[-1] == 1:
        upper = torch.ones(size, size, dtype=torch.bool, device=b.device).triu(1)
        decay = (b - b.mT).masked_fill(upper, float("-inf")).exp()
        return [(x @ keys.mT) * decay for x in rows]
    scores = [(x * keys).sum(-1)[..., None, None] for x in rows]
    half = 1
    while half < size:

        def halves(x: Tensor, half: int = half) -> tuple[Tensor, ...]:
            return x.unflatten(-2, (-1, 2, half)).unbind(-3)

        (k_early, _), (b_early, b_late) = halves(keys), halves(b)
        middle = b_early[..., -1:, :]
        k_decayed, row_decay = k_early * (middle - b_early).exp(), (b_late - middle).exp()
        for n, x in enumerate(rows):
            corner = (halves(x)[1] * row_decay) @ k_decayed.mT
            early, late = scores[n].unflatten(-3, (-1, 2)).unbind(-3)
            scores[n] = torch.cat([F.pad(early, (0, half)), torch.cat([corner, late], -1)], -2)
        half *= 2
    return [x.squeeze(-3) for x in scores]


def in_chunks(
    rule: Callable[..., tuple[Tensor, Tensor]],
    tensors: Sequence[Tensor],
    state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    chunk_size: int | None,
) -> Result:
    """Apply a rule to rows (B, T, H, ·), or to each document of a packed row, bounded by `cu_seqlens`.

    The rule takes chunks of the tensors, and a state or None. It returns chunks of the output, and the last state.
    """
    n_tokens = tensors[0].shape[1]
    if cu_seqlens is None:
        size = chunk_size or min(CHUNK_SIZE, 1 << (n_tokens - 1).bit_length())
        output, state = rule(*(split(x, size) for x in tensors), state)
        return join(output, n_tokens), state if output_final_state else None
    if state is not None or output_final_state:
        raise UnsupportedError(
            "packed documents with a state have no CPU version in linrnn.models.cpu_ops",
            "pass use_cache=False, or one document per row",
        )
    parts = [in_chunks(rule, one, None, False, None, chunk_size)[0] for one in documents(cu_seqlens, *tensors)]
    return torch.cat(parts, 1), None


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
) -> Result:
    """Gated linear attention with log forget gates g. Returns the output (B, T, H, V) and, if asked for, the state."""
    with torch.autocast(q.device.type, enabled=False):
        tensors = _fp32(q) * (scale or q.shape[-1] ** -0.5), _fp32(k), _fp32(v), _fp32(g)
        output, state = in_chunks(_gla, tensors, initial_state, output_final_state, cu_seqlens, chunk_size)
    return output.to(v.dtype), state


def _gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    b = running_sum(g)
    total = b[..., -1:, :]
    (scores,) = decayed_scores([q], k, b)
    updates = (k * (total - b).exp()).mT @ v
    states = []
    state = _first_state(state, updates[:, :, 0])
    for update, decay in zip(updates.unbind(2), total.exp().mT.unbind(2), strict=True):
        states.append(state)
        state = state * decay + update
    return (q * b.exp()) @ torch.stack(states, 2) + scores @ v, state


def fused_recurrent_gla(*, gk: Tensor, **others: Any) -> Result:
    """The function that FLA's layer calls at 64 tokens or fewer."""
    return chunk_gla(g=gk, **others)


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
) -> Result:
    """The gated delta rule of Gated DeltaNet (g (B, T, H)) and of KDA (g (B, T, H, K)); beta (B, T, H).

    With `use_gate_in_kernel` the log-decay is −exp(A_log) · softplus(g + dt_bias), A_log (H,), dt_bias (H,) or (H·K,).
    The signature is wide because this function replaces FLA's, which has the same one.
    """
    if q.shape[2] != v.shape[2] or safe_gate or lower_bound is not None:
        raise UnsupportedError(
            "grouped values and bounded gates have no CPU version in linrnn.models.cpu_ops", "run it on a GPU"
        )
    with torch.autocast(q.device.type, enabled=False):
        q, k, g, beta = (_fp32(x) for x in (q, k, g.unsqueeze(-1) if g.dim() == 3 else g, beta))
        if use_qk_l2norm_in_kernel:
            q, k = _l2_normalised(q), _l2_normalised(k)
        if use_beta_sigmoid_in_kernel:
            beta = torch.sigmoid(beta) * (2 if allow_neg_eigval else 1)
        if use_gate_in_kernel:
            assert A_log is not None
            g = g if dt_bias is None else g + dt_bias.view(g.shape[2], -1)
            g = -_fp32(A_log).exp()[:, None] * F.softplus(g)
        tensors = q * (scale or q.shape[-1] ** -0.5), k, _fp32(v), g, beta[..., None]
        output, state = in_chunks(_delta_rule, tensors, initial_state, output_final_state, cu_seqlens, chunk_size)
    return output.to(v.dtype), state


def _delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Each token writes v minus a prediction from its key.

    Earlier tokens of the chunk and the state before the chunk both contribute to the prediction. One unit lower
    triangular system gives the writes of all C tokens.
    """
    b = running_sum(g)
    total = b[..., -1:, :]
    decay = b.exp()
    query_scores, key_scores = decayed_scores([q, k], k, b)
    system = (beta * key_scores).tril(-1)
    solution = torch.linalg.solve_triangular(
        system, beta * torch.cat([v, (k * decay).expand_as(k)], -1), upper=False, unitriangular=True
    )
    values, predictors = solution.split([v.shape[-1], k.shape[-1]], -1)
    writers = (k * (total - b).exp()).mT
    decays = total.exp().mT
    states, writes = [], []
    state = _first_state(state, writers[:, :, 0] @ values[:, :, 0])
    chunks = zip(values.unbind(2), predictors.unbind(2), writers.unbind(2), decays.unbind(2), strict=True)
    for value, predictor, writer, chunk_decay in chunks:
        states.append(state)
        writes.append(value - predictor @ state)
        state = state * chunk_decay + writer @ writes[-1]
    return (q * decay) @ torch.stack(states, 2) + query_scores @ torch.stack(writes, 2), state


def chunk_delta_rule(*, beta: Tensor, **others: Any) -> Result:
    """DeltaNet's rule: the gated delta rule without decay."""
    return gated_delta_rule(g=torch.zeros_like(beta, dtype=torch.float32), beta=beta, **others)


def _l2_normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _first_state(state: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if state is None else state.to(like.dtype)
