"""The loss of api.py as custom operators, opaque to torch.compile, and their derivative.

As in ../operators.py, the scheme of the backward pass follows from shapes, dtypes and options alone. The operators take
a process group's name. They communicate, so all ranks must run the same graph, as with torch's own collectives.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import softplus

from ..backends import backend_of, refuse_given_back, restored
from ..derivative import differentiable, empty_gradient, stored_dtypes
from ..filter.rule import FilterStats, Rule
from ..operators import NAMESPACE, OPTIONS
from ..options import Options, options_of
from ..planner import Plan, Problem
from ..row_math import IGNORED, Rows, assemble_loss, weighted, where_it_counts
from ..runtime.devices import kernels_on
from ..runtime.state import State, filled, present, used_up
from .sharding import Gathered, Reduced, Same, Spread, chunk_rows, process_group

# The inputs of ../operators.py, but without a reduction: these operators return row losses, which api.py sums.
# uniform: whether all row losses have one upstream gradient, and the log-sum-exps none.
INPUTS = (
    "Tensor e, Tensor c, Tensor targets, Tensor? bias, Tensor? main_grad_c, Tensor? stats, Tensor? weights, "
    "int ignore_index, ScalarType dtype, bool uniform, bool with_metrics, bool[] needs"
)
# The arguments of Spread.of.
PLACE = "str group, int[] shards, bool own, bool agreed"
DIFFERENT = (
    "vocabulary_parallel_linear_cross_entropy: the gradients of the ranks' losses differ; use reduction='none', and "
    "multiply each row's loss by its own factor"
)


# ---------------------------------------------------------------------------------------------------------- forward
def _forward(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    main_grad_c: Tensor | None,
    stats: Tensor | None,
    weights: Tensor | None,
    ignore_index: int,
    dtype: torch.dtype,
    uniform: bool,
    with_metrics: bool,
    needs: list[bool],
    group: str,
    shards: list[int],
    own: bool,
    agreed: bool,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, State, Plan]:
    """Row losses (N,), LSE (N,) and metrics (N, 2) (empty unless wanted), all fp32; and state and plan of the backward
    pass.

    With `own` they cover the rank's own rows. The state has no entries if no gradient is wanted.
    """
    o, backend = options_of(*options), backend_of(e)
    with kernels_on(e):
        plan = _plan(e, bias, main_grad_c, c.dtype, dtype, uniform, needs, shards, own, o)
        o = plan.options(o)
        spread = Spread.of(group, shards, own, agreed).by_chunks(plan.rows)
        columns = backend.target_columns(Gathered(spread, targets).all(), ignore_index, spread.vocab)
        here = spread.columns(columns)
        bias = None if bias is None else bias.contiguous()
        gathered = Gathered(spread, e.to(dtype))
        e_as, c_as = backend.prepare(gathered.whole, dtype), backend.prepare(c, dtype)
        if e_as is not gathered.whole or not plan.rows:  # prepare copies all rows, or the scheme reads all at once
            e_as = backend.prepare(gathered.all(), dtype)
        # Every row needs a target on every rank: another column stands in for a target on another rank.
        standing = torch.where(here == IGNORED, torch.arange(len(here), device=e.device) % spread.size, here)
        state: State = []
        if plan.rows:
            here = standing
            every_weight = None if weights is None else Gathered(spread, weights).all()

            def settle(chunk: slice, rows: Rows, gradient: Any) -> None:
                if every_weight is not None:
                    gradient = replace(gradient, weights=every_weight[chunk])
                _settle(e_as[chunk], rows, gradient, columns[chunk], spread, o)

            rows, state = backend.three_products.forward(
                e_as, c_as, standing, spread.chunk, stored_dtypes(torch.float32, c, bias, main_grad_c, needs),
                with_metrics, replace(o, z_loss=0.0), settle, gathered.wait if own else None, with_lse=not uniform,
                bias=bias,
            )  # fmt: skip
        else:
            rows = _whole(backend.forward(e_as, c_as, bias, standing, with_metrics, o), columns, spread)
        losses = weighted(spread.mine(assemble_loss(rows, columns, o)), spread.mine(columns), weights)
    metrics = losses.new_empty(0, 0) if rows.metrics is None else spread.mine(rows.metrics.T.contiguous())
    if not any(needs):
        return losses, spread.mine(rows.lse), metrics, [], plan
    # A custom operator must not return an input, nor one tensor twice.
    copies = [None if x_as is x else x_as for x, x_as in ((e, e_as), (c, c_as))]
    lse = rows.lse if own else None
    return losses, spread.mine(rows.lse), metrics, [columns, here, lse, rows.lost, *copies, *state], plan


_forward_op = torch.library.custom_op(
    f"{NAMESPACE}::vocab_parallel",
    filled(_forward),
    mutates_args=(),
    schema=f"({INPUTS}, {PLACE}, {OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor[])",
)


def _fake_forward(
    e, c, targets, bias, main_grad_c, stats, weights, ignore_index, dtype, uniform, with_metrics, needs, group, shards,
    own, agreed, *options,
):  # fmt: skip
    o, backend = options_of(*options), backend_of(e)
    plan = _plan(e, bias, main_grad_c, c.dtype, dtype, uniform, needs, shards, own, o)
    losses = e.new_empty(e.shape[0], dtype=torch.float32)
    metrics = losses.new_empty((e.shape[0], 2) if with_metrics else (0, 0))
    if not any(needs):
        return losses, torch.empty_like(losses), metrics, [], plan
    n_rows = e.shape[0] * (len(shards) if own else 1)
    whole = e.new_empty(n_rows, e.shape[1], dtype=dtype) if own else e.to(dtype)
    e_as, c_as = backend.prepare(whole, dtype), backend.prepare(c, dtype)
    copies = [None if x_as is x else x_as for x, x_as in ((e, e_as), (c, c_as))]
    state = []
    if plan.rows:
        chunk = chunk_rows(plan.rows, len(shards), own)
        state = backend.three_products.empty_state(
            e_as, c, chunk, stored_dtypes(torch.float32, c, bias, main_grad_c, needs), o, with_lse=not uniform
        )
    columns, lse = targets.new_empty(n_rows), losses.new_empty(n_rows)
    of_all = [columns, torch.empty_like(columns), lse if own else None, None if plan.rows else torch.empty_like(lse)]
    return losses, torch.empty_like(losses), metrics, [*of_all, *copies, *state], plan


_forward_op.register_fake(filled(_fake_forward))


def _settle(e: Tensor, rows: Rows, gradient: Any, columns: Tensor, spread: Spread, o: Options) -> None:
    """Turn a chunk's rows and gradient factors of one shard into those of the whole vocabulary, in place.

    w_iv / S_i is a softmax over the shard; times exp(LSE^r − LSE) it is p. The gradient of the row's target, or of its
    stand-in, is in `gradient.coefficient`.
    """
    parts = [rows.lse, rows.nll]
    if rows.metrics is not None:
        parts += _metric_parts(rows, spread.columns(columns) != IGNORED)
    every = spread.all_gather(torch.stack(parts)[None])
    backend_of(e).settle(every, spread.ends(e.device), spread.rank, columns, rows, gradient, o)


def _metric_parts(rows: Rows, is_here: Tensor) -> list[Tensor]:
    """The entropy over the shard, and the shard's largest logit except the target's."""
    assert rows.metrics is not None
    assert rows.largest is not None
    # A stand-in's logit is no target's, so it counts. It is NaN if a bias of −inf masks the whole shard.
    largest = torch.where(is_here, rows.largest, torch.fmax(rows.largest, rows.lse - rows.nll))
    return [rows.metrics[1], largest]


def _whole(rows: Rows, columns: Tensor, spread: Spread) -> Rows:
    """The row statistics of the whole vocabulary from those of every shard; takes one all-gather."""
    is_here = spread.columns(columns) != IGNORED
    z_target = rows.lse - rows.nll  # the logit of the target or its stand-in
    assert rows.lost is not None
    parts = [rows.lse, rows.lost, torch.where(is_here, rows.nll, 0)]
    if rows.z_above_mean is not None:
        parts.append(spread.size * (z_target - rows.z_above_mean))  # Σ z
    if rows.metrics is not None:
        parts += _metric_parts(rows, is_here)
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
        entropy = (share.exp() * (entropies - share)).nan_to_num_(nan=0).sum(dim=0)  # 0 · inf if a bias masks a shard
        metrics = torch.stack(((lse_owner - nll_owner > largest).float(), entropy))
    lost = (rest - (lse - highest)).nan_to_num_(nan=0)
    return Rows(lse, where_it_counts(nll, columns), z_above_mean, metrics, lost=lost)


# --------------------------------------------------------------------------------------------------------- backward
def _upstream(spread: Spread, grad_rows: Tensor, grad_lse: Tensor | None) -> tuple[Tensor, Tensor | None, Same | None]:
    """The gradients (N,) of all row losses and log-sum-exps.

    With rows="same", every rank has its own copy. The third value says whether all copies are the same.
    """
    upstream = [None if x is None else Gathered(spread, x.float()).all() for x in (grad_rows, grad_lse)]
    same = None
    if not spread.own:
        same = Same(torch.stack([x.sum() for x in upstream if x is not None]), spread)
        upstream = [None if x is None else same.or_nothing(x) for x in upstream]
    rows, lse = upstream
    assert rows is not None
    return rows, lse, same


def _finish_stored(
    scale: Tensor,
    grad_lse: Tensor | None,
    e: Tensor,
    c: Tensor,
    columns: Tensor,
    here: Tensor,
    held: State,
    sums: State,
    main_grad_c: Tensor | None,
    stats: Tensor | None,
    chunk: int,
    logit_scale: float,
    group: str,
    shards: list[int],
    own: bool,
    agreed: bool,
) -> Tensor:
    """Finish the sums of all gradients in place, times scale () or (rows of this rank,).

    grad_lse: dL/dLSE of this rank's rows, or None. held, sums: the parts of the state, as in ../operators.py.

    Returns, with `own`, the gradient of e of this rank's rows, summed over the ranks: (N, D) fp32. Else, or if it is
    not wanted, an empty tensor.
    """
    refuse_given_back(e=e, c=c, main_grad_c=main_grad_c)
    stored, state = backend_of(e).three_products, [*held, *sums]
    spread = replace(Spread.of(group, shards, own, agreed), chunk=chunk)
    with kernels_on(e):
        if scale.dim():
            scale, grad_lse, same = _upstream(spread, scale, grad_lse)
        else:
            same = Same(scale[None], spread)
            scale = same.or_nothing(scale)
        reduced = Reduced(spread)
        stored.backward(
            e, c, here, scale, chunk, state, main_grad_c, Options(logit_scale=logit_scale),
            lambda part: reduced.add(state[stored.GRAD_E], part), grad_lse,
        )  # fmt: skip
        total = e.new_empty(0) if present(state[stored.GRAD_E]) is None else reduced.result()
        if same is not None:
            same.check(DIFFERENT)
        if stats is not None:
            FilterStats.write_exact(stats)
    return total if own else e.new_empty(0)


_finish_stored_op = torch.library.custom_op(
    f"{NAMESPACE}::vocab_parallel_backward_stored",
    _finish_stored,
    mutates_args=("sums", "main_grad_c", "stats"),
    schema="(Tensor scale, Tensor? grad_lse, Tensor e, Tensor c, Tensor columns, Tensor here, Tensor[] held, "
    f"Tensor(a!)[] sums, Tensor(b!)? main_grad_c, Tensor(c!)? stats, int chunk, float logit_scale, {PLACE}) -> Tensor",
)


@_finish_stored_op.register_fake
def _(scale, grad_lse, e, c, columns, here, held, sums, main_grad_c, stats, chunk, logit_scale, group, shards, own, _):
    stored = backend_of(e).three_products
    wanted = own and sums[stored.GRAD_E - stored.SUMS].numel()
    return scale.new_empty((e.shape[0] // len(shards), e.shape[1]) if wanted else 0)


def _recompute(
    grad_rows: Tensor,
    grad_lse: Tensor | None,
    e: Tensor,
    c: Tensor,
    bias: Tensor | None,
    main_grad_c: Tensor | None,
    stats: Tensor | None,
    lse: Tensor,
    lost: Tensor | None,
    columns: Tensor,
    here: Tensor,
    width: int,
    dtype_e: torch.dtype | None,
    dtype_c: torch.dtype | None,
    dtype_bias: torch.dtype | None,
    group: str,
    shards: list[int],
    own: bool,
    agreed: bool,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of e, c and bias from recomputed logits, `width` columns at a time; empty where no dtype is given.

    With `own` the gradient of e covers this rank's rows. The signature is wide because a custom operator of torch takes
    no objects.
    """
    refuse_given_back(e=e, c=c, bias=bias, main_grad_c=main_grad_c)
    o, spread = options_of(*options), Spread.of(group, shards, own, agreed)
    with kernels_on(e):
        grad_rows, grad_lse, same = _upstream(spread, grad_rows, grad_lse)
        a, b = backend_of(e).row_coefficients(grad_rows, grad_lse, lse, columns, o, lost)
        # dz = a p − b ((1 − s) [v = target] + s / V) with b and s rescaled so that V becomes the shard's size.
        elsewhere = o.label_smoothing * spread.size / spread.vocab
        share = 1 - o.label_smoothing + elsewhere
        recorder = rule = None
        add_up = partial(dist.all_reduce, group=spread.group)
        if stats is not None:
            recorder = FilterStats(stats, backend_of(e).filter_figures, spread.vocab, add_up)
        bias = None if bias is None else bias.contiguous()
        if o.filter_eps is not None:
            mean_z = backend_of(e).mean_logits(e, c, bias, columns, o)
            mean_z = None if mean_z is None else spread.entries(mean_z)
            rule = Rule.of(columns, mean_z, o).shard(sum(spread.shards[: spread.rank]), spread.size, add_up)
        grads = backend_of(e).backward(
            e, c, bias, here, lse, a, b * share, width, replace(o, label_smoothing=elsewhere / share),
            (dtype_e and torch.float32, dtype_c, dtype_bias), main_grad_c, recorder, rule,
        )  # fmt: skip
        if grads[0] is not None:
            reduced = Reduced(spread)
            reduced.add(grads[0], slice(0, len(grads[0])))
            grads = (reduced.result().to(dtype_e), *grads[1:])
        if same is not None:
            same.check(DIFFERENT)
    grad_e, grad_c, grad_bias = (e.new_empty(0) if grad is None else grad for grad in grads)
    return grad_e, grad_c, grad_bias


