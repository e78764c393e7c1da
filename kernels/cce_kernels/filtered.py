"""The gradient filter (cce_filter): which entries of the softmax take part in the gradients, and what was left out.

Two rules for an entry that is not its row's target, of probability p:

threshold  kept where p ≥ eps, as it is. Biased: what is dropped is missing from every batch alike. The rule of Wijmans
           et al., "Cut Your Losses in Large-Vocabulary Language Models" (2024), on entries instead of tiles.
unbiased   kept where p > eps · u, with weight max(p, eps), u uniform in [0, 1]: an entry of p ≥ eps always and as it
           is, a smaller one with probability p / eps and weight eps. The mean over u is p: what rounding the small
           entries to 0 or eps adds is noise, which batches average out. `head` entries are always kept as they are.

u is a hash of the row's place in the batch, its target and the entry: the same on every device, in any tiling, however
often it is asked for. Eight neighbours share one hash, an eighth apart: a look at it and at their largest p says of
nearly all eights that nothing is kept of them. At most 1 / eps entries of a row have p ≥ eps, and 1 / eps are kept on
average.

The head: the entries that are targets most often in this batch. They carry most of the mass that no row concentrates,
and as a dense product they cost less than their share of the lists.

Where a row drops more than `filter_mass`, the whole call is exact: as fast as without a filter, where some rows alone
would take the slowest way of all.

A threshold drops nearly all of the gradient but the target's where the model is untrained (p ≈ 1 / V < eps): it suits
fine-tuning. `FilterStats` says how much was dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .options import Options
from .rows import where_it_counts

HASH_ENTRY, HASH_MIX = 0x9E3779B1 - 2**32, 0x85EBCA6B - 2**32  # odd, 32 bits, as signed numbers
HASH_ROW, HASH_TARGET, HASH_START, HASH_ROUND = 0x3C6EF35F, 0x19660D, 0x5F356495, 0x45D9F3B  # of a row's own
_32_BITS = 0xFFFFFFFF
MOST_HEAD, HEAD_PROBABILITIES = 2048, 2**26  # entries; rows × entries
HEAD_SHARE = 16  # of the vocabulary, at most: 1 / 16


@dataclass(frozen=True)
class Rule:
    """What decides whether an entry is kept.

    eps: (N,) fp32, each row's threshold; 0 keeps all. hashes: (N,) int32, or None for the plain threshold. rank: (V,)
    int32, each entry's place by how often it is a target, or None; the first `n_head` are the head.
    """

    eps: Tensor
    hashes: Tensor | None
    rank: Tensor | None
    head: Tensor | None  # (n_head,) int64, the entries
    first: int = 0  # of the whole vocabulary's entries, where this is the rule of a shard

    @classmethod
    def of(cls, columns: Tensor, vocab: int, o: Options) -> Rule:
        """The rule of a call; columns (N,) int64, the rows' targets, negative for none."""
        assert o.filter_eps is not None
        eps = torch.full(columns.shape, o.filter_eps, dtype=torch.float32, device=columns.device)
        if not o.filter_unbiased:
            return cls(eps, None, None, None)
        rank, head = by_frequency(columns, head_size(columns.shape[0], vocab), vocab)
        return cls(eps, row_hashes(columns), rank, head)

    @property
    def n_head(self) -> int:
        return 0 if self.head is None else self.head.shape[0]

    def exact_if(self, exact: Tensor) -> Rule:
        """The same, but with exact, () bool, all is kept."""
        return replace(self, eps=torch.where(exact, 0.0, self.eps))

    def shard(self, first: int, size: int) -> Rule:
        """The rule of `size` entries from `first` on, where others have the rest of the vocabulary."""
        rank = None if self.rank is None else self.rank[first : first + size]
        return replace(self, rank=rank, first=first)

    def weights(self, p: Tensor, entries: Tensor) -> Tensor:
        """What takes the place of p (N, W) in the gradients of `entries` (W,), those of targets aside."""
        eps = self.eps[:, None]
        if self.hashes is None:
            return torch.where(p >= eps, p, 0)
        kept = torch.where(p > eps * uniform(self.hashes, self.first + entries), torch.maximum(p, eps.to(p.dtype)), 0)
        if self.rank is None:
            return kept
        return torch.where((self.rank[entries] < self.n_head)[None, :], p, kept)


