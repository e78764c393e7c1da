"""The gradient filter (cce_filter): which entries and tiles of dL/dz take part, and what was left out.

An entry of (softmax − onehot) is dropped where its softmax probability p < eps; the target's entry always
stays, with its full p_t − 1. The rule looks at one entry alone, so the gradients do not depend on how the
work is tiled. At most 1 / eps entries per row survive (4096 for 2^-12), and tiles without a survivor are
skipped by both products. Method: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models"
(2024); there a tile that holds one survivor keeps all its entries, and the vocabulary is sorted by mean
logit.

**Vocabulary order.** Survivors crowd into few tiles when likely entries are neighbours. We order by how often
an entry is a target in this batch, ties by index: known before any product runs, and an estimate of the
frequency order, which left 0.48 of the tiles on a small trained model of 32K entries (mean-logit order 0.66,
the tokenizer's own 0.90). Integer counts and a stable sort on the device: no synchronisation, always the
same.

The filter is biased: mass it drops is missing from the gradient, nearly all of it where the model is
untrained (p ≈ 1 / V < eps). It suits fine-tuning, not the start of pretraining; `FilterStats` says how much
was dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TILE = 128  # rows and columns of the tiles that are skipped or kept, for 16-bit inputs


def vocabulary_order(columns: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """Vocabulary entries by descending count as targets, and the targets' places in that order.

    Args:
        columns: (N,) int64 targets, -1 for none.

    Returns:
        order (V,) int64: the entry at each place; places (N,) int64: each row's target's place, -1 for none.
    """
    counts = torch.zeros(vocab + 1, dtype=torch.int64, device=columns.device)
    counts.scatter_add_(0, torch.where(columns >= 0, columns, vocab), torch.ones_like(columns))
    order = torch.argsort(counts[:vocab], descending=True, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(vocab, device=columns.device)
    return order, torch.where(columns >= 0, rank[columns.clamp(min=0)], -1)


def surviving_tiles(flags: Tensor) -> tuple[Tensor, Tensor]:
    """Turn flags (rows of tiles, columns of tiles) into lists.

    Returns:
        lists, int32, like flags: in each row the indices of its surviving tiles, ascending, then the others;
        counts, int32: how many survive in each row.
    """
    flags = flags.contiguous()
    lists = torch.argsort(flags, dim=1, descending=True, stable=True).to(torch.int32)
    return lists, flags.sum(dim=1, dtype=torch.int32)


class FilterStats:
    """What one backward pass kept and dropped, gathered chunk by chunk without a synchronisation.

    `values` (4,) fp32, on the device of the inputs, holds the figures of NAMES, NaN until backward has run:
    entries_kept, tiles_kept: shares of the N_kept × V entries (rows that count) and of all tiles;
    dropped_mass_mean, dropped_mass_max: softmax mass dropped per row that counts.
    """

    NAMES = ("entries_kept", "tiles_kept", "dropped_mass_mean", "dropped_mass_max")

    def __init__(self, values: Tensor) -> None:
        self.values = values

    @classmethod
    def empty(cls, device: torch.device) -> Tensor:
        """Values before the backward pass."""
        return torch.full((len(cls.NAMES),), torch.nan, device=device)

    @classmethod
    def report(cls, values: Tensor) -> dict[str, Tensor]:
        """The values by name, as 0-d views."""
        return dict(zip(cls.NAMES, values.unbind(), strict=True))

    def start(self, n_rows: int) -> None:
        """Begin a backward pass."""
        zero = self.values.new_zeros
        self._entries, self._tiles, self._mass = zero((), dtype=torch.float64), zero(()), zero(n_rows)
        self._n_tiles: int | Tensor = 0
        self._recorded = False

    def add(self, kept_entries: Tensor, kept_tiles: Tensor, tiles: int, dropped_mass: Tensor) -> None:
        """Record one chunk; dropped_mass (N,)."""
        self._entries += kept_entries
        self._tiles += kept_tiles
        self._n_tiles += tiles
        self._recorded = True
        self._mass += dropped_mass

    def add_up(self, all_reduce: Callable[[Tensor], Any]) -> None:
        """Sum what the ranks of a group have recorded, each of its part of the vocabulary, in place on all of them."""
        tiles = torch.zeros_like(self._tiles) + self._n_tiles
        for x in (self._entries, self._tiles, self._mass, tiles):
            all_reduce(x)
        self._n_tiles = tiles

    def finish(self, b: Tensor, vocab: int) -> None:
        """Fill in the report; b (N,) is non-zero for rows that count. No chunk recorded: nothing dropped."""
        n_rows = (b != 0).sum().clamp(min=1)
        one = n_rows.new_ones((), dtype=torch.float64)
        entries, tiles = one, one
        if self._recorded:
            entries, tiles = self._entries / (n_rows * vocab), self._tiles / self._n_tiles
        self.values.copy_(torch.stack((entries, tiles, self._mass.sum() / n_rows, self._mass.max())))
