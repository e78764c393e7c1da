"""The loss where each rank of a process group holds some rows of C (vocabulary parallelism).

    LSE_i = log Σ_r exp(LSE_i^r)        −log p_i = −log p_i^o + softplus(log Σ_{r ≠ o} exp(LSE_i^r) − LSE_i^o)

LSE^r is of the logits of rank r's rows of C, o the rank that holds row i's target, p^o the softmax over its rows alone:
the forward pass of one device, on each rank. A row whose target is elsewhere has a stand-in, another entry in each row.
One all-gather of 2 numbers a row then gives every rank every rank's: a sum over ranks would need a maximum first, and
of a loss near 0 it would keep no digit. The backward pass is that of one device with the whole LSE: dC is complete
where it is, dE is summed over the ranks in fp32 and rounded once.

`rows="same"`: every rank has all rows of E, as in tensor parallelism; dE by an all-reduce. `rows="own"`: every rank has
rows of its own, as in sequence and data parallelism; E is gathered, dE reduced and scattered.

Cost on each of W ranks: a W-th of four products. Sent, for N rows in all: 8 N bytes for the sums (a row's metrics and
smoothing: 4 each), N D × 4 bytes for dE, and with rows="own" N D × 2 for E in 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import softplus

from .filtered import FilterStats
from .linear_cross_entropy import check_inputs, make_options, product_dtype
from .operators import backend_of
from .options import Options
from .rows import IGNORED, Rows, assemble_loss, mean_metrics, row_coefficients, target_columns, where_it_counts
from .schemes import Problem

ROWS = ("same", "own")


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
        options: softcap, logit_scale, label_smoothing, z_loss, filter_eps, filter_e, filter_c, accumulate and
            workspace_mib, and all else: as in `linear_cross_entropy`. entries_kept, tiles_kept and dropped masses are
            of all ranks' shards.

    Returns:
        As `linear_cross_entropy`.

    Raises:
        ValueError: as there, on the rank that finds it; shards that are not the group's, or not c's.
        WorkspaceTooSmall: as there.
    """
    o = make_options(preset, options)
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
        return_metrics, o,
    )  # fmt: skip

    last = shape[-1] - shift if shift else None
    loss = row_losses.reshape(shape)[..., :last] if reduction == "none" else row_losses.sum()
    all_flat = spread.gather(flat) if spread.own and (return_metrics or reduction == "mean") else flat
    if reduction == "mean":
        loss = loss / (all_flat != ignore_index).sum().clamp(min=1)
    extras: tuple[Any, ...] = (lse.reshape(shape)[..., :last],) if return_lse else ()
    if return_metrics:
        extras = (*extras, mean_metrics(metrics, all_flat, ignore_index))
    if stats is not None:
        extras = (*extras, FilterStats.report(stats))
    return (loss, *extras) if extras else loss


