"""The filter's forward pass: one product, and for each row a list of the entries that the gradients keep.

    w_iv = 2^(z_iv log2 e − k_i)        p_iv = w_iv / S_i        S_i = Σ_v w_iv

Whether an entry is kept (rule.py) is known only after a row's last tile. So each chunk of rows stores its exponentials
w (triton/logits.py). `select_kernel` reads w once, with the sums, and lists the columns that are kept. `collect_kernel`
appends the chunk's lists to those of earlier chunks, each row's target first. The head is not listed, because gather.py
computes it densely.

The lists are void if they overflow, or if a row drops more than filter_mass. `Lists.void` says so on the device. The
backward pass then takes schemes/four_products.py: with the same rule after an overflow, exact if filter_mass is given.

Cost: N D V multiply-adds on the tensor cores; writes and reads 2 bytes × N × V in a workspace of one chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..options import Options
from ..planner import EIGHTS, FOUND, SEGMENTS, SLOTS, ListMemory
from ..row_math import Rows, empty_metrics
from ..runtime.launch import quick
from ..runtime.tiles import cdiv
from ..triton.logits import exponentials, target_logits
from ..triton.row_stats import Gradient, finish_rows
from .draw import draw, mean_logits, rank_entries
from .rule import Rule, Sample, likely_sizes

SELECT_REGISTERS = 80  # registers a thread: fewer would spill, more would let fewer programs run at a time
KEPT = 256  # rows of a program of kept_kernel


@quick
@triton.jit(do_not_specialize=["first"])
def select_kernel(
    w_ptr,  # (rows of the chunk, V) bf16 read as pairs in int32, rows w_stride pairs apart; 0 at the targets
    target_ptr,  # (N,) int64, each row's target column, negative for none
    listable_ptr,  # (V,) 16-bit masks read as pairs in int32, or None; 0 for columns of the head and beyond V
    factor_ptr,  # (N,) fp32, factor from w to the gradient (`Gradient`)
    lse_ptr,  # (N,) fp32
    slot_ptr,  # (rows of the chunk, SEGMENTS, SLOTS) int32: the columns kept, written
    found_ptr,  # (rows of the chunk, SEGMENTS, FOUND) int32: scratch
    void_ptr,  # () int32; where 1, there is nothing to do
    count_ptr,  # (N, SEGMENTS) int32: number of entries to list, written; the first segment counts the target
    dropped_ptr,  # (N, SEGMENTS) fp32: softmax mass of the entries that are not kept, written
    w_stride,
    first,  # the chunk's first row
    V, logit_scale, z_loss, eps,
    SEGMENTS: tl.constexpr, SLOTS: tl.constexpr, EIGHTS: tl.constexpr, FOUND: tl.constexpr,
):  # fmt: skip
    """List the kept columns of one segment of a row, in one warp.

    A segment is every SEGMENTS-th block of 8 · EIGHTS columns. Few entries are kept, so the kernel first looks at the
    largest w of each group of eight columns. It notes down the groups whose largest w is kept. It looks at their
    columns one by one when enough groups have come together, or at the segment's end.
    """
    LANES: tl.constexpr = 32
    row = first + tl.program_id(0)
    place = tl.program_id(0) * SEGMENTS + tl.program_id(1)
    to_p = tl.load(factor_ptr + row) / (logit_scale * (1 + 2 * z_loss * tl.load(lse_ptr + row)))
    to_share = to_p / eps  # factor from w to p / eps
    w_ptr += tl.program_id(0).to(tl.int64) * w_stride
    slot_ptr += place.to(tl.int64) * SLOTS
    found_ptr += place.to(tl.int64) * FOUND
    word, column = tl.arange(0, 4)[None, :], tl.arange(0, 8)[None, :]
    count = tl.zeros((), dtype=tl.int32)
    found = tl.zeros((), dtype=tl.int32)
    dropped = tl.zeros((LANES,), dtype=tl.float32)
    eights = tl.cdiv(V, 8)
    end = eights * (1 - tl.load(void_ptr))
    for at in range(tl.program_id(1) * EIGHTS, end, SEGMENTS * EIGHTS):
        eighth = at + tl.arange(0, EIGHTS)
        left, right = _listable(w_ptr, listable_ptr, eighth[:, None] * 4 + word, (eighth < eights)[:, None])
        look = tl.max(tl.maximum(left, right), axis=1) * to_share >= 1
        passed = tl.where(look, 0.0, tl.sum(left + right, axis=1))
        dropped += tl.sum(passed.reshape((EIGHTS // LANES, LANES)), axis=0)
        places, more = _places(look.to(tl.int32).reshape((EIGHTS // LANES, LANES)), 0)
        tl.store(found_ptr + found + places.reshape((EIGHTS,)), eighth, mask=look)
        found += more
        now = tl.where((found > FOUND - EIGHTS) | (at + SEGMENTS * EIGHTS >= end), found, 0)
        tl.debug_barrier()  # the next loop reads the groups that other lanes have noted
        for begin in range(0, now, LANES):
            lane = begin + tl.arange(0, LANES)
            nearby = tl.load(found_ptr + lane, mask=lane < now, other=0)
            columns = nearby[:, None] * 8 + column
            pairs = _listable(w_ptr, listable_ptr, nearby[:, None] * 4 + word, (lane < now)[:, None])
            listable = tl.join(pairs[0], pairs[1]).reshape((LANES, 8))
            keep = listable * to_share >= 1
            dropped += tl.sum(tl.where(keep, 0.0, listable), axis=1)
            slots, kept = _places(keep.to(tl.int32), 1)
            slots += count
            tl.store(slot_ptr + slots, columns, mask=keep & (slots < SLOTS))
            count += kept
        tl.debug_barrier()  # all lanes have read the notes before the next turn overwrites them
        found -= now
    has_target = (tl.program_id(1) == 0) & (tl.load(target_ptr + row) >= 0)
    tl.store(count_ptr + first * SEGMENTS + place, count + has_target.to(tl.int32))
    tl.store(dropped_ptr + first * SEGMENTS + place, tl.sum(dropped, axis=0) * to_p)


@triton.jit
def _listable(w_ptr, listable_ptr, words, inside):
    """The left and the right exponentials of each pair of columns, fp32; 0 for columns that lists leave out."""
    pairs = tl.load(w_ptr + words, mask=inside, other=0)
    if listable_ptr is not None:
        pairs &= tl.load(listable_ptr + words, mask=inside, other=0)
    return (pairs << 16).to(tl.float32, bitcast=True), (pairs & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _places(ones, axis: tl.constexpr):
    """The number of ones before each place, and the number of all ones. Places go lane by lane, `axis` is in a lane."""
    own = tl.sum(ones, axis=axis)
    before = tl.cumsum(own, axis=0) - own
    return tl.cumsum(ones, axis=axis) - ones + tl.expand_dims(before, axis), tl.sum(own, axis=0)


@quick
@triton.jit(do_not_specialize=["first", "capacity"])
def collect_kernel(
    w_ptr,  # (rows of the chunk, V), rows w_stride apart
    slot_ptr,  # (rows of the chunk, SEGMENTS, SLOTS) int32: the columns kept
    target_ptr,  # (N,) int64, each row's target column, negative for none
    factor_ptr,  # (N,) fp32, factor from w to the gradient (`Gradient`)
    lse_ptr,  # (N,) fp32
    count_ptr,  # (N, SEGMENTS) int32: number of entries to list; the first segment counts the target
    dropped_ptr,  # (N, SEGMENTS) fp32: softmax mass of the entries that are not kept
    void_ptr,  # () int32: 1 written if the lists are void
    starts_ptr,  # (N + 1,) int64: where each row's list starts; written for the rows after this chunk's first
    column_ptr,  # (capacity,) int32, written
    weight_ptr,  # (capacity,) fp32: p of each listed entry but the targets', written
    w_stride,
    first,  # the chunk's first row
    capacity, logit_scale, z_loss,
    most,  # the mass that a row may drop
    SEGMENTS: tl.constexpr, SLOTS: tl.constexpr,
    COUNTS: tl.constexpr,  # counts added up at a time
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Append a chunk's lists to the whole lists, one row a program: its target first, then each segment's columns.

    Writes void_ptr if an entry has no place, or if a row drops too much.
    """
    row = first + tl.program_id(0)
    segment = tl.arange(0, SEGMENTS)
    place = tl.program_id(0) * SEGMENTS
    target = tl.load(target_ptr + row)
    to_p = tl.load(factor_ptr + row) / (logit_scale * (1 + 2 * z_loss * tl.load(lse_ptr + row)))
    w_ptr += tl.program_id(0).to(tl.int64) * w_stride
    slot_ptr += place.to(tl.int64) * SLOTS
    count_ptr += first * SEGMENTS
    start = tl.load(starts_ptr + first, mask=first > 0, other=0)
    for before in range(0, place, COUNTS):
        others = before + tl.arange(0, COUNTS)
        start += tl.sum(tl.load(count_ptr + others, mask=others < place, other=0), axis=0).to(tl.int64)
    count = tl.load(count_ptr + place + segment)
    mass = tl.sum(tl.load(dropped_ptr + row * SEGMENTS + segment), axis=0)
    end = start + tl.sum(count, axis=0)
    tl.store(starts_ptr, 0, mask=row == 0)
    tl.store(starts_ptr + row + 1, end)
    listed = tl.where((segment == 0) & (target >= 0), count - 1, count)
    longest = tl.max(listed, axis=0)
    if (end > capacity) | (longest > SLOTS) | ((mass > most) & (target >= 0)):
        tl.store(void_ptr, 1)
    if (target >= 0) & (start < capacity):
        tl.store(column_ptr + start, target.to(tl.int32))
    begin = start + tl.cumsum(count, axis=0) - listed
    for at in range(0, tl.minimum(longest, SLOTS), BLOCK):
        slot = at + tl.arange(0, BLOCK)[None, :]
        to = begin[:, None] + slot
        inside = (slot < listed[:, None]) & (slot < SLOTS) & (to < capacity)
        column = tl.load(slot_ptr + segment[:, None] * SLOTS + slot, mask=inside, other=0)
        p = tl.load(w_ptr + column, mask=inside, other=0.0).to(tl.float32) * to_p
        tl.store(column_ptr + to, column, mask=inside)
        tl.store(weight_ptr + to, p, mask=inside)


