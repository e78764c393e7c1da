"""The three recurrences in chunked form, plain torch, differentiated by autograd.

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
sequences. Work is done in fp32 (fp64 for fp64 inputs); results have v's dtype.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK_SIZE = 64


@dataclass(frozen=True)
class ChunkGrid:
    """Places T tokens on a grid of chunks, so that no chunk holds tokens of two documents.

    Attributes:
        chunk_size: tokens in a chunk, a power of two.
        n_chunks: chunks in each row.
        n_tokens: T.
        slots_T: the grid position of each token of a packed row. None: a row is one document and fills the grid in
            order.
        document_starts: the chunks of a packed row that begin with an empty state.
    """

    chunk_size: int
    n_chunks: int
    n_tokens: int
    slots_T: Tensor | None = None
    document_starts: frozenset[int] = frozenset()

    @classmethod
    def plan(cls, n_tokens: int, cu_seqlens: Tensor | None, chunk_size: int | None) -> "ChunkGrid":
        """The grid for T tokens, or for one row of documents bounded by `cu_seqlens` (n_documents + 1,)."""
        size = chunk_size or min(CHUNK_SIZE, 1 << (n_tokens - 1).bit_length())
        if cu_seqlens is None:
            return cls(size, -(-n_tokens // size), n_tokens)
        starts_D, lengths_D = cu_seqlens[:-1].long(), cu_seqlens.long().diff()
        chunks_D = (lengths_D + size - 1) // size
        first_chunk_D = chunks_D.cumsum(0) - chunks_D
        shift_T = torch.repeat_interleave(first_chunk_D * size - starts_D, lengths_D)
        slots_T = torch.arange(n_tokens, device=shift_T.device) + shift_T
        return cls(size, int(chunks_D.sum()), n_tokens, slots_T, frozenset(first_chunk_D.tolist()))

    def split(self, x_BTHD: Tensor) -> Tensor:
        """(B, T, H, D) to (B, H, n_chunks, chunk_size, D), with zeros in slots without a token."""
        total = self.n_chunks * self.chunk_size
        if self.slots_T is not None:
            padded = x_BTHD.new_zeros(x_BTHD.shape[0], total, *x_BTHD.shape[2:])
            x_BTHD = padded.index_copy(1, self.slots_T, x_BTHD)
        elif total > self.n_tokens:
            x_BTHD = F.pad(x_BTHD, (0, 0, 0, 0, 0, total - self.n_tokens))
        return x_BTHD.unflatten(1, (self.n_chunks, self.chunk_size)).permute(0, 3, 1, 2, 4).contiguous()

    def join(self, x_BHNCD: Tensor) -> Tensor:
        """The inverse of `split`."""
        x_BTHD = x_BHNCD.permute(0, 2, 3, 1, 4).flatten(1, 2)
        return x_BTHD[:, : self.n_tokens] if self.slots_T is None else x_BTHD[:, self.slots_T]


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


def gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Gated linear attention; returns the output (B, T, H, V) and the last state."""
    dtype = v.dtype
    q, k, v, g = _compute_dtype(q, k, v, g)
    grid = ChunkGrid.plan(q.shape[1], cu_seqlens, chunk_size)
    q, k, v, g = grid.split(q * scale), grid.split(k), grid.split(v), grid.split(g)
    b = running_sum(g)
    total = b[..., -1:, :]
    (scores,) = decayed_scores([q], k, b)
    updates = (k * (total - b).exp()).mT @ v
    decays = total.exp().mT
    states = []
    state = _first_state(state, updates[:, :, 0])
    for n, (update, decay) in enumerate(zip(updates.unbind(2), decays.unbind(2), strict=True)):
        if n in grid.document_starts:
            state = torch.zeros_like(state)
        states.append(state)
        state = state * decay + update
    output = (q * b.exp()) @ torch.stack(states, 2) + scores @ v
    return grid.join(output).to(dtype), state


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Gated delta rule with one decay per token (g (B, T, H, 1)) or per key dimension. Returns the same as `gla`."""
    dtype = v.dtype
    q, k, v, g, beta = _compute_dtype(q, k, v, g, beta)
    grid = ChunkGrid.plan(q.shape[1], cu_seqlens, chunk_size)
    q, k, v, g, beta = (grid.split(x) for x in (q * scale, k, v, g, beta[..., None]))
    b = running_sum(g)
    total = b[..., -1:, :]
    decay = b.exp()
    query_scores, key_scores = decayed_scores([q, k], k, b)
    # Each token writes v minus a prediction from its key. Earlier tokens of the chunk and the state before the chunk
    # both contribute to the prediction. One unit lower triangular system gives the writes of all C tokens.
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
    for n, (value, predictor, writer, chunk_decay) in enumerate(chunks):
        if n in grid.document_starts:
            state = torch.zeros_like(state)
        states.append(state)
        writes.append(value - predictor @ state)
        state = state * chunk_decay + writer @ writes[-1]
    output = (q * decay) @ torch.stack(states, 2) + query_scores @ torch.stack(writes, 2)
    return grid.join(output).to(dtype), state


def _compute_dtype(*tensors: Tensor) -> list[Tensor]:
    return [x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors]


def _first_state(state: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if state is None else state.to(like.dtype)