@dataclass(frozen=True)
class Spread:
    """Which rows of C this rank of a group has, and whose rows of E."""

    group: dist.ProcessGroup | None
    rank: int
    shards: tuple[int, ...]
    own: bool

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, shards: Sequence[int], rows: str) -> Spread:
        ranks = dist.get_world_size(group)
        if len(shards) != ranks or min(shards) < 1:
            raise ValueError(f"shards: must be {ranks} positive numbers, one for each rank, got {list(shards)}")
        if rows not in ROWS:
            raise ValueError(f"rows: must be one of {', '.join(ROWS)}, got {rows!r}")
        return cls(group, dist.get_rank(group), tuple(shards), rows == "own")

    @property
    def size(self) -> int:
        return self.shards[self.rank]

    @property
    def vocab(self) -> int:
        return sum(self.shards)

    @property
    def first(self) -> int:
        return sum(self.shards[: self.rank])

    def owners(self, columns: Tensor) -> Tensor:
        """The rank that has each column (N,); 0 for those that are none."""
        ends = torch.tensor(self.shards, device=columns.device).cumsum(0)
        return torch.bucketize(columns, ends, right=True).clamp(max=len(self.shards) - 1)

    def gather(self, x: Tensor) -> Tensor:
        """Every rank's x (n, ...), in order of rank (W n, ...)."""
        out = x.new_empty(len(self.shards) * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous(), group=self.group)
        return out

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x (N, ...), with rows="own" of this rank's rows."""
        if not self.own:
            dist.all_reduce(x, group=self.group)
            return x
        out = x.new_empty(x.shape[0] // len(self.shards), *x.shape[1:])
        dist.reduce_scatter_tensor(out, x, group=self.group)
        return out

    def mine(self, x: Tensor) -> Tensor:
        """This rank's rows of x (..., N)."""
        return x.chunk(len(self.shards), dim=-1)[self.rank] if self.own else x


class _VocabularyParallel(torch.autograd.Function):
    """Row losses and LSE, (N,) fp32, differentiable in e, c and bias, and metrics (2, N) of all rows."""

    @staticmethod
    def forward(ctx, e, c, bias, targets, main_grad_c, stats, spread, ignore_index, dtype, with_metrics, o):
        backend = backend_of(e)
        with torch.autocast(e.device.type, enabled=False), torch.cuda.device_of(e):
            ctx.dtypes = [
                x.dtype if need else None for x, need in zip((e, c, bias), ctx.needs_input_grad, strict=False)
            ]
            e = e.to(dtype)
            if spread.own:
                e, targets = spread.gather(e), spread.gather(targets)
            ctx.width = _width(e, dtype, ctx.dtypes, bias, main_grad_c, stats, spread, o)
            columns = target_columns(targets, ignore_index, spread.vocab)
            e_as, c_as = backend.prepare(e), backend.prepare(c.to(dtype))
            bias = None if bias is None else bias.contiguous()
            rows = _whole(*_of_shard(e_as, c_as, bias, columns, with_metrics, spread, o), columns, spread, o)
            losses = assemble_loss(rows, columns, o)
        ctx.spread, ctx.options, ctx.written = spread, o, (main_grad_c, stats)
        ctx.save_for_backward(e_as, c_as, bias, columns, rows.lse)
        ctx.set_materialize_grads(False)
        metrics = losses.new_empty(2, 0) if rows.metrics is None else rows.metrics
        ctx.mark_non_differentiable(metrics)
        return spread.mine(losses).clone(), spread.mine(rows.lse).clone(), metrics

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_rows, grad_lse, _):
        e, c, bias, columns, lse = ctx.saved_tensors
        spread, o = ctx.spread, ctx.options
        main_grad_c, stats = ctx.written
        recorder = None if stats is None else FilterStats(stats)
        with torch.autocast(e.device.type, enabled=False), torch.cuda.device_of(e):
            upstream = [None if x is None else x.float() for x in (grad_rows, grad_lse)]
            if spread.own:  # all ranks have the same ones
                upstream = [None if x is None else spread.gather(x) for x in upstream]
            grad_rows = torch.zeros_like(lse) if upstream[0] is None else upstream[0]
            a, b = row_coefficients(grad_rows, upstream[1], lse, columns, o)
            # a p − b ((1 − s) [v = target] + s / V), in the terms of a vocabulary of the shard's size
            elsewhere = o.label_smoothing * spread.size / spread.vocab
            share = 1 - o.label_smoothing + elsewhere
            here = replace(o, label_smoothing=elsewhere / share) if o.label_smoothing else o
            if recorder is not None:
                recorder.start(e.shape[0])
            dtype_e, dtype_c, dtype_bias = ctx.dtypes
            grad_e, grad_c, grad_bias = backend_of(e).backward(
                e, c, bias, spread_columns(columns, spread), lse, a, b * share, ctx.width, here,
                (None if dtype_e is None else torch.float32, None if main_grad_c is not None else dtype_c, dtype_bias),
                main_grad_c, recorder,
            )  # fmt: skip
            if recorder is not None:
                recorder.add_up(lambda x: dist.all_reduce(x, group=spread.group))
                recorder.finish(b, spread.vocab)
            if grad_e is not None:
                grad_e = spread.sum(grad_e).to(dtype_e)
        return grad_e, grad_c, grad_bias, *[None] * 8


def spread_columns(columns: Tensor, spread: Spread) -> Tensor:
    """Places in this rank's shard; IGNORED where the target is elsewhere or there is none."""
    here = columns - spread.first
    return torch.where((here >= 0) & (here < spread.size), here, IGNORED)


def _of_shard(
    e: Tensor, c: Tensor, bias: Tensor | None, columns: Tensor, with_metrics: bool, spread: Spread, o: Options
) -> tuple[Rows, Tensor]:
    """What one device finds with the shard as its vocabulary; whether each row's target is here, else it has a
    stand-in."""
    here = spread_columns(columns, spread)
    stand_in = torch.arange(len(columns), device=columns.device) % spread.size
    standing = torch.where(here == IGNORED, stand_in, here)
    return backend_of(e).forward(e, c, bias, standing, with_metrics, o), here != IGNORED


def _whole(rows: Rows, is_here: Tensor, columns: Tensor, spread: Spread, o: Options) -> Rows:
    """The rows of the whole vocabulary from those of every shard: one all-gather."""
    z_target = rows.lse - rows.nll  # or of the stand-in
    parts = [rows.lse, torch.where(is_here, rows.nll, 0)]
    if rows.z_above_mean is not None:
        parts.append(spread.size * (z_target - rows.z_above_mean))  # Σ z
    if rows.metrics is not None and rows.largest is not None:
        largest = torch.where(is_here, rows.largest, torch.maximum(rows.largest, z_target))
        parts += [rows.lse - rows.metrics[1], largest]  # Σ p z, largest z but the target's
    every = spread.gather(torch.stack(parts)[None])  # (W, parts, N)
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


def _width(
    e: Tensor,
    dtype: torch.dtype,
    dtypes: list[torch.dtype | None],
    bias: Tensor | None,
    main_grad_c: Tensor | None,
    stats: Tensor | None,
    spread: Spread,
    o: Options,
) -> int:
    """Vocabulary entries per chunk of the backward pass; the same on all ranks, so that all refuse a workspace."""
    if not any(dtypes):
        return 0
    problem = Problem(
        int(e.shape[0]), int(e.shape[1]), max(spread.shards), dtype, None if dtypes[0] is None else torch.float32,
        dtypes[1], main_grad_c is not None, False, bias is not None, stats is not None,
    )  # fmt: skip
    return backend_of(e).plan(problem, e, o).columns