@quick
@triton.jit(do_not_specialize=["N"])
def kept_kernel(
    count_ptr,  # (N, SEGMENTS) int32: number of entries listed
    dropped_ptr,  # (N, SEGMENTS) fp32: softmax mass of the entries that are not kept
    target_ptr,  # (N,) int64, each row's target column, negative for none
    rank_ptr,  # (V,) int32 or None: each column's rank by likelihood
    kept_ptr,  # (N,) fp32: number of entries kept, written
    mass_ptr,  # (N,) fp32: softmax mass dropped, written
    N, n_head,
    SEGMENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each row's number of entries kept, head included, and mass dropped.

    A target in the head is listed, too, so it is counted once less.
    """
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    places = rows[:, None] * SEGMENTS + tl.arange(0, SEGMENTS)[None, :]
    kept = tl.sum(tl.load(count_ptr + places, mask=(rows < N)[:, None], other=0), axis=1) + n_head
    mass = tl.sum(tl.load(dropped_ptr + places, mask=(rows < N)[:, None], other=0.0), axis=1)
    if rank_ptr is not None:
        target = tl.load(target_ptr + rows, mask=rows < N, other=-1)
        rank = tl.load(rank_ptr + target, mask=target >= 0, other=n_head)
        kept -= (rank < n_head).to(tl.int32)
    tl.store(kept_ptr + rows, kept.to(tl.float32), mask=rows < N)
    tl.store(mass_ptr + rows, mass, mask=rows < N)


class Lists(NamedTuple):
    """The listed entries, and everything else that the backward pass needs from the forward pass."""

    starts: Tensor  # (N + 1,) int64: row i's entries lie from starts[i] to starts[i + 1], the target first
    column: Tensor  # (capacity,) int32, each entry's column; V in unused places
    weight: Tensor  # (capacity,) fp32, each entry's p; undefined at targets
    number: Tensor  # (N, SEGMENTS) int32, number of entries that the rule lists
    dropped: Tensor  # (N, SEGMENTS) fp32, softmax mass of the entries that are not kept
    void: Tensor  # () int32: 1 if an entry is missing or a row dropped more than filter_mass; the lists are undefined
    nll: Tensor  # (N,) fp32, −log p of the target
    rank: Tensor  # this and the next as in `Rule`; empty if the rule has none
    likely: Tensor
    sample: Sample | None = None  # what the rule draws; None if it draws nothing

    @classmethod
    def empty(cls, columns: Tensor, vocab: int, capacity: int, void: Tensor, o: Options) -> Lists:
        """Lists without values and without a sample."""
        n_rows = columns.shape[0]
        n_likely = likely_sizes(vocab)[1] if o.filter_unbiased else 0

        def new(*size: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(size, dtype=dtype, device=columns.device)

        return cls(
            starts=new(n_rows + 1, dtype=torch.int64),
            column=new(capacity, dtype=torch.int32),
            weight=new(capacity, dtype=torch.float32),
            number=new(n_rows, SEGMENTS, dtype=torch.int32),
            dropped=new(n_rows, SEGMENTS, dtype=torch.float32),
            void=void,
            nll=new(n_rows, dtype=torch.float32),
            rank=new(vocab if n_likely else 0, dtype=torch.int32),
            likely=new(n_likely, dtype=torch.int64),
        )

    def tensors(self) -> list[Tensor]:
        """All tensors of the lists and of the sample, in the order that `of` takes."""
        return [*self[:-1], *(self.sample or ())]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Lists:
        """The lists from their `tensors`."""
        own = len(cls._fields) - 1
        return cls._make((*tensors[:own], Sample._make(tensors[own:]) if tensors[own:] else None))

    def rule(self, eps: float, vocab: int) -> Rule:
        """The rule, without a seed, because the sample is drawn already."""
        return Rule(torch.full((), eps, dtype=torch.float32, device=self.nll.device), None, *self._likely(vocab))

    def kept(self, columns: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
        """Each row's number of entries kept and softmax mass dropped, (N,) fp32 each."""
        kept, dropped = torch.empty_like(self.nll), torch.empty_like(self.nll)
        n_rows = kept.shape[0]
        kept_kernel[(cdiv(n_rows, KEPT),)](
            self.number, self.dropped, columns, rule.rank, kept, dropped, n_rows, rule.n_head, SEGMENTS, KEPT,
            num_warps=4,
        )  # fmt: skip
        return kept, dropped

    def sampled(self, columns: Tensor, dim: int, vocab: int) -> Lists:
        """These lists with the sample that is drawn for the target columns (N,) int64."""
        return self._replace(sample=draw(columns, dim, vocab, *self._likely(vocab)))

    def _likely(self, vocab: int) -> tuple[Tensor | None, Tensor | None, int]:
        """rank, likely and n_head of the rule."""
        if not self.rank.numel():
            return None, None, 0
        return self.rank, self.likely, likely_sizes(vocab)[0]


def forward(
    e: Tensor, c: Tensor, columns: Tensor, capacity: int, with_metrics: bool, o: Options,
    z_target: Tensor | None = None,
) -> tuple[Rows, list[Tensor]]:  # fmt: skip
    """The row statistics that the loss needs, and the tensors of the `Lists`, which hold `capacity` entries.

    The other arguments are those of `row_stats.forward`, in bf16.
    """
    n_rows, vocab = e.shape[0], c.shape[0]
    assert o.filter_eps is not None
    rows = ListMemory(n_rows, e.shape[1], vocab, capacity, o).rows()
    w = e.new_empty(rows, cdiv(vocab, 16) * 16)
    scales = float(o.logit_scale), float(o.z_loss)
    eps = float(o.filter_eps)
    if z_target is None:
        z_target = target_logits(e, c, None, columns, o)
    void = None
    for first in range(0, n_rows, rows):
        chunk = slice(first, min(first + rows, n_rows))
        height = chunk.stop - first
        w_i, e_i, columns_i, z_i = w[:height, :vocab], e[chunk], columns[chunk], z_target[chunk]
        sums = exponentials(e_i, c, None, columns_i, z_i, w_i, with_metrics, o, None if o.filter_mass is None else void)
        if void is None:  # after the first launch, so that the device computes while the host allocates
            void = torch.zeros((), dtype=torch.int32, device=e.device)
            lists, listable = _lists_of(e, c, columns, capacity, void, o)
            lse, nll, factor, coefficient = (torch.empty_like(z_target) for _ in range(4))
            metrics = empty_metrics(z_target, with_metrics)
            slots = e.new_empty((rows, SEGMENTS, SLOTS), dtype=torch.int32)
            found = e.new_empty((rows, SEGMENTS, FOUND), dtype=torch.int32)
        part = Rows(lse[chunk], nll[chunk], None, empty_metrics(z_i, with_metrics))
        gradient = Gradient(w_i, factor[chunk], coefficient[chunk])
        finish_rows(e_i, c, None, columns_i, z_i, sums, part, o, gradient)
        if metrics is not None and part.metrics is not None:
            metrics[:, chunk] = part.metrics
        select_kernel[(height, SEGMENTS)](
            w.view(torch.int32), columns, listable, factor, lse, slots, found, void, lists.number, lists.dropped,
            w.stride(0) // 2, first, vocab, *scales, eps, SEGMENTS, SLOTS, EIGHTS, FOUND,
            num_warps=1, maxnreg=SELECT_REGISTERS,
        )  # fmt: skip
        collect_kernel[(height,)](
            w_i, slots, columns, factor, lse, lists.number, lists.dropped, void, lists.starts, lists.column,
            lists.weight, w.stride(0), first, capacity, *scales,
            math.inf if o.filter_mass is None else float(o.filter_mass), SEGMENTS, SLOTS, 2048, 64, num_warps=4,
        )  # fmt: skip
    lists.nll.copy_(nll)  # a copy, because nll itself may become the returned loss
    if o.filter_unbiased:
        lists = lists.sampled(columns, e.shape[1], vocab)
    return Rows(lse, nll, None, metrics), lists.tensors()


def _lists_of(
    e: Tensor, c: Tensor, columns: Tensor, capacity: int, void: Tensor, o: Options
) -> tuple[Lists, Tensor | None]:
    """Lists without entries but with rank and likely; and the masks `listable_ptr` of select_kernel, or None."""
    vocab = c.shape[0]
    lists = Lists.empty(columns, vocab, capacity, void, o)
    lists.column.fill_(vocab)
    if not lists.likely.numel() and vocab % 8 == 0:
        return lists, None
    listable = columns.new_full((8 * cdiv(vocab, 8),), -1, dtype=torch.int16)
    if vocab % 8:
        listable[vocab:] = 0
    if lists.likely.numel():
        mean_z = mean_logits(e, c, None, columns, o)
        assert mean_z is not None
        rank_entries(mean_z, lists.rank, lists.likely, likely_sizes(vocab)[0], listable)
    return lists, listable.view(torch.int32)


def empty_lists(columns: Tensor, dim: int, vocab: int, capacity: int, o: Options) -> list[Tensor]:
    """The tensors that `forward` returns, without values."""
    lists = Lists.empty(columns, vocab, capacity, columns.new_empty((), dtype=torch.int32), o)
    return lists._replace(sample=Sample.empty(columns, dim, vocab) if o.filter_unbiased else None).tensors()
