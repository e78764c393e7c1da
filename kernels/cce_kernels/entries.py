"""The filter's forward pass: one product, and each row's list of the entries that its gradient keeps.

    w_iv = 2^(z_iv log2 e − k_i)        p_iv = w_iv / S_i        S_i = Σ_v w_iv

Softmax is known only after the last tile of a row, and whether an entry is kept depends on it (filtered.py). So a
chunk of rows stores its exponentials (exponentials.py), and `select_kernel` reads them once, with the sums, and
lists the columns that are kept, in ascending order. `collect_kernel` puts the lists of all chunks behind one another,
with the row's target before them. The head of the vocabulary is not listed: gather.py adds it densely.

If the lists are too short, they are void, as `Lists.overflow` says on the device: the backward pass then goes by
recompute.py, with the same rule.

Cost: N D V multiply-adds on the tensor cores; 2 bytes × N × V written and read, through a workspace of one chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .exponentials import exponentials, target_logits
from .filtered import Rule, head_size
from .finish import Gradient, finish_rows
from .hashing import draw
from .launch import quick
from .options import Options
from .rows import Rows, empty_metrics
from .schemes import SEGMENTS, SLOTS, list_rows
from .tiles import cdiv

BLOCK = 4096  # columns that select_kernel looks at together


@quick
@triton.jit(do_not_specialize=["first"])
def select_kernel(
    w_ptr,  # (rows of the chunk, V), rows w_stride apart; 0 at the targets
    target_ptr,  # (N,) int64, negative for none
    in_head_ptr,  # (V,) int8 or None: 1 for columns that are not listed
    hash_ptr,  # (N,) int32 or None: without, entries from eps on are kept
    factor_ptr,  # (N,) fp32: of w, for the gradient of a sum
    lse_ptr,  # (N,) fp32
    slot_ptr,  # (rows of the chunk, SEGMENTS, SLOTS) int32: columns, written
    count_ptr,  # (N, SEGMENTS) int32: entries to list, in the first segment with the target, written
    dropped_ptr,  # (N, SEGMENTS) fp32: softmax mass of the others, the head's aside, written
    w_stride,
    first,  # row of the chunk
    V,
    logit_scale,
    z_loss,
    eps,
    SEGMENTS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN_V: tl.constexpr,  # BLOCK divides V
):
    """Survivors are few, so that what costs more than a few instructions an entry is done on words of 32 entries."""
    row = first + tl.program_id(0)
    place = tl.program_id(0) * SEGMENTS + tl.program_id(1)
    to_p = tl.load(factor_ptr + row) / (logit_scale * (1 + 2 * z_loss * tl.load(lse_ptr + row)))
    to_share = to_p / eps  # p in units of eps, or against draws in [0, 2^32]
    row_hash = 0
    if hash_ptr is not None:
        row_hash = tl.load(hash_ptr + row)
        to_share *= 2.0**32
    w_ptr += tl.program_id(0).to(tl.int64) * w_stride
    slot_ptr += place.to(tl.int64) * SLOTS
    length = tl.cdiv(tl.cdiv(V, BLOCK), SEGMENTS) * BLOCK
    start = tl.program_id(1) * length
    count = tl.zeros((), dtype=tl.int32)
    dropped = tl.zeros((BLOCK,), dtype=tl.float32)
    words: tl.constexpr = BLOCK // 32
    for at in range(start, tl.minimum(start + length, V), BLOCK):
        cols = at + tl.arange(0, BLOCK)
        w = tl.load(w_ptr + cols, mask=cols < w_stride, other=0.0).to(tl.float32)  # whole vectors
        if not EVEN_V:
            w = tl.where(cols < V, w, 0.0)
        if in_head_ptr is not None:
            w = tl.where(tl.load(in_head_ptr + cols, mask=cols < V, other=1) != 0, 0.0, w)
        if hash_ptr is None:
            keep = w * to_share >= 1
        else:
            keep = w * to_share > draw(row_hash, cols)
        dropped += tl.where(keep, 0.0, w)
        bits = keep.to(tl.int32).reshape((words, 32)) << tl.arange(0, 32)[None, :]
        word = tl.sum(bits, axis=1)
        ones = _ones(word)
        places = count + tl.cumsum(ones, axis=0) - ones
        col = at + tl.arange(0, words) * 32
        for _ in range(tl.max(ones, axis=0)):
            low = word & -word
            tl.store(slot_ptr + places, col + _ones(low - 1), mask=(word != 0) & (places < SLOTS))
            places += (word != 0).to(tl.int32)
            word ^= low
        count += tl.sum(ones, axis=0)
    has_target = (tl.program_id(1) == 0) & (tl.load(target_ptr + row) >= 0)
    tl.store(count_ptr + first * SEGMENTS + place, count + has_target.to(tl.int32))
    tl.store(dropped_ptr + first * SEGMENTS + place, tl.sum(dropped, axis=0) * to_p)


@triton.jit
def _ones(word):
    """How many bits of an int32 are set."""
    word -= (word >> 1) & 0x55555555
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return (word * 0x01010101) >> 24


@quick
@triton.jit(do_not_specialize=["first", "capacity"])
def collect_kernel(
    w_ptr,  # (rows of the chunk, V), rows w_stride apart
    slot_ptr,  # (rows of the chunk, SEGMENTS, SLOTS) int32
    target_ptr,  # (N,) int64, negative for none
    factor_ptr,  # (N,) fp32
    lse_ptr,  # (N,) fp32
    count_ptr,  # (N, SEGMENTS) int32
    starts_ptr,  # (N SEGMENTS + 1,) int64: those of earlier chunks and this one's first are there, the rest written
    column_ptr,  # (capacity,) int32, written
    weight_ptr,  # (capacity,) fp32, written
    w_stride,
    first,
    capacity,
    logit_scale,
    z_loss,
    least,  # weight of an entry: eps under the unbiased rule, else 0
    SEGMENTS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Bring the lists of a chunk to their places; in a row's first segment its target comes first."""
    row = first + tl.program_id(0)
    segment = tl.program_id(1)
    place = tl.program_id(0) * SEGMENTS + segment
    to_p = tl.load(factor_ptr + row) / (logit_scale * (1 + 2 * z_loss * tl.load(lse_ptr + row)))
    count_ptr += first * SEGMENTS
    starts_ptr += first * SEGMENTS
    start = tl.load(starts_ptr)
    for before in range(0, place, BLOCK):
        others = before + tl.arange(0, BLOCK)
        start += tl.sum(tl.load(count_ptr + others, mask=others < place, other=0), axis=0).to(tl.int64)
    end = start + tl.load(count_ptr + place)
    tl.store(starts_ptr + place + 1, end)
    end = tl.minimum(end, capacity)
    target = tl.load(target_ptr + row)
    if (segment == 0) & (target >= 0):
        if start < capacity:
            tl.store(column_ptr + start, target.to(tl.int32))
        start += 1
    for begin in range(0, tl.minimum(end - start, SLOTS), BLOCK):
        at = begin + tl.arange(0, BLOCK)
        inside = at < tl.minimum(end - start, SLOTS)
        column = tl.load(slot_ptr + place.to(tl.int64) * SLOTS + at, mask=inside, other=0)
        w = tl.load(w_ptr + tl.program_id(0).to(tl.int64) * w_stride + column, mask=inside, other=0.0)
        tl.store(column_ptr + start + at, column, mask=inside)
        tl.store(weight_ptr + start + at, tl.maximum(w.to(tl.float32) * to_p, least), mask=inside)


