"""The gradient filter (cce_filter): which entries of the softmax take part in the gradients, and what was left out.

An entry that is not its row's target, of probability p, is kept as it is where p ≥ eps. What becomes of the others, a
row's tail, is one of two rules:

threshold  dropped. Biased: what is dropped is missing from every batch alike. The rule of Wijmans et al., "Cut Your
           Losses in Large-Vocabulary Language Models" (2024), on entries instead of tiles.
unbiased   estimated from a sample: dE from one column of each group of neighbours, dC from one row of each, times the
           size of the group. The mean over the draws is p: what the sample adds is noise, which batches average out.

The squared error of a gradient is (size − 1) Σ p² |c|² over the tail (|e|² for dC): tails are flat, so that Σ p² is
far below eps Σ p, which is what drawing each entry by itself, with probability p / eps, would cost. And a sample of
whole columns or rows is two small products on the tensor cores (sample.py), where single entries are gathers.

An entry's logit from the mean hidden state of a batch says how large its p tend to be: on a model in training its
order is nearly that of the mean probabilities. The unbiased rule keeps the likeliest entries, the head, in every row:
they carry most of the mass that no row concentrates, and as a dense product they cost less than their share of the
lists. The next ones are drawn from smaller groups, of neighbours in that order.

Draws follow from a seed of the batch's targets, and the order from sums in fp64, which hold what operands of 16 bits
add up to: both are the same on every device and in any tiling. Rows of a block of `block_rows` share their columns,
others have their own, so that what dE has too much of differs between blocks.

Where a row drops more than `filter_mass`, the whole call is exact: as fast as without a filter, where some rows alone
would take the slowest way of all.

A threshold drops nearly all of the gradient but the target's where the model is untrained (p ≈ 1 / V < eps): it suits
fine-tuning. `FilterStats` says how much was dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_float
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .options import Options
from .row_math import where_it_counts

COLUMN_GROUP, LIKELY_GROUP, ROW_GROUP = 32, 4, 16  # neighbours of which one is drawn
TILE_ROWS, TILE_COLS = 128, 256  # of the large products; see tiles.py
TWO_WAVES = 264  # tiles that a GPU of 132 multiprocessors makes in two turns
ENTRIES_AT_A_TIME = 4096  # rows of c in fp64
_MASK, HASH_ODD, HASH_ROUND = 2**32 - 1, 0x9E3779B1, 0x45D9F3B
MOST_HEAD, HEAD_SHARE = 4096, 16  # entries of the head; it is at most 1 / 16 of the vocabulary
LIKELY_SHARE = 8  # the likely entries, the head among them: 1 / 8 of it


@dataclass(frozen=True)
class Rule:
    """What decides whether an entry is kept, and of which others the sample is.

    eps: () fp32, the threshold; 0 keeps all. seed: () int64, of the draws, or None where the tail is dropped.
    rank: (V,) int32, each entry's place by its mean logit, or None where no entries count as likely.
    likely: (n,) int64, the first of these; n_head of them are the head.
    """

    eps: Tensor
    seed: Tensor | None
    rank: Tensor | None
    likely: Tensor | None
    n_head: int = 0
    counts: Tensor | None = None  # (N,) bool, rows with a target, where filter_mass is to be looked after
    first: int = 0  # of the whole vocabulary's entries, where this is the rule of a shard
    add_up: Callable[[Tensor], Any] | None = None  # there: the shards' sum, in place

    @classmethod
    def of(cls, columns: Tensor, mean_z: Tensor | None, o: Options) -> Rule:
        """The rule of a call; columns (N,) int64, the rows' targets, negative for none; mean_z (V,) the `mean_logits`,
        which the unbiased rule takes."""
        assert o.filter_eps is not None
        eps = torch.full((), o.filter_eps, dtype=torch.float32, device=columns.device)
        counts = columns >= 0
        if not o.filter_unbiased:
            return cls(eps, None, None, None, counts=counts)
        assert mean_z is not None
        n_head, n_likely = likely_sizes(mean_z.shape[0])
        return cls(eps, seed_of(columns), *by_likelihood(mean_z, n_likely), n_head, counts)

    def exact_if(self, exact: Tensor) -> Rule:
        """The same, but with exact, () bool, all is kept."""
        return replace(self, eps=torch.where(exact, 0.0, self.eps))

    def shard(self, first: int, size: int, add_up: Callable[[Tensor], Any] | None = None) -> Rule:
        """The rule of `size` entries from `first` on, where others have the rest of the vocabulary; `add_up` makes of
        what each has of the rows (N,) the sum, in place, on all of them."""
        rank = None if self.rank is None else self.rank[first : first + size]
        return replace(self, rank=rank, first=first, add_up=add_up)

    def drops_more(self, dropped: Tensor, most: float) -> Tensor:
        """Whether a row with a target drops more than `most`, () bool; dropped (N,), the mass of it here."""
        assert self.counts is not None
        if self.add_up is not None:
            self.add_up(dropped)
        return ((dropped > most) & self.counts).any()

    def keeps(self, p: Tensor, entries: Tensor) -> Tensor:
        """Which of p (N, W) of `entries` (W,) are kept as they are, targets aside: (N, W) bool."""
        kept = p >= self.eps
        return kept if self.rank is None else kept | (self.rank[entries] < self.n_head)[None, :]

    def weights_e(self, p: Tensor, entries: Tensor, dim: int, vocab: int) -> Tensor:
        """What takes the place of p (N, W) in the gradient of e (N, dim), targets aside; of `vocab` entries here."""
        times = torch.zeros(-(-p.shape[0] // block_rows(dim)), vocab, dtype=p.dtype, device=p.device)
        if self.seed is not None:
            nowhere = torch.full((p.shape[0],), -1, device=p.device)
            sample = self.sample(nowhere, dim, vocab)
            times.scatter_add_(1, sample.columns, sample.times.to(p.dtype))
        block = torch.arange(p.shape[0], device=p.device) // block_rows(dim)
        return self._weights(p, entries, times[:, entries][block])

    def weights_c(self, p: Tensor, entries: Tensor) -> Tensor:
        """What takes the place of p (N, W) in the gradients of c and bias, targets aside."""
        times = torch.zeros_like(p[:, 0])
        if self.seed is not None:
            rows, row_times = draw_rows(self.seed, p.shape[0])
            times.index_add_(0, rows, row_times.to(p.dtype))
        return self._weights(p, entries, times[:, None])

    def _weights(self, p: Tensor, entries: Tensor, times: Tensor) -> Tensor:
        return torch.where(self.keeps(p, entries), p, torch.where(p < self.eps, times * p, 0))

    def sample(self, columns: Tensor, dim: int, vocab: int) -> Sample:
        """What is drawn for the gradients of e (N, dim) and of `vocab` entries here; columns (N,) int64, targets."""
        assert self.seed is not None
        blocks = -(-columns.shape[0] // block_rows(dim))
        block = torch.arange(columns.shape[0], device=columns.device) // block_rows(dim)
        seeds = _mixed(self.seed + 1 + torch.arange(blocks, device=columns.device))[:, None]
        n_likely = 0 if self.likely is None else self.likely.shape[0]
        target = columns.clamp(min=0)

        first_group = self.first // COLUMN_GROUP
        drawn = _draws(seeds, first_group, -(-(self.first + vocab) // COLUMN_GROUP), COLUMN_GROUP) - self.first
        is_one = (drawn >= 0) & (drawn < vocab)
        drawn = drawn.clamp(0, vocab - 1)
        if self.rank is not None:
            is_one &= self.rank[drawn] >= n_likely
        times = is_one.float() * COLUMN_GROUP
        group = ((self.first + target) // COLUMN_GROUP - first_group).clamp(max=drawn.shape[1] - 1)
        if self.likely is not None and self.rank is not None and n_likely > self.n_head:
            places = self.n_head + _draws(seeds, 0, -(-(n_likely - self.n_head) // LIKELY_GROUP), LIKELY_GROUP)
            some = self.likely[places.clamp(max=n_likely - 1)] - self.first
            is_one = (places < n_likely) & (some >= 0) & (some < vocab)
            rank = self.rank[target]
            place = drawn.shape[1] + (rank - self.n_head).clamp(min=0) // LIKELY_GROUP
            group = torch.where((rank >= self.n_head) & (rank < n_likely), place.long(), group)
            drawn = torch.cat([drawn, some.clamp(0, vocab - 1)], dim=1)
            times = torch.cat([times, is_one.float() * LIKELY_GROUP], dim=1)
        place = torch.where((columns >= 0) & (drawn[block, group] == columns), group, -1)
        return Sample(drawn, times, place, *draw_rows(self.seed, columns.shape[0]))


@dataclass(frozen=True)
class Sample:
    """The columns and rows drawn, and how many each stands for: 0 where what was drawn is none of those at hand.

    columns: (blocks of rows, groups) int64; times: the same in fp32. place: (N,) int64, where a row's target stands
    among the columns of its block, -1 if it does not. rows: (groups of rows,) int64; row_times: the same in fp32.
    """

    columns: Tensor
    times: Tensor
    place: Tensor
    rows: Tensor
    row_times: Tensor

    @classmethod
    def empty(cls, columns: Tensor, dim: int, vocab: int) -> Sample:
        """Of a whole vocabulary, without values."""
        n_rows = columns.shape[0]
        n_head, n_likely = likely_sizes(vocab)
        groups = -(-vocab // COLUMN_GROUP) + -(-(n_likely - n_head) // LIKELY_GROUP)
        drawn = columns.new_empty(-(-n_rows // block_rows(dim)), groups)
        rows = columns.new_empty(-(-n_rows // ROW_GROUP))
        return cls(
            drawn, torch.empty_like(drawn, dtype=torch.float32), torch.empty_like(columns), rows,
            torch.empty_like(rows, dtype=torch.float32),
        )  # fmt: skip


def likely_sizes(vocab: int) -> tuple[int, int]:
    """Entries that the unbiased rule keeps in every row, and those that count as likely, these among them."""
    head = min(MOST_HEAD, vocab // HEAD_SHARE) // 16 * 16
    return head, max(head, vocab // LIKELY_SHARE // 16 * 16)


def mean_logits(e: Tensor, c: Tensor, bias: Tensor | None, columns: Tensor, o: Options) -> Tensor | None:
    """Each entry's logit from the mean hidden state of the rows that have a target, before any softcap: (V,) fp32, 0
    for what is no number. The mean is rounded to bf16, and sums are in fp64. None for a rule that asks for none."""
    if not o.filter_unbiased:
        return None
    counts = columns >= 0
    total = torch.where(counts[:, None], e, 0).sum(dim=0, dtype=torch.float64)
    mean = (total / counts.sum().clamp(min=1)).float().bfloat16().double()
    z = torch.cat([part.double() @ mean for part in c.split(ENTRIES_AT_A_TIME)]) * fp32_logit_scale(o)
    if bias is not None:
        z += bias.double()
    return torch.where(z.isnan(), 0, z).float()


def fp32_logit_scale(o: Options) -> float:
    """The logit_scale in fp32: with any other, near ties would go another way where no kernel runs."""
    return c_float(o.logit_scale).value


def by_likelihood(mean_z: Tensor, size: int) -> tuple[Tensor | None, Tensor | None]:
    """Each entry's rank by its mean logit, the largest first, ties by index: (V,) int32; and the first `size` entries,
    (size,) int64. None and None if that is 0."""
    if not size:
        return None, None
    order = torch.argsort(mean_z, descending=True, stable=True)
    rank = torch.empty(order.shape, dtype=torch.int32, device=order.device)
    rank[order] = torch.arange(len(order), dtype=torch.int32, device=order.device)
    return rank, order[:size].clone()  # the others go


def seed_of(columns: Tensor) -> Tensor:
    """() int64, of every row's target (N,)."""
    return _mixed((_mixed(columns) ^ torch.arange(columns.shape[0], device=columns.device) * HASH_ODD).sum())


