"""The loss where each rank of a process group holds some rows of C (vocabulary parallelism).

    LSE_i = log Σ_r exp(LSE_i^r)        −log p_i = −log p_i^o + softplus(log Σ_{r ≠ o} exp(LSE_i^r) − LSE_i^o)

LSE^r is of the logits of rank r's rows of C, o the rank that holds row i's target, p^o the softmax over its rows alone:
the forward pass of one device, on each rank. A row whose target is elsewhere has a stand-in, another entry in each row.
One all-gather of 2 numbers a row then gives every rank every rank's: a sum over ranks would need a maximum first, and
of a loss near 0 it would keep no digit.

The backward pass is that of one device with the whole LSE: dC is complete where it is, dE is summed over the ranks in
fp32 and rounded once. With stored exponentials (stored.py) each chunk of rows is settled, one all-gather, before it is
multiplied: exp(LSE^r − LSE) goes into the rows' factors. What overlaps with computation: with rows="own" the gathering
of E but its first chunk's; the sum of dE over the ranks but the last chunk's, which goes on while that is multiplied.
What does not: each chunk's numbers (dC needs them, and dE's product is not taken first: the two fill each other's idle
multiprocessors, which is worth more), and the last chunk's dE.

`rows="same"`: every rank has all rows of E, as in tensor parallelism; dE by an all-reduce. `rows="own"`: every rank has
rows of its own, as in sequence and data parallelism; E is gathered, dE reduced and scattered.

Cost on each of W ranks: a W-th of the products. Sent, for N rows in all: 8 N bytes for the sums (a row's metrics and
smoothing: 4 each), N D × 4 bytes for dE, and with rows="own" N D × 2 for E in 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import softplus

from .filtered import FilterStats, Rule
from .linear_cross_entropy import check_inputs, make_options, product_dtype
from .operators import USED_UP, backend_of
from .options import Options
from .rows import IGNORED, Rows, assemble_loss, row_coefficients, target_columns, where_it_counts
from .schemes import Plan, Problem

ROWS = ("same", "own")
DIFFERENT = (
    "vocabulary_parallel_linear_cross_entropy: the gradients of the ranks' losses differ; take reduction='none', and "
    "sum the rows' losses with the factors that they are to have"
)


def vocabulary_shards(vocab: int, ranks: int) -> list[int]:
    """Rows of C on each rank: as equal as torch.chunk and DTensor's Shard(0) make them.

    Raises:
        ValueError: a rank would have none.
    """
    each = -(-vocab // ranks)
    shards = [min(each, max(0, vocab - rank * each)) for rank in range(ranks)]
    if shards[-1] == 0:
        raise ValueError(f"vocab: {vocab} entries in shards of {each} leave some of {ranks} ranks without any")
    return shards


@torch.compiler.disable
def vocabulary_parallel_linear_cross_entropy(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    *,
    shards: Sequence[int],
    group: dist.ProcessGroup | None = None,
    rows: str = "same",
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    shift: int = 0,
    main_grad_c: Tensor | None = None,
    return_lse: bool = False,
    return_metrics: bool = False,
    return_stats: bool = False,
    preset: str | None = None,
    **options: Any,
) -> Any:
    """`linear_cross_entropy` with the rows of c, bias and main_grad_c spread over the ranks of a group.

    All ranks call it together, forward and backward, with the same shapes and options. Gradients equal those of one
    device within rounding; those of c and bias are of the rank's rows. A graph break under torch.compile.

    Args:
        e: (..., D), and targets: (...), places in the whole vocabulary. With rows="same" the same on every rank, as
            must be the gradient of what is returned; with rows="own" the rank's own, of one shape on all ranks.
        c: (shards[rank], D), the rank's rows of the whole classifier, in order of rank. bias, main_grad_c: likewise.
        shards: rows of c on each rank, none of them 0; see `vocabulary_shards`.
        group: None for all processes.
        rows: "same": loss and gradients of e as on one device, on every rank; gradients are those of one rank's loss,
            not of the sum of all ranks' copies. "own": loss, lse and gradient of e are of the rank's own rows;
            gradients are those of the sum of all ranks' losses. "mean" then divides the rank's sum by the targets that
            are not ignored on all ranks, so that the ranks' losses add up to the mean; metrics are of all ranks' rows.
        options: softcap, logit_scale, label_smoothing, z_loss, filter_eps, filter_unbiased, filter_e, filter_c,
            accumulate and workspace_mib, and all else: as in `linear_cross_entropy`; no filter_mass but 0 or None.
            The statistics are of all ranks' shards.

    Returns:
        As `linear_cross_entropy`.

    Raises:
        ValueError: as there, on the rank that finds it; shards that are not the group's, or not c's.
        WorkspaceTooSmall: as there.
    """
    o = make_options(preset, options)
    if o.filter_mass is not None:
        raise ValueError(
            "filter_mass: not with vocabulary parallelism; no rank sees a row's whole mass before its gradient"
        )
    spread = Spread.of(group, shards, rows)
    if c.shape[0] != spread.size:
        raise ValueError(f"c: has {c.shape[0]} rows, shards says {spread.size} for rank {spread.rank}")
    check_inputs(e, c, targets, bias, main_grad_c, ignore_index, reduction, shift, spread.vocab)
    if shift:
        nothing = torch.full_like(targets[..., :shift], ignore_index)
        targets = torch.cat((targets[..., shift:], nothing), dim=-1)
    shape, flat = targets.shape, targets.reshape(-1).long()
    if not flat.numel():
        raise ValueError("targets: must not be empty")
    stats = FilterStats.empty(e.device) if return_stats else None
    row_losses, lse, metrics = _VocabularyParallel.apply(
        e.reshape(-1, e.shape[-1]), c, bias, flat, main_grad_c, stats, spread, ignore_index, product_dtype(e, c),
        reduction != "none" and not return_lse, return_metrics, o,
    )  # fmt: skip

    last = shape[-1] - shift if shift else None
    loss = row_losses.reshape(shape)[..., :last] if reduction == "none" else row_losses.sum()
    if reduction == "mean" or return_metrics:
        kept = flat != ignore_index
        sums = [torch.where(kept, x, 0).sum(dtype=torch.float64) for x in (kept, *metrics.T)]
        n_kept, *sums = spread.total(torch.stack(sums)).float()
        if reduction == "mean":
            loss = loss / n_kept.clamp(min=1)
    extras: tuple[Any, ...] = (lse.reshape(shape)[..., :last],) if return_lse else ()
    if return_metrics:
        accuracy, entropy = (x / n_kept.clamp(min=1) for x in sums)
        extras = (*extras, {"accuracy": accuracy, "entropy": entropy})
    if stats is not None:
        extras = (*extras, FilterStats.report(stats))
    return (loss, *extras) if extras else loss


@dataclass(frozen=True)
class Spread:
    """Which rows of C this rank of a group has, and whose rows of E.

    With rows="own" all ranks' rows stand in chunks of `chunk` rows (0: one of all), each of them in order of rank: a
    chunk can be gathered, and its gradient reduced and scattered, by itself.
    """

    group: dist.ProcessGroup | None
    rank: int
    shards: tuple[int, ...]
    own: bool
    chunk: int = 0

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, shards: Sequence[int], rows: str) -> Spread:
        ranks = dist.get_world_size(group)
        if len(shards) != ranks or min(shards) < 1:
            raise ValueError(f"shards: must be {ranks} positive numbers, one for each rank, got {list(shards)}")
        if rows not in ROWS:
            raise ValueError(f"rows: must be one of {', '.join(ROWS)}, got {rows!r}")
        return cls(group, dist.get_rank(group), tuple(shards), rows == "own")

    def by_chunks(self, rows: int) -> Spread:
        """The same in chunks of `rows` rows, or as few less as all ranks have the same number."""
        return replace(self, chunk=max(rows // self.ranks, min(rows, 1)) * self.ranks if self.own else rows)

    @property
    def ranks(self) -> int:
        return len(self.shards)

    @property
    def size(self) -> int:
        return self.shards[self.rank]

    @property
    def vocab(self) -> int:
        return sum(self.shards)

    def columns(self, columns: Tensor) -> Tensor:
        """Places in this rank's shard; IGNORED where the target is elsewhere or there is none."""
        here = columns - sum(self.shards[: self.rank])
        return torch.where((here >= 0) & (here < self.size), here, IGNORED)

    def owners(self, columns: Tensor) -> Tensor:
        """The rank that has each column (N,); some rank for those that are none."""
        return torch.bucketize(columns, self.ends(columns.device), right=True).clamp(max=self.ranks - 1)

    def ends(self, device: torch.device) -> Tensor:
        """Where each rank's columns end (W,) int64."""
        return _ends(self.shards, device)

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's x (n, ...), in order of rank (W n, ...)."""
        out = x.new_empty(self.ranks * x.shape[0], *x.shape[1:])
        all_gather(out, x.contiguous(), self.group).wait()
        return out

    def total(self, x: Tensor) -> Tensor:
        """The sum of what the ranks have found of their rows."""
        if self.own:
            dist.all_reduce(x, group=self.group)
        return x

    def mine(self, x: Tensor) -> Tensor:
        """This rank's rows of x (N, ...)."""
        if not self.own:
            return x
        return torch.cat([piece.chunk(self.ranks)[self.rank] for piece in x.split(self.chunk or len(x))])