_recompute_op = torch.library.custom_op(
    f"{NAMESPACE}::vocab_parallel_backward",
    _recompute,
    mutates_args=("main_grad_c", "stats"),
    schema="(Tensor grad_rows, Tensor? grad_lse, Tensor e, Tensor c, Tensor? bias, Tensor(a!)? main_grad_c, "
    "Tensor(b!)? stats, Tensor lse, Tensor? lost, Tensor columns, Tensor here, int width, ScalarType? dtype_e, "
    f"ScalarType? dtype_c, ScalarType? dtype_bias, {PLACE}, {OPTIONS}) -> (Tensor, Tensor, Tensor)",
)


@_recompute_op.register_fake
def _(
    grad_rows, grad_lse, e, c, bias, main_grad_c, stats, lse, lost, columns, here, width, dtype_e, dtype_c, dtype_bias,
    group, shards, own, agreed, *options,
):  # fmt: skip
    """The results' shapes and dtypes; the signature is that of `_recompute`."""
    part = e[: e.shape[0] // len(shards)] if own else e
    wanted = ((part, dtype_e), (c, dtype_c), (bias, dtype_bias))
    return tuple(empty_gradient(e, x, dtype) for x, dtype in wanted)


def _keep(ctx, inputs) -> None:
    _, ctx.dtype, ctx.uniform, _, ctx.needs = inputs[7:12]
    ctx.place, ctx.options = inputs[12:16], inputs[16:]


def _gradients(ctx, grad_rows, grad_lse, recompute, finish_stored):
    e, c, bias, weights, lse, columns, here, every_lse, lost, e_as, c_as, *state = ctx.saved_tensors
    (main_grad_c, stats), (_, shards, own, _) = ctx.written, ctx.place
    o, plan = options_of(*ctx.options), ctx.plan
    if plan is None:
        plan = _plan(e, bias, main_grad_c, c.dtype, ctx.dtype, ctx.uniform, ctx.needs, shards, own, o)
    e, c = restored("e", e, present(e_as), ctx.dtype), restored("c", c, present(c_as), ctx.dtype)
    grad_rows = torch.zeros_like(lse) if grad_rows is None else grad_rows
    if plan.rows and ctx.finished:  # a second backward pass recomputes the logits, without stand-ins for targets
        here = Spread.of(*ctx.place).columns(columns)
    elif plan.rows:
        if finish_stored is _finish_stored:
            ctx.finished, state = True, used_up(state)
        stored, chunk = backend_of(e).three_products, chunk_rows(plan.rows, len(shards), own)
        held, sums = state[: stored.SUMS], state[stored.SUMS :]
        upstream = (grad_rows[0].float(), None) if ctx.uniform else (grad_rows, grad_lse)
        total = finish_stored(
            *upstream, e, c, columns, here, held, sums, main_grad_c, stats, chunk, o.logit_scale, *ctx.place
        )  # fmt: skip
        return total if own else state[stored.GRAD_E], state[stored.GRAD_C], state[stored.GRAD_BIAS]
    if weights is not None:
        grad_rows = grad_rows * weights
    return recompute(
        grad_rows, grad_lse, e, c, bias, main_grad_c, stats, every_lse if own else lse, present(lost), columns, here,
        plan.columns, *ctx.dtypes, *ctx.place, *plan.options(o).values(),
    )  # fmt: skip


_apply = differentiable(
    _forward_op,
    _forward,
    _keep,
    partial(_gradients, recompute=_recompute_op, finish_stored=_finish_stored_op),
    partial(_gradients, recompute=_recompute, finish_stored=_finish_stored),
)


def vocabulary_parallel(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Row losses and LSE (N,) fp32, differentiable in e, c and bias, and metrics (N, 2); see INPUTS, PLACE, OPTIONS."""
    losses, lse, metrics = _apply(*inputs)
    assert metrics is not None
    return losses, lse, metrics


# -------------------------------------------------------------------------------------------------------------- sums
def _total(x: Tensor, group: str) -> Tensor:
    total = x.clone()
    dist.all_reduce(total, group=process_group(group))
    return total


_total_op = torch.library.custom_op(
    f"{NAMESPACE}::total", _total, mutates_args=(), schema="(Tensor x, str group) -> Tensor"
)


@_total_op.register_fake
def _(x, group):
    return torch.empty_like(x)


def total(x: Tensor, group: str) -> Tensor:
    """The sum of all ranks' x."""
    return _total_op(x, group) if torch.compiler.is_compiling() else _total(x, group)


# -------------------------------------------------------------------------------------------------------------- plan
def _plan(
    e: Tensor,
    bias: Tensor | None,
    main_grad_c: Tensor | None,
    dtype_c: torch.dtype,
    dtype: torch.dtype,
    uniform: bool,
    needs: list[bool],
    shards: list[int],
    own: bool,
    o: Options,
) -> Plan:
    """The largest shard's plan of the backward pass. All ranks follow it, because they need the same chunks.

    A filter over shards always recomputes the logits, so it is never faster than exact gradients.
    """
    if not any(needs):
        return Plan(0, 0)
    exact = o.filter_if_faster
    o = o.without_filter() if exact else o
    problem = Problem(
        int(e.shape[0]) * (len(shards) if own else 1), int(e.shape[1]), max(shards), dtype,
        torch.float32 if needs[0] else None, dtype_c if needs[1] else None, main_grad_c is not None, uniform,
        bias is not None, sharded=True,
    )  # fmt: skip
    return replace(backend_of(e).plan(problem, e, o), exact=exact)