def block_rows(dim: int) -> int:
    """Rows of e (N, dim) that share the columns drawn: those of two waves of dE's tiles."""
    return max(1, TWO_WAVES // -(-dim // TILE_COLS)) * TILE_ROWS


def draw_rows(seed: Tensor, n_rows: int) -> tuple[Tensor, Tensor]:
    """Of each group of neighbours among the rows the one drawn, and how many it stands for; see Sample."""
    rows = _draws(_mixed(seed), 0, -(-n_rows // ROW_GROUP), ROW_GROUP)
    return rows.clamp(max=n_rows - 1), (rows < n_rows).float() * ROW_GROUP


def _draws(seeds: Tensor, first: int, end: int, size: int) -> Tensor:
    """One of each group of `size` from the group `first` to `end`, (..., end − first) int64; seeds () or (..., 1)."""
    groups = torch.arange(first, end, device=seeds.device)
    return groups * size + _mixed(seeds ^ groups * HASH_ODD) % size


def _mixed(x: Tensor) -> Tensor:
    """32 bits each, int64, that look drawn at random."""
    for _ in range(2):
        x = x & _MASK
        x = (x ^ (x >> 16)) * HASH_ROUND
    x = x & _MASK
    return x ^ (x >> 16)


class FilterStats:
    """What one backward pass kept and dropped; no synchronisation.

    `values` (5,) fp32, on the device of the inputs, holds the figures of NAMES, NaN until backward has run:
    entries_kept: share of the N_kept × V entries of the rows that count.
    dropped_mass_mean, _p99, _max: softmax mass per row that counts of the entries that were not kept; the unbiased rule
        estimates its share of the gradients.
    exact: 1 where filter_mass was given and the call is exact: a row would have dropped more, or lists were too short;
        else 0.

    Args:
        figures: `filter_figures`, of whatever runs.
        vocab: entries of the whole vocabulary.
        add_up: sums over the ranks of a group, each with a part of the vocabulary, in place.
    """

    NAMES = ("entries_kept", "dropped_mass_mean", "dropped_mass_p99", "dropped_mass_max", "exact")

    def __init__(
        self, values: Tensor, figures: Callable[..., None], vocab: int, add_up: Callable[[Tensor], Any] | None = None
    ) -> None:
        self.values, self._figures, self._vocab, self._add_up = values, figures, vocab, add_up

    @classmethod
    def empty(cls, device: torch.device) -> Tensor:
        """Memory for the values."""
        return torch.empty(len(cls.NAMES), dtype=torch.float32, device=device)

    @classmethod
    def report(cls, values: Tensor) -> dict[str, Tensor]:
        """The values by name, as 0-d views: NaN, until a backward pass fills them in. (The forward pass, whose start
        the device may be waiting for, has been launched by then.)"""
        return dict(zip(cls.NAMES, values.fill_(torch.nan).unbind(), strict=True))

    def write(self, kept: Tensor, dropped: Tensor, exact: Tensor | None, counts: Tensor) -> None:
        """Fill in the report.

        Args:
            kept, dropped: (N,) fp32, entries kept and mass dropped of each row.
            exact: () bool or int32, whether the call is exact for filter_mass's sake; None: there was no filter.
            counts: (N,) fp32, other than 0 for rows that count.
        """
        if self._add_up is not None:
            self._add_up(kept)
            self._add_up(dropped)
        self._figures(self.values, kept, dropped, exact, counts, self._vocab)

    def write_exact(self, scale: Tensor, columns: Tensor) -> None:
        """Fill in the report where there was no filter; scale () is the gradient of all row losses."""
        none = torch.zeros_like(columns, dtype=torch.float32)
        self._figures(self.values, none, none, None, where_it_counts(scale, columns), self._vocab)


def filter_figures(
    values: Tensor, kept: Tensor, dropped: Tensor, exact: Tensor | None, counts: Tensor, vocab: int
) -> None:
    """Write the figures of `FilterStats`, from what `FilterStats.write` takes, to values (5,)."""
    exact = torch.ones((), dtype=torch.bool, device=values.device) if exact is None else exact != 0
    kept, dropped = torch.where(exact, vocab, kept), torch.where(exact, 0, dropped.clamp(min=0))
    counted = counts != 0
    n_rows = counted.sum().clamp(min=1)
    mass = torch.where(counted, dropped, 0)
    in_order = mass.sort().values
    at = (mass.shape[0] - 1 - (n_rows - 1) // 100).reshape(1)
    shares = torch.where(counted, kept, 0).sum(dtype=torch.float64) / vocab, mass.sum(dtype=torch.float64)
    figures = shares[0] / n_rows, shares[1] / n_rows, in_order.index_select(0, at)[0], in_order[-1], exact
    values.copy_(torch.stack([x.float().reshape(()) for x in figures]))