@lru_cache(maxsize=64)
def _ends(shards: tuple[int, ...], device: torch.device) -> Tensor:
    """Kept: to bring numbers to a GPU the host waits for it."""
    return torch.tensor(shards, device=device).cumsum(0)


class _VocabularyParallel(torch.autograd.Function):
    """Row losses and LSE, (N,) fp32, differentiable in e, c and bias, and metrics (N, 2), if asked for."""

    @staticmethod
    def forward(ctx, e, c, bias, targets, main_grad_c, stats, spread, ignore_index, dtype, uniform, with_metrics, o):
        backend = backend_of(e)
        needs = ctx.needs_input_grad[:3]
        with torch.autocast(e.device.type, enabled=False), torch.cuda.device_of(e):
            ctx.dtypes = [x.dtype if need else None for x, need in zip((e, c, bias), needs, strict=True)]
            plan = _plan(e, dtype, ctx.dtypes, bias, main_grad_c, uniform, spread, o)
            spread = spread.by_chunks(plan.rows)
            columns = target_columns(Gathered(spread, targets).all(), ignore_index, spread.vocab)
            here = spread.columns(columns)
            gathered = Gathered(spread, e.to(dtype))
            e, c = backend.prepare(gathered.whole), backend.prepare(c.to(dtype))
            if e is not gathered.whole or not plan.rows:  # a copy, or nothing to wait for a part with
                e = backend.prepare(gathered.all())
            bias = None if bias is None else bias.contiguous()
            # Every row has a target on every rank: another entry stands in for one that is elsewhere.
            standing = torch.where(here == IGNORED, torch.arange(len(here), device=e.device) % spread.size, here)
            state: list[Tensor] = []
            if plan.rows:
                here = standing

                def settle(chunk, rows, gradient):
                    _settle(e[chunk], rows, gradient, columns[chunk], spread, o)

                dtype_c = torch.bfloat16 if main_grad_c is not None else ctx.dtypes[1]
                dtypes = (ctx.dtypes[0] and torch.float32, ctx.dtypes[1] and dtype_c)
                rows, state = backend.stored.forward(
                    e, c, standing, spread.chunk, dtypes, with_metrics, replace(o, z_loss=0.0), settle,
                    gathered.wait if spread.own else None,
                )  # fmt: skip
            else:
                rows = _whole(backend.forward(e, c, bias, standing, with_metrics, o), columns, spread, o)
            losses = assemble_loss(rows, columns, o)
        ctx.plan, ctx.spread, ctx.options, ctx.written = plan, spread, o, (main_grad_c, stats)
        ctx.save_for_backward(e, c, bias, columns, here, rows.lse, *state)
        ctx.set_materialize_grads(False)
        ctx.finished = False
        metrics = losses.new_empty(0, 0) if rows.metrics is None else spread.mine(rows.metrics.T)
        ctx.mark_non_differentiable(metrics)
        return spread.mine(losses), spread.mine(rows.lse), metrics

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_rows, grad_lse, _):
        if ctx.finished:
            raise RuntimeError(USED_UP)
        e, c, bias, columns, here, lse, *state = ctx.saved_tensors
        spread, main_grad_c = ctx.spread, ctx.written[0]
        dtype_e, dtype_c, _ = ctx.dtypes
        with torch.autocast(e.device.type, enabled=False), torch.cuda.device_of(e):
            reduced = Reduced(spread)
            if state:
                ctx.finished = True
                scale = grad_rows[0].float()
                scales = Gathered(spread, scale[None])
                stored = backend_of(e).stored
                grad_e, grad_c = state[stored.GRAD_E], state[stored.GRAD_C]
                stored.backward(
                    e, c, here, scale, spread.chunk, state, main_grad_c,
                    lambda part: reduced.add(grad_e, part),
                )  # fmt: skip
                grad_bias = None
                torch._assert_async((scales.all() == scale).all() | scale.isnan(), DIFFERENT)
                grad_c = None if dtype_c is None or main_grad_c is not None else grad_c.to(dtype_c)
            else:
                grad_e, grad_c, grad_bias = _recompute(ctx, grad_rows, grad_lse, e, c, bias, columns, here, lse)
                if grad_e is not None:
                    reduced.add(grad_e, slice(0, len(grad_e)))
            grad_e = None if dtype_e is None else reduced.result().to(dtype_e)
        return grad_e, grad_c, grad_bias, *[None] * 9