def head_size(n_rows: int, vocab: int) -> int:
    """Entries that the unbiased rule keeps in every row."""
    size = min(MOST_HEAD, HEAD_PROBABILITIES // max(1, n_rows), vocab // HEAD_SHARE)
    return size // 16 * 16


def by_frequency(columns: Tensor, size: int, vocab: int) -> tuple[Tensor | None, Tensor | None]:
    """Each entry's rank by how often it is a target, ties by index, and the head of `size`; None if that is 0."""
    if not size:
        return None, None
    counts = torch.zeros(vocab + 1, dtype=torch.int32, device=columns.device)
    counts.scatter_add_(0, torch.where(columns >= 0, columns, vocab), torch.ones_like(columns, dtype=torch.int32))
    order = torch.argsort(counts[:vocab], descending=True, stable=True)
    rank = torch.empty(vocab, dtype=torch.int32, device=columns.device)
    rank[order] = torch.arange(vocab, dtype=torch.int32, device=columns.device)
    return rank, order[:size].clone()  # the others go


def row_hashes(columns: Tensor) -> Tensor:
    """32 bits for each row (N,), int32, of its place and its target."""
    x = torch.arange(columns.shape[0], device=columns.device) * HASH_ROW + columns * HASH_TARGET + HASH_START
    for _ in range(2):
        x = x & _32_BITS
        x = (x ^ (x >> 16)) * HASH_ROUND
    x = x & _32_BITS
    return ((x ^ (x >> 16)) - 2**31).to(torch.int32)


def uniform(hashes: Tensor, entries: Tensor) -> Tensor:
    """u (N, W) fp32 of the rows with `hashes` (N,) and the `entries` (W,); entries.py has the same in Triton."""
    mixed = hashes.long()[:, None] ^ (entries.long() // 8 * HASH_ENTRY)[None, :]
    mixed = (mixed & _32_BITS) * HASH_MIX + (entries.long() % 8 << 29)[None, :]
    return (mixed & _32_BITS).float() * 2.0**-32


class FilterStats:
    """What one backward pass kept and dropped; no synchronisation.

    `values` (5,) fp32, on the device of the inputs, holds the figures of NAMES, NaN until backward has run:
    entries_kept: share of the N_kept × V entries of the rows that count.
    dropped_mass_mean, _p99, _max: softmax mass per row that counts of the entries that were not kept; under the
        unbiased rule others' weights make up for it on average.
    exact: 1 where filter_mass made the call exact, else 0.
    """

    NAMES = ("entries_kept", "dropped_mass_mean", "dropped_mass_p99", "dropped_mass_max", "exact")

    def __init__(self, values: Tensor, add_up: Callable[[Tensor], Any] | None = None) -> None:
        self.values = values
        self._add_up = add_up  # sums over the ranks of a group, each with a part of the vocabulary, in place

    @classmethod
    def empty(cls, device: torch.device) -> Tensor:
        """Values before the backward pass."""
        return torch.full((len(cls.NAMES),), torch.nan, dtype=torch.float32, device=device)

    @classmethod
    def report(cls, values: Tensor) -> dict[str, Tensor]:
        """The values by name, as 0-d views."""
        return dict(zip(cls.NAMES, values.unbind(), strict=True))

    def write(self, kept: Tensor, dropped: Tensor, exact: Tensor | None, counts: Tensor, vocab: int) -> None:
        """Fill in the report.

        Args:
            kept, dropped: (N,) entries kept and mass dropped of each row.
            exact: () bool, whether filter_mass made the call exact; None: there was no filter.
            counts: (N,) bool, rows that count.
        """
        if exact is None:
            exact = torch.ones_like(counts[0])
        kept, dropped = torch.where(exact, vocab, kept), torch.where(exact, 0, dropped)
        size: Tensor | int = vocab
        if self._add_up is not None:
            size = torch.full_like(kept[:1], vocab, dtype=torch.float64)
            for x in (kept, dropped, size):
                self._add_up(x)
        n_rows = counts.sum().clamp(min=1)
        mass = torch.where(counts, dropped.clamp(min=0), -1.0)
        in_order = mass.sort().values  # rows that do not count come first
        at = (mass.shape[0] - 1 - (n_rows - 1) // 100).reshape(1)
        shares = torch.where(counts, kept, 0).sum(dtype=torch.float64) / size, mass.clamp(min=0).sum()
        p99, most = in_order.index_select(0, at)[0], in_order[-1]
        values = shares[0] / n_rows, shares[1] / n_rows, p99.clamp(min=0), most.clamp(min=0), exact
        self.values.copy_(torch.stack([x.float().reshape(()) for x in values]))

    def write_exact(self, scale: Tensor, columns: Tensor, vocab: int) -> None:
        """Fill in the report where there was no filter; scale () is the gradient of all row losses."""
        none = torch.zeros_like(columns, dtype=torch.float32)
        self.write(none, none, None, where_it_counts(scale, columns) != 0, vocab)
