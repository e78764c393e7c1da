"""All ranks' rows of a call, on one of the ranks: operands, row statistics and upstream gradients. See api.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ..backends import backend_of
from ..options import Call, Inputs, Options
from ..row_math import IGNORED, Rows, where_it_counts
from .sharding import Gathered, Same, Spread


class AllRows:
    """The operands of a call that is spread over ranks.

    e: (N, D), of all ranks' rows, and c, as the backend multiplies them. `arrive` makes rows of e readable.
    columns: (N,) int64, each row's target column in the whole vocabulary. here: the same of this rank's shard.
    standing: here, but with another column in place of a target on another rank, because every row needs one.
    """

    def __init__(self, x: Inputs, call: Call, rows: int) -> None:
        """rows: those of a chunk of three products; 0 for four products, which read all rows at once."""
        assert call.place is not None
        backend, dtype = backend_of(x.e), call.dtype
        self.spread = spread = Spread.of(call.place, rows)
        self.columns = backend.target_columns(Gathered(spread, x.targets).all(), call.ignore_index, spread.vocab)
        self.here = spread.columns(self.columns)
        gathered = Gathered(spread, x.e.to(dtype))
        self.e, self.c = backend.prepare(gathered.whole, dtype), backend.prepare(x.c, dtype)
        if self.e is not gathered.whole or not rows:  # prepare copies all rows, or the scheme reads all at once
            self.e = backend.prepare(gathered.all(), dtype)
        self.arrive = gathered.wait if spread.own else None
        ignored = self.here == IGNORED
        self.standing = torch.where(ignored, torch.arange(len(self.here), device=x.e.device) % spread.size, self.here)

    def settle(self, weights: Tensor | None, o: Options) -> Any:
        """What three products call for each chunk (`three_products.forward`). weights: of this rank's rows."""
        spread, columns = self.spread, self.columns
        every_weight = None if weights is None else Gathered(spread, weights).all()

        def settle(chunk: slice, rows: Rows, gradient: Any) -> None:
            if every_weight is not None:
                gradient = replace(gradient, weights=every_weight[chunk])
            # w_iv / S_i is a softmax over the shard; times exp(LSE^r − LSE) it is p. The gradient of the row's target,
            # or of its stand-in, is in `gradient.coefficient`.
            parts = [rows.lse, rows.nll]
            if rows.metrics is not None:
                parts += metric_parts(rows, spread.columns(columns[chunk]) != IGNORED)
            every, ends = spread.all_gather(torch.stack(parts)[None]), spread.ends(columns.device)
            backend_of(columns).settle(every, ends, spread.rank, columns[chunk], rows, gradient, o)

        return settle

    def whole(self, rows: Rows) -> Rows:
        """The row statistics of the whole vocabulary from those of every shard; takes one all-gather."""
        spread, columns = self.spread, self.columns
        is_here = self.here != IGNORED
        z_target = rows.lse - rows.nll  # the logit of the target or its stand-in
        assert rows.lost is not None
        parts = [rows.lse, rows.lost, torch.where(is_here, rows.nll, 0)]
        if rows.z_above_mean is not None:
            parts.append(spread.size * (z_target - rows.z_above_mean))  # Σ z
        if rows.metrics is not None:
            parts += metric_parts(rows, is_here)
        every = spread.all_gather(torch.stack(parts)[None])  # (W, parts, N)
        lses, nlls = every[:, 0], every[:, 2]
        highest = lses.amax(dim=0)
        highest.masked_fill_(highest.isinf(), 0)
        above = lses - highest + every[:, 1]  # what a common offset takes no digits from
        rest = above.logsumexp(dim=0)
        lse = highest + rest
        owner = spread.owners(columns)[None]
        lse_owner, nll_owner = lses.gather(0, owner)[0], nlls.gather(0, owner)[0]
        others = above.scatter(0, owner, -torch.inf).logsumexp(dim=0)
        nll = nll_owner + softplus(others - above.gather(0, owner)[0])
        z_above_mean = metrics = None
        if rows.z_above_mean is not None:
            z_above_mean = lse_owner - nll_owner - every[:, 3].sum(dim=0) / spread.vocab
        if rows.metrics is not None:
            entropies, largest = every[:, -2], every[:, -1].amax(dim=0)
            share = above - rest
            entropy = (share.exp() * (entropies - share)).nan_to_num_(nan=0).sum(dim=0)  # 0 · inf if a shard is masked
            metrics = torch.stack(((lse_owner - nll_owner > largest).float(), entropy))
        lost = (rest - (lse - highest)).nan_to_num_(nan=0)
        return Rows(lse, where_it_counts(nll, columns), z_above_mean, metrics, lost=lost)


def metric_parts(rows: Rows, is_here: Tensor) -> list[Tensor]:
    """The entropy over the shard, and the shard's largest logit except the target's."""
    assert rows.metrics is not None
    assert rows.largest is not None
    # A stand-in's logit is no target's, so it counts. It is NaN if a bias of −inf masks the whole shard.
    largest = torch.where(is_here, rows.largest, torch.fmax(rows.largest, rows.lse - rows.nll))
    return [rows.metrics[1], largest]


def upstream_of_all(
    spread: Spread, grad_rows: Tensor, grad_lse: Tensor | None
) -> tuple[Tensor, Tensor | None, Same | None]:
    """The gradients of all ranks' row losses, () or (N,), and log-sum-exps, (N,).

    With rows="same", or for (), every rank has its own copy. The third value says whether all copies are the same.
    """
    if not grad_rows.dim():
        same = Same(grad_rows[None], spread)
        return same.or_nothing(grad_rows), None, same
    upstream = [None if x is None else Gathered(spread, x.float()).all() for x in (grad_rows, grad_lse)]
    if spread.own:
        rows, lse = upstream
        assert rows is not None
        return rows, lse, None
    same = Same(torch.stack([x.sum() for x in upstream if x is not None]), spread)
    rows, lse = (None if x is None else same.or_nothing(x) for x in upstream)
    assert rows is not None
    return rows, lse, same