def _recompute(ctx, grad_rows, grad_lse, e, c, bias, columns, here, lse):
    """Gradients of e (this rank's part of the sum, fp32), c and bias from recomputed logits."""
    spread, o = ctx.spread, ctx.options
    main_grad_c, stats = ctx.written
    dtype_e, dtype_c, dtype_bias = ctx.dtypes
    upstream = [None if x is None else Gathered(spread, x.float()).all() for x in (grad_rows, grad_lse)]
    grad_rows = torch.zeros_like(lse) if upstream[0] is None else upstream[0]
    a, b = row_coefficients(grad_rows, upstream[1], lse, columns, o)
    # a p − b ((1 − s) [v = target] + s / V), in the terms of a vocabulary of the shard's size
    elsewhere = o.label_smoothing * spread.size / spread.vocab
    share = 1 - o.label_smoothing + elsewhere
    recorder = None if stats is None else FilterStats(stats, lambda x: dist.all_reduce(x, group=spread.group))
    rule = None
    if o.filter_eps is not None:
        rule = Rule.of(columns, spread.vocab, o).shard(sum(spread.shards[: spread.rank]), spread.size)
    return backend_of(e).backward(
        e, c, bias, here, lse, a, b * share, ctx.plan.columns, replace(o, label_smoothing=elsewhere / share),
        (dtype_e and torch.float32, None if main_grad_c is not None else dtype_c, dtype_bias), main_grad_c, recorder,
        rule,
    )  # fmt: skip


