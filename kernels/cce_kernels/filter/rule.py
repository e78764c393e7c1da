"""The gradient filter (cce_filter): its rule, in torch, and its statistics. The filter package has it in Triton.

An entry is one row's probability p of one vocabulary column. The filter keeps each row's target and every entry with
p ≥ eps. The remaining entries are the row's tail. One of two rules applies to the tail:

threshold  The tail is dropped, as in Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models" (2024), but
           by entry instead of by tile. The gradient is biased: every batch misses the same part.
unbiased   The tail is estimated from a sample. dE takes one column of each group of neighbouring columns, and dC one
           row of each group of rows. Each draw counts `size` times, the size of its group, so that the mean is p.

Why groups: the squared error of a gradient is (size − 1) Σ p² |c|² over the tail (|e|² for dC). Drawing each entry
alone would cost eps Σ p |c|², and tails are flat. Whole columns or rows also make two small products (sample.py).

Likely columns and the head: a column's logit from the batch's mean hidden state predicts its probabilities. The
unbiased rule keeps the likeliest columns, the head, in every row, by a dense product. The next likely columns are drawn
from smaller groups of neighbours in that order.

Draws follow from a seed of the batch's targets, and the order from sums in fp64: the same on every device, in any
tiling. A block of `block_rows` rows shares its drawn columns.

If any row drops more than `filter_mass`, the whole call is exact. On an untrained model p ≈ 1 / V < eps, so a threshold
drops nearly all of the gradient but the targets'.
"""

from __future__ import annotations

from ctypes import c_float
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..options import Options

COLUMN_GROUP, LIKELY_GROUP, ROW_GROUP = 32, 4, 16  # sizes of the groups of which one is drawn
TILE_ROWS, TILE_COLS = 128, 256  # tile of the large products (runtime/tiles.py)
TWO_WAVES = 264  # tiles that a GPU with 132 multiprocessors computes in two waves
ENTRIES_AT_A_TIME = 4096  # rows of c that are converted to fp64 at a time
_MASK, HASH_ODD, HASH_ROUND = 2**32 - 1, 0x9E3779B1, 0x45D9F3B
MOST_HEAD, HEAD_SHARE = 4096, 16  # the head has at most 4096 columns, and at most 1 / 16 of the vocabulary
LIKELY_SHARE = 8  # 1 / 8 of the vocabulary counts as likely, the head included