@dataclass(frozen=True)
class Lists:
    """The listed entries, and what else the backward pass takes of the forward pass.

    starts: (N SEGMENTS + 1,) int64, the entries of row i stand from starts[i SEGMENTS] to starts[(i + 1) SEGMENTS],
    the target first; beyond the capacity they are missing. column: (capacity,) int32, V where nothing stands. weight:
    (capacity,) fp32, the rule's, none at targets. count: (N, SEGMENTS) int32, how many the rule lists. dropped:
    (N, SEGMENTS) fp32, the mass that it does not. nll: (N,) fp32, −log p of the target. hashes, rank, head: the rule's,
    empty where it has none.
    """

    starts: Tensor
    column: Tensor
    weight: Tensor
    count: Tensor
    dropped: Tensor
    nll: Tensor
    hashes: Tensor
    rank: Tensor
    head: Tensor

    @classmethod
    def empty(cls, columns: Tensor, vocab: int, capacity: int, o: Options) -> Lists:
        n_rows = columns.shape[0]
        n_head = head_size(n_rows, vocab) if o.filter_unbiased else 0

        def new(*size: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(size, dtype=dtype, device=columns.device)

        return cls(
            starts=new(n_rows * SEGMENTS + 1, dtype=torch.int64),
            column=new(capacity, dtype=torch.int32),
            weight=new(capacity, dtype=torch.float32),
            count=new(n_rows, SEGMENTS, dtype=torch.int32),
            dropped=new(n_rows, SEGMENTS, dtype=torch.float32),
            nll=new(n_rows, dtype=torch.float32),
            hashes=new(n_rows if o.filter_unbiased else 0, dtype=torch.int32),
            rank=new(vocab if n_head else 0, dtype=torch.int32),
            head=new(n_head, dtype=torch.int64),
        )

    def tensors(self) -> list[Tensor]:
        return list(vars(self).values())

    def rule(self, eps: float) -> Rule:
        hashes, rank, head = (x if x.numel() else None for x in (self.hashes, self.rank, self.head))
        return Rule(torch.full_like(self.nll, eps), hashes, rank, head)

    def overflow(self) -> Tensor:
        """Whether an entry is missing, () bool."""
        return (
            (self.starts[-1] > self.column.shape[0])
            | (self.count[:, 1:].max() > SLOTS)
            | (self.count[:, 0].max() > SLOTS + 1)
        )


def forward(
    e: Tensor, c: Tensor, columns: Tensor, capacity: int, with_metrics: bool, o: Options
) -> tuple[Rows, list[Tensor]]:
    """What the loss takes of each row, and the tensors of the `Lists`.

    Args:
        e: (N, D) and c: (V, D), bf16 and `aligned`.
        columns: (N,) int64, each row's target, or what rows.py has in its place.
        capacity: of the lists, in entries.
    """
    n_rows, vocab = e.shape[0], c.shape[0]
    assert o.filter_eps is not None
    rule = Rule.of(columns, vocab, o)
    lists = Lists.empty(columns, vocab, capacity, o)
    for ours, made in ((lists.hashes, rule.hashes), (lists.rank, rule.rank), (lists.head, rule.head)):
        if made is not None:
            ours.copy_(made)
    in_head = None if rule.rank is None else (rule.rank < rule.n_head).to(torch.int8)
    lists.starts[:1].zero_()
    lists.column.fill_(vocab)
    z_target = target_logits(e, c, None, columns, o)
    lse, nll, metrics = torch.empty_like(z_target), torch.empty_like(z_target), empty_metrics(z_target, with_metrics)
    factor, coefficient = torch.empty_like(z_target), torch.empty_like(z_target)
    rows = list_rows(n_rows, vocab, capacity, o)
    w = e.new_empty(rows, cdiv(vocab, 16) * 16)
    slots = e.new_empty((rows, SEGMENTS, SLOTS), dtype=torch.int32)
    scales = float(o.logit_scale), float(o.z_loss)
    by_rows = (x.split(rows) for x in (e, columns, z_target, lse, nll, factor, coefficient))
    for i, (e_i, columns_i, z_i, lse_i, nll_i, factor_i, coefficient_i) in enumerate(zip(*by_rows, strict=True)):
        first, height = i * rows, e_i.shape[0]
        w_i = w[:height, :vocab]
        sums = exponentials(e_i, c, None, columns_i, z_i, w_i, with_metrics, o)
        part = Rows(lse_i, nll_i, None, empty_metrics(z_i, with_metrics))
        finish_rows(e_i, c, None, columns_i, z_i, sums, part, o, Gradient(w_i, factor_i, coefficient_i, None))
        if metrics is not None and part.metrics is not None:
            metrics[:, first : first + height] = part.metrics
        select_kernel[(height, SEGMENTS)](
            w_i, columns, in_head, rule.hashes, factor, lse, slots, lists.count, lists.dropped, w.stride(0), first,
            vocab, *scales, o.filter_eps, SEGMENTS, SLOTS, BLOCK, vocab % BLOCK == 0, num_warps=4,
        )  # fmt: skip
        collect_kernel[(height, SEGMENTS)](
            w_i, slots, columns, factor, lse, lists.count, lists.starts, lists.column, lists.weight, w.stride(0), first,
            capacity, *scales, o.filter_eps if o.filter_unbiased else 0.0, SEGMENTS, SLOTS, 256, num_warps=2,
        )  # fmt: skip
    lists.nll.copy_(nll)  # the loss may be made of the other
    return Rows(lse, nll, None, metrics), lists.tensors()


def empty_state(columns: Tensor, vocab: int, capacity: int, o: Options) -> list[Tensor]:
    """The `forward` pass's tensors, of no values."""
    return Lists.empty(columns, vocab, capacity, o).tensors()