def _settle(e: Tensor, rows: Rows, gradient: Any, columns: Tensor, spread: Spread, o: Options) -> None:
    """Turn what stored.py finds of a chunk's rows in the shard alone into what they are in the whole vocabulary.

    w_iv / S_i is a softmax over the shard: exp(LSE^r − LSE) makes p of it. The row's target here, a stand-in or its
    own, has its gradient apart.
    """
    parts = [rows.lse, rows.nll]
    if rows.metrics is not None:
        parts += _metric_parts(rows, spread.columns(columns) != IGNORED)
    every = spread.all_gather(torch.stack(parts)[None])
    backend_of(e).settle(every, spread.ends(e.device), spread.rank, columns, rows, gradient, o)
    if gradient.scaled is not None:
        torch.mul(e, gradient.factor[:, None], out=gradient.scaled)


def _metric_parts(rows: Rows, is_here: Tensor) -> list[Tensor]:
    """Σ p z over the shard, and the largest of its logits but the target's."""
    assert rows.metrics is not None
    assert rows.largest is not None
    largest = torch.where(is_here, rows.largest, torch.maximum(rows.largest, rows.lse - rows.nll))
    return [rows.lse - rows.metrics[1], largest]


def _whole(rows: Rows, columns: Tensor, spread: Spread, o: Options) -> Rows:
    """The rows of the whole vocabulary from those of every shard: one all-gather."""
    is_here = spread.columns(columns) != IGNORED
    z_target = rows.lse - rows.nll  # or of the stand-in
    parts = [rows.lse, torch.where(is_here, rows.nll, 0)]
    if rows.z_above_mean is not None:
        parts.append(spread.size * (z_target - rows.z_above_mean))  # Σ z
    if rows.metrics is not None:
        parts += _metric_parts(rows, is_here)
    every = spread.all_gather(torch.stack(parts)[None])  # (W, parts, N)
    lses, nlls = every[:, 0], every[:, 1]
    lse = lses.logsumexp(dim=0)
    owner = spread.owners(columns)[None]
    lse_owner, nll_owner = lses.gather(0, owner)[0], nlls.gather(0, owner)[0]
    others = lses.scatter(0, owner, -torch.inf).logsumexp(dim=0)
    nll = nll_owner + softplus(others - lse_owner)
    z_above_mean = metrics = None
    if rows.z_above_mean is not None:
        z_above_mean = lse_owner - nll_owner - every[:, 2].sum(dim=0) / spread.vocab
    if rows.metrics is not None:
        means, largest = every[:, -2], every[:, -1].amax(dim=0)
        entropy = lse - ((lses - lse).exp() * means).nan_to_num_(nan=0).sum(dim=0)  # 0 · −inf: a shard masked out
        metrics = torch.stack(((lse_owner - nll_owner > largest).float(), entropy))
    return Rows(lse, where_it_counts(nll, columns), z_above_mean, metrics)