@dataclass(frozen=True)
class Rule:
    """The rule of one call: which entries are kept, and what is sampled from the tail."""

    eps: Tensor  # () fp32, the threshold; 0 keeps all entries
    seed: Tensor | None  # () int64, the seed of the draws; None if the tail is dropped
    rank: Tensor | None  # (V,) int32, each column's rank by its mean logit; None if no columns count as likely
    likely: Tensor | None  # (n,) int64, the likely columns in order of rank, the first n_head the head; None like rank
    n_head: int = 0
    counts: Tensor | None = None  # (N,) bool, whether a row has a target; None if filter_mass is not checked

    @classmethod
    def of(cls, columns: Tensor, mean_z: Tensor | None, o: Options) -> Rule:
        """The rule of a call.

        columns: (N,) int64, each row's target column, negative for none.
        mean_z: (V,) fp32 from `mean_logits`, for the unbiased rule; else None.
        """
        assert o.filter_eps is not None
        eps = torch.full((), o.filter_eps, dtype=torch.float32, device=columns.device)
        counts = columns >= 0
        if not o.filter_unbiased:
            return cls(eps, None, None, None, counts=counts)
        assert mean_z is not None
        n_head, n_likely = likely_sizes(mean_z.shape[0])
        return cls(eps, seed_of(columns), *by_likelihood(mean_z, n_likely), n_head, counts)

    def exact_if(self, exact: Tensor) -> Rule:
        """This rule, but it keeps everything if exact, () bool, is true."""
        return replace(self, eps=torch.where(exact, 0.0, self.eps))

    def drops_more(self, dropped: Tensor, most: float) -> Tensor:
        """Whether any row with a target drops more mass than `most`, () bool. dropped: (N,), the mass of each row."""
        assert self.counts is not None
        return ((dropped > most) & self.counts).any()

    def keeps(self, p: Tensor, entries: Tensor) -> Tensor:
        """Whether the rule keeps p (N, W) of the columns `entries` (W,), were they no targets: (N, W) bool."""
        kept = p >= self.eps
        return kept if self.rank is None else kept | (self.rank[entries] < self.n_head)[None, :]

    def weights_e(self, p: Tensor, entries: Tensor, dim: int, vocab: int) -> Tensor:
        """What replaces p (N, W) of the columns `entries` (W,) in the gradient of e (N, dim), except at targets."""
        times = torch.zeros(-(-p.shape[0] // block_rows(dim)), vocab, dtype=p.dtype, device=p.device)
        if self.seed is not None:
            nowhere = torch.full((p.shape[0],), -1, device=p.device)
            sample = self.sample(nowhere, dim, vocab)
            times.scatter_add_(1, sample.columns, sample.times.to(p.dtype))
        block = torch.arange(p.shape[0], device=p.device) // block_rows(dim)
        return self._weights(p, entries, times[:, entries][block])

    def weights_c(self, p: Tensor, entries: Tensor) -> Tensor:
        """What replaces p (N, W) of the columns `entries` (W,) in the gradients of c and bias, except at targets."""
        times = torch.zeros_like(p[:, 0])
        if self.seed is not None:
            rows, row_times = draw_rows(self.seed, p.shape[0])
            times.index_add_(0, rows, row_times.to(p.dtype))
        return self._weights(p, entries, times[:, None])

    def _weights(self, p: Tensor, entries: Tensor, times: Tensor) -> Tensor:
        return torch.where(self.keeps(p, entries), p, torch.where(p < self.eps, times * p, 0))

    def sample(self, columns: Tensor, dim: int, vocab: int) -> Sample:
        """The columns drawn for the gradient of e (N, dim), and the rows drawn for the gradient of c.

        columns: (N,) int64, each row's target column.
        """
        assert self.seed is not None
        blocks = -(-columns.shape[0] // block_rows(dim))
        block = torch.arange(columns.shape[0], device=columns.device) // block_rows(dim)
        seeds = _mixed(self.seed + 1 + torch.arange(blocks, device=columns.device))[:, None]
        n_likely = 0 if self.likely is None else self.likely.shape[0]
        target = columns.clamp(min=0)

        drawn = _draws(seeds, -(-vocab // COLUMN_GROUP), COLUMN_GROUP)
        is_one, drawn, group = drawn < vocab, drawn.clamp(max=vocab - 1), target // COLUMN_GROUP
        if self.rank is not None:
            is_one &= self.rank[drawn] >= n_likely
        times = is_one.float() * COLUMN_GROUP
        if self.likely is not None and self.rank is not None and n_likely > self.n_head:
            places = self.n_head + _draws(seeds, -(-(n_likely - self.n_head) // LIKELY_GROUP), LIKELY_GROUP)
            rank = self.rank[target]
            place = drawn.shape[1] + (rank - self.n_head).clamp(min=0) // LIKELY_GROUP
            group = torch.where((rank >= self.n_head) & (rank < n_likely), place.long(), group)
            drawn = torch.cat([drawn, self.likely[places.clamp(max=n_likely - 1)]], dim=1)
            times = torch.cat([times, (places < n_likely).float() * LIKELY_GROUP], dim=1)
        place = torch.where((columns >= 0) & (drawn[block, group] == columns), group, -1)
        return Sample(drawn, times, place, *draw_rows(self.seed, columns.shape[0]))


class Sample(NamedTuple):
    """The columns and rows drawn, and how many times each one counts."""

    columns: Tensor  # (blocks of rows, groups) int64, the columns drawn for each block of rows
    # (blocks of rows, groups) fp32, the size of the drawn column's group; 0 for a draw outside of the vocabulary, and
    # for a likely column drawn from the groups of all columns
    times: Tensor
    place: Tensor  # (N,) int64, the index of a row's target among its block's drawn columns, or -1
    rows: Tensor  # (groups of rows,) int64, the rows drawn
    row_times: Tensor  # (groups of rows,) fp32, the size of the drawn row's group; 0 for a draw beyond the last row

    @classmethod
    def empty(cls, columns: Tensor, dim: int, vocab: int) -> Sample:
        """A sample of a whole vocabulary, without values."""
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
    """(columns of the head, likely columns including the head) of the unbiased rule."""
    head = min(MOST_HEAD, vocab // HEAD_SHARE) // 16 * 16
    return head, max(head, vocab // LIKELY_SHARE // 16 * 16)


def mean_logits(e: Tensor, c: Tensor, bias: Tensor | None, columns: Tensor, o: Options) -> Tensor | None:
    """Each column's logit from the mean hidden state of the rows with a target, before any softcap: (V,) fp32.

    NaN becomes 0. The mean is rounded to bf16, and sums are in fp64. None unless the rule is unbiased.
    """
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
    """logit_scale rounded to fp32, as kernels take it. A more precise scale would order near ties differently."""
    return c_float(o.logit_scale).value


def by_likelihood(mean_z: Tensor, size: int) -> tuple[Tensor | None, Tensor | None]:
    """Each column's rank by its mean logit, (V,) int32, and the `size` likeliest columns in order, (size,) int64.

    The largest logit has rank 0; ties go by index. (None, None) if size is 0.
    """
    if not size:
        return None, None
    order = torch.argsort(mean_z, descending=True, stable=True)
    rank = torch.empty(order.shape, dtype=torch.int32, device=order.device)
    rank[order] = torch.arange(len(order), dtype=torch.int32, device=order.device)
    return rank, order[:size].clone()  # a copy, so that the rest of `order` is freed


def seed_of(columns: Tensor) -> Tensor:
    """The seed of the draws, () int64, from every row's target column (N,)."""
    return _mixed((_mixed(columns) ^ torch.arange(columns.shape[0], device=columns.device) * HASH_ODD).sum())


def block_rows(dim: int) -> int:
    """Rows of e (N, dim) that share their drawn columns: the rows of two waves of dE's tiles."""
    return max(1, TWO_WAVES // -(-dim // TILE_COLS)) * TILE_ROWS


def draw_rows(seed: Tensor, n_rows: int) -> tuple[Tensor, Tensor]:
    """The row drawn from each group of neighbouring rows, and its group's size: `Sample.rows` and `.row_times`."""
    rows = _draws(_mixed(seed), -(-n_rows // ROW_GROUP), ROW_GROUP)
    return rows.clamp(max=n_rows - 1), (rows < n_rows).float() * ROW_GROUP


def _draws(seeds: Tensor, groups: int, size: int) -> Tensor:
    """One draw from each group of `size` numbers, (..., groups) int64. seeds: () or (..., 1) int64."""
    group = torch.arange(groups, device=seeds.device)
    return group * size + _mixed(seeds ^ group * HASH_ODD) % size


def _mixed(x: Tensor) -> Tensor:
    """A hash of each number's lower 32 bits: 32 bits in int64."""
    for _ in range(2):
        x = x & _MASK
        x = (x ^ (x >> 16)) * HASH_ROUND
    x = x & _MASK
    return x ^ (x >> 16)


class FilterStats:
    """Statistics of what one backward pass kept and dropped. Nothing waits for the device.

    They are a tensor (5,) fp32 with the figures of NAMES, over the rows whose loss has a gradient; NaN until backward
    has run:
      entries_kept: share of the rows' entries that were kept.
      dropped_mass_mean, dropped_mass_p99, dropped_mass_max: softmax mass of a row's entries that were not kept. (The
        unbiased rule estimates their part of the gradients.)
      exact: 1 if nothing was filtered, else 0: without filter_eps, where filter_if_faster left the filter out, or where
        filter_mass did.
    """

    NAMES = ("entries_kept", "dropped_mass_mean", "dropped_mass_p99", "dropped_mass_max", "exact")

    @classmethod
    def empty(cls, device: torch.device) -> Tensor:
        """Memory for them."""
        return torch.empty(len(cls.NAMES), dtype=torch.float32, device=device)

    @classmethod
    def report(cls, values: Tensor) -> dict[str, Tensor]:
        """The values by name, as 0-d views; NaN until a backward pass fills them in.

        Called after the forward pass is launched, so that the device need not wait for the fill.
        """
        return dict(zip(cls.NAMES, values.fill_(torch.nan).unbind(), strict=True))

    @classmethod
    def write(cls, values: Tensor, vocab: int, kept: Tensor, dropped: Tensor, exact: Tensor, counts: Tensor) -> None:
        """Fill in the report of a filtered call.

        Args:
            kept, dropped: (N,) fp32, each row's number of entries kept, and softmax mass dropped.
            exact: () bool or int32, whether filter_mass made the call exact.
            counts: (N,) fp32, not 0 for rows that count.
        """
        exact = exact != 0
        kept, dropped = torch.where(exact, vocab, kept), torch.where(exact, 0, dropped.clamp(min=0))
        counted = counts != 0
        n_rows = counted.sum().clamp(min=1)
        mass = torch.where(counted, dropped, 0)
        in_order = mass.sort().values
        at = (mass.shape[0] - 1 - (n_rows - 1) // 100).reshape(1)
        shares = torch.where(counted, kept, 0).sum(dtype=torch.float64) / vocab, mass.sum(dtype=torch.float64)
        figures = shares[0] / n_rows, shares[1] / n_rows, in_order.index_select(0, at)[0], in_order[-1], exact
        values.copy_(torch.stack([x.float().reshape(()) for x in figures]))

    @classmethod
    def write_exact(cls, values: Tensor) -> None:
        """Fill in the report of a call that filters nothing: all entries kept, no mass dropped."""
        values.zero_()[:: len(cls.NAMES) - 1].fill_(1)  # entries_kept, the first, and exact, the last