def _plan(
    e: Tensor,
    dtype: torch.dtype,
    dtypes: list[torch.dtype | None],
    bias: Tensor | None,
    main_grad_c: Tensor | None,
    uniform: bool,
    spread: Spread,
    o: Options,
) -> Plan:
    """How the largest shard goes about the backward pass, which all ranks then do: they have the same chunks."""
    if not any(dtypes):
        return Plan(0, 0)
    problem = Problem(
        int(e.shape[0]) * (spread.ranks if spread.own else 1), int(e.shape[1]), max(spread.shards), dtype,
        dtypes[0] and torch.float32, dtypes[1], main_grad_c is not None, uniform, bias is not None,
    )  # fmt: skip
    return backend_of(e).plan(problem, e, o)


def all_gather(out: Tensor, part: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Every rank's `part`, in order of rank, into `out`, begun. (torch 2.13 renames it and warns of the old name.)"""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(out, part, group=group, async_op=True)


def reduce_scatter(out: Tensor, whole: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """This rank's part of the sum of all ranks' `whole` into `out`, begun. (As above.)"""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(out, whole, group=group, async_op=True)


class Gathered:
    """All ranks' rows `whole` (N, ...) of a tensor of which each has its own (n, ...), begun chunk after chunk."""

    def __init__(self, spread: Spread, x: Tensor) -> None:
        self.whole, self._begun, self._waited = x, [], 0
        if spread.own:
            self.whole = x.new_empty(len(x) * spread.ranks, *x.shape[1:])
        self._chunk = spread.chunk or len(self.whole)
        if spread.own:
            parts = zip(self.whole.split(self._chunk), x.contiguous().split(self._chunk // spread.ranks), strict=True)
            self._begun = [all_gather(out, part, spread.group) for out, part in parts]

    def wait(self, part: slice) -> None:
        """Until `whole` may be read as far as `part` goes."""
        chunks = -(-part.stop // self._chunk)
        for work in self._begun[self._waited : chunks]:
            work.wait()
        self._waited = max(self._waited, chunks)

    def all(self) -> Tensor:
        """`whole`, all of which may be read."""
        self.wait(slice(0, len(self.whole)))
        return self.whole


class Reduced:
    """Sums over the ranks of a gradient's rows (N, D) fp32, each begun as soon as its rows are there."""

    def __init__(self, spread: Spread) -> None:
        self._spread = spread
        self._begun: list[dist.Work] = []
        self._sum: Tensor | None = None

    def add(self, grad: Tensor, part: slice) -> None:
        """Begin the sum of all ranks' grad[part], whole chunks of rows."""
        spread = self._spread
        if not spread.own:
            self._sum = grad
            self._begun.append(dist.all_reduce(grad[part], group=spread.group, async_op=True))
            return
        if self._sum is None:
            self._sum = grad.new_empty(len(grad) // spread.ranks, *grad.shape[1:])
        for chunk in grad[part].split(spread.chunk or len(grad)):
            first = part.start // spread.ranks
            out = self._sum[first : first + len(chunk) // spread.ranks]
            self._begun.append(reduce_scatter(out, chunk, spread.group))
            part = slice(part.start + len(chunk), part.stop)

    def result(self) -> Tensor:
        """The whole sum, with rows="own" of this rank's rows."""
        for work in self._begun:
            work.wait()
        assert self._sum is not None
        return self._sum
