"""The loss and its derivative: called directly where possible, else as custom operators, opaque to torch.compile.

One rank is a group of one: it exchanges nothing. Which scheme a call takes follows from shapes, dtypes and options
alone (planner.py; backends/in_torch.py on CPUs). So the operators' fake kernels know every output's shape. Operators
over several ranks communicate, so all ranks must run the same graph, as with torch's own collectives.

saved.py lists what the forward pass keeps for the backward pass. runtime/program.py repeats passes without Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .arguments import refuse_transforms
from .backends import backend_of, refuse_given_back, restored
from .filter.rule import FilterStats
from .options import Call, Inputs
from .parallel.rows import AllRows, upstream_of_all
from .parallel.sharding import Gathered, Reduced, Spread, chunk_rows
from .planner import Plan, Problem, skips_ignored
from .row_math import Dtypes, Operands, assemble_loss, reduce_loss, where_it_counts, without_rows
from .runtime.devices import kernels_on, without_values
from .runtime.interpreter import INTERPRETED
from .saved import GradientSums, Saved
from .several_targets import Several

# torch knows operators by name. A second copy of this package must not replace these. A graph that
# torch.compile keeps on disk holds the plan of one backend, and must not be found by the other.
NAMESPACE = str(__package__).replace(".", "_") + ("_interpreted" if INTERPRETED else "")
NOT_TWICE = "cce_kernels: the loss has no second derivative; take its gradient without create_graph=True"
DIFFERENT = (
    "vocabulary_parallel_linear_cross_entropy: the gradients of the ranks' losses differ; use reduction='none', and "
    "multiply each row's loss by its own factor"
)


class Results(NamedTuple):
    """What a forward pass returns."""

    loss: Tensor  # () or, of each row, (N,), fp32
    lse: Any  # (N,) fp32; may be None if not wanted
    metrics: Tensor | None  # (2, N) fp32 (row_math.Rows)
    saved: Any  # Saved; None if no gradient is wanted
    plan: Plan | None


class Upstream(NamedTuple):
    """The gradients that a backward pass starts from; None for 0."""

    loss: Tensor | None  # () or (N,)
    lse: Tensor | None = None  # (N,)
    metrics: Tensor | None = None  # (2, N); the second row, of the entropies, counts


def cross_entropy(x: Inputs, call: Call) -> tuple[Tensor, Any, Tensor | None]:
    """Loss, () or (N,), LSE (N,) and metrics (2, N), fp32, differentiable in e, c and bias.

    LSE that are not wanted may be None. Metrics that are not wanted are None, or empty under torch.compile. On one rank
    the entropies have a gradient, too. It takes four products, also where the plan has stored exponentials.
    """
    if not x.targets.numel():
        lse = without_rows(x.e, x.c, x.bias, x.main_grad_c)
        return reduce_loss(lse, x.targets, call.reduction)[0], lse, lse.expand(2, 0)
    compiling = torch.compiler.is_compiling()
    if not compiling and not without_values(x.e):  # the dispatcher takes longer than a small problem
        return _Direct.apply(x.e, x.c, x.bias, x, call)
    if compiling and x.stats is not None:
        from .runtime.compiler import uncompiled  # imported late: it imports torch's compiler, which takes 2 s

        return uncompiled(cross_entropy, x, call)
    loss, lse, metrics, _ = _forward_op(*x, call.handle())
    return loss, lse, metrics


# ------------------------------------------------------------------------------------------------------------ forward
def _forward(x: Inputs, call: Call) -> Results:
    """The results for this rank's rows."""
    backend, place = backend_of(x.e), call.place
    if backend.ahead is not None:
        backend.ahead.compile_kernels(cross_entropy, x, call)
    with kernels_on(x.e):
        plan = _plan(x, call)  # before any computation, because it refuses a workspace that is too small
        o, rows = (call.options, 0) if plan is None else (plan.options(call.options), plan.rows)
        ranks = None if place is None else AllRows(x, call, rows)
        if ranks is None:
            e, c = backend.prepare(x.e, call.dtype), backend.prepare(x.c, call.dtype)
            columns, z_target = backend.find_targets(e, c, x.bias, x.targets, call.ignore_index, o, not call.with_lse)
            here = standing = columns
        else:
            e, c, columns, here, standing, z_target = ranks.e, ranks.c, ranks.columns, ranks.here, ranks.standing, None
        several = _several(x, None if ranks is None else ranks.spread)
        held = sums = None
        lists: Sequence[Tensor] = ()
        if rows:
            here, settled = standing, {}
            if ranks is not None:
                rows, settled = ranks.spread.chunk, {"settle": ranks.settle(x.weights, o), "arrive": ranks.arrive}
            found, held, sums = backend.three_products.forward(
                e, c, here, rows, _stored_dtypes(x, call), call.with_metrics,
                o if ranks is None else replace(o, z_loss=0.0), z_target=z_target, with_lse=call.with_lse,
                weights=x.weights if ranks is None else None, bias=x.bias, skip=_skips(x, call), several=several,
                **settled,
            )  # fmt: skip
        elif plan is not None and plan.capacity:
            found, lists = backend.select.forward(e, c, columns, plan.capacity, call.with_metrics, o, z_target)
        else:
            found = backend.forward(e, c, x.bias, standing, call.with_metrics, o, z_target)
            found = found if ranks is None else ranks.whole(found)
        losses, lse, metrics, mine = assemble_loss(found, columns, o), found.lse, found.metrics, columns
        if several is not None:
            losses = several.losses(losses, found, backend.logits_at(e, c, x.bias, several.columns, o), o)
        if ranks is not None and ranks.spread.own:
            losses, lse, mine = (ranks.spread.mine(of_all) for of_all in (losses, lse, columns))
            metrics = None if metrics is None else ranks.spread.mine(metrics.T).T.contiguous()
        loss, counted = backend.reduce_loss(losses, mine, call.reduction, x.weights if several is None else None)
    if plan is None:
        return Results(loss, lse, metrics, None, None)
    # A custom operator must not return an input, nor one tensor twice.
    saved = Saved(
        columns, None if ranks is None else here, counted, None if lse is found.lse else found.lse, found.lost,
        None if e is x.e else e, None if c is x.c else c, held, sums, lists,
    )  # fmt: skip
    return Results(loss, lse, metrics, saved, plan)


def _several(x: Inputs, spread: Spread | None) -> Several | None:
    """The targets of all ranks' rows; None if each row has one."""
    columns, weights = x.every_target, x.every_weight
    if columns is None or weights is None:
        return None
    if spread is None:
        return Several(columns, weights)
    columns, weights = (Gathered(spread, every).all() for every in (columns, weights))
    return Several(spread.columns(columns), weights, spread.group)


def _fake_forward(x: Inputs, call: Call) -> Results:
    """`_forward` in shapes alone."""
    backend, place, plan = backend_of(x.e), call.place, _plan(x, call)
    (n_rows, dim), vocab = x.e.shape, x.c.shape[0]
    lse = x.e.new_empty(n_rows, dtype=torch.float32)
    loss = torch.empty_like(lse) if call.reduction == "none" else lse.new_empty(())
    metrics = lse.new_empty((2, n_rows)) if call.with_metrics else None
    if plan is None:
        return Results(loss, lse, metrics, None, None)
    own = place is not None and place.own
    all_rows = n_rows * (len(place.shards) if place is not None and own else 1)
    whole = x.e.new_empty(all_rows, dim, dtype=call.dtype) if own else x.e
    e, c = backend.prepare(whole, call.dtype), backend.prepare(x.c, call.dtype)
    held = sums = None
    lists: Sequence[Tensor] = ()
    if plan.rows:
        chunk = plan.rows if place is None else chunk_rows(plan.rows, len(place.shards), place.own)
        held, sums = backend.three_products.empty_state(
            e, x.c, chunk, _stored_dtypes(x, call), plan.options(call.options), with_lse=call.with_lse,
            skip=_skips(x, call), targets=1 if x.every_target is None else x.every_target.shape[1],
        )  # fmt: skip
    elif plan.capacity:
        lists = backend.select.empty_lists(x.targets, int(dim), int(vocab), plan.capacity, plan.options(call.options))
    counted = None
    if call.reduction == "mean":
        counted = (x.targets if x.weights is None or x.every_target is not None else lse).new_empty(())
    columns, here = x.targets.new_empty(all_rows), None if place is None else x.targets.new_empty(all_rows)
    lost = None if plan.rows or plan.capacity else lse.new_empty(all_rows)
    saved = Saved(
        columns, here, counted, lse.new_empty(all_rows) if own else None, lost, None if e is x.e else e,
        None if c is x.c else c, held, sums, lists,
    )  # fmt: skip
    return Results(loss, lse, metrics, saved, plan)


def _plan(x: Inputs, call: Call) -> Plan | None:
    """The plan of the backward pass; None if no gradient is wanted.

    Over several ranks it is the largest shard's. All ranks follow it, because they need the same chunks.
    """
    if not any(call.needs):
        return None
    place = call.place
    n_rows, vocab, (dtype_e, dtype_c, _) = int(x.e.shape[0]), int(x.c.shape[0]), _dtypes(x, call, main_grad=False)
    if place is not None:
        n_rows, vocab = n_rows * (len(place.shards) if place.own else 1), max(place.shards)
        dtype_e = dtype_e and torch.float32
    problem = Problem(
        n_rows, int(x.e.shape[1]), vocab, call.dtype, dtype_e, dtype_c,  # int() fixes a compiled graph to these sizes
        x.main_grad_c is not None, call.uniform, x.bias is not None, sharded=place is not None,
    )  # fmt: skip
    return backend_of(x.e).plan(problem, x.e, call.options)


def _skips(x: Inputs, call: Call) -> bool:
    """Whether three products leave out ignored rows."""
    (n_rows, dim), vocab = x.e.shape, x.c.shape[0]
    return call.place is None and skips_ignored(int(n_rows), int(dim), int(vocab), x.bias is not None, call.with_lse)


def _dtypes(x: Inputs, call: Call, main_grad: bool = True) -> Dtypes:
    """Dtypes of the gradients of e, c and bias; None for those not wanted, and with main_grad for c if a buffer is."""
    need_e, need_c, need_bias = call.needs
    into = main_grad and x.main_grad_c is not None
    dtype_bias = x.bias.dtype if need_bias and x.bias is not None else None
    return x.e.dtype if need_e else None, x.c.dtype if need_c and not into else None, dtype_bias


def _stored_dtypes(x: Inputs, call: Call) -> Dtypes:
    """Dtypes in which three products sum the gradients: dE of several ranks in fp32, dC for a buffer in bf16."""
    dtype_e, dtype_c, dtype_bias = _dtypes(x, call, main_grad=False)
    dtype_e = dtype_e if call.place is None else dtype_e and torch.float32
    return dtype_e, dtype_c if x.main_grad_c is None else dtype_c and torch.bfloat16, dtype_bias


# ----------------------------------------------------------------------------------------------------------- backward
def _backward(
    up: Upstream, x: Inputs, lse: Any, metrics: Tensor | None, saved: Saved, call: Call, plan: Plan, finish: bool
) -> Sequence[Any]:
    """Gradients of e, c and bias; None where not wanted. With main_grad_c, dC is added to it.

    lse, metrics: from the forward pass. finish: whether to finish the sums of three products, which are then the
    gradients. Otherwise the gradients come from the filter's lists, if there are any, or from recomputed logits.
    """
    e, c = restored("e", x.e, saved.e, call.dtype), restored("c", x.c, saved.c, call.dtype)
    refuse_given_back(e=e, c=c, main_grad_c=x.main_grad_c)
    backend, o, place = backend_of(e), plan.options(call.options), call.place
    spread = None if place is None else Spread.of(place, plan.rows)
    with kernels_on(e):
        grad_rows = up.loss
        if grad_rows is None:
            grad_rows = lse.new_zeros(() if spread is None else lse.shape)
        elif saved.counted is not None:
            grad_rows = backend.mean_gradient(grad_rows, saved.counted)
        several = _several(x, spread)
        if several is not None and o.softcap is not None:
            refuse_given_back(bias=x.bias)
            z = backend.logits_at(e, c, x.bias, several.columns, o)
            several = several._replace(slope=1 - (z / o.softcap).square())
        if finish:
            return _finished(grad_rows, up.lse, x, e, c, saved, call, plan, spread, several)
        if x.weights is not None and several is None:
            grad_rows = grad_rows * x.weights
        dtypes, grad_lse, same = _dtypes(x, call), up.lse, None
        if spread is not None:
            grad_rows, grad_lse, same = upstream_of_all(spread, grad_rows, grad_lse)
        lse = lse if saved.lse is None else saved.lse
        columns = saved.columns
        added = None
        if several is not None:
            grad_targets, grad_rows = grad_rows, grad_rows * several.total
        a, b = backend.row_coefficients(grad_rows, grad_lse, lse, columns, o, saved.lost)
        if several is not None:
            added = several.columns, several.gradient(grad_targets, o)
            if not o.label_smoothing:  # dz gets p − w of the first target at once, so that it is rounded once
                b, added[1][:, 0] = where_it_counts(grad_targets * several.weights[:, 0], columns), 0
        if plan.capacity:
            operands = Operands(e, c, None, columns, lse, a, b)
            grads = backend.gather.backward(operands, saved.lists, plan.columns, o, dtypes[:2], x.main_grad_c, x.stats)
            return *grads, None
        refuse_given_back(bias=x.bias)
        entropy = None
        if up.metrics is not None and metrics is not None:
            grad_h, h = (where_it_counts(of[1], columns) for of in (up.metrics, metrics))
            if saved.lost is not None:  # for exp(z − lse) in place of p
                grad_h, h = grad_h * torch.exp(-saved.lost), h - saved.lost
            entropy = torch.stack((grad_h, h))
        if spread is not None:
            # dz = a p − b ((1 − s) [v = target] + s / V) with b and s rescaled so that V becomes the shard's size.
            elsewhere = o.label_smoothing * spread.size / spread.vocab
            share = 1 - o.label_smoothing + elsewhere
            b, o = b * share, replace(o, label_smoothing=elsewhere / share)
            # Three products have used a stand-in for a target on another rank.
            columns = saved.here if saved.here is not None and not plan.rows else spread.columns(columns)
            dtypes = (dtypes[0] and torch.float32, *dtypes[1:])
        operands = Operands(e, c, x.bias, columns, lse, a, b)
        grad_e, grad_c, grad_bias = backend.backward(
            operands, plan.columns, o, dtypes, x.main_grad_c, x.stats, entropy, added
        )
        if spread is not None and grad_e is not None:
            reduced = Reduced(spread)
            reduced.add(grad_e, slice(0, len(grad_e)))
            grad_e = reduced.result().to(x.e.dtype)
        if same is not None:
            same.check(DIFFERENT)
    return grad_e, grad_c, grad_bias


def _finished(
    scale: Tensor, grad_lse: Tensor | None, x: Inputs, e: Tensor, c: Tensor, saved: Saved, call: Call, plan: Plan,
    spread: Spread | None, several: Several | None,
) -> Sequence[Any]:  # fmt: skip
    """The finished sums of three products. Of several ranks with rows of their own, this rank's rows of dE."""
    scheme, held, sums, o = backend_of(e).three_products, saved.held, saved.sums, plan.options(call.options)
    assert sums is not None
    grad_e: Any = sums.grad_e
    finish = partial(scheme.backward, held=held, sums=sums, main_grad_c=x.main_grad_c, o=o, several=several)
    if spread is None:
        finish(e, c, saved.columns, scale, plan.rows, grad_lse=grad_lse, weights=x.weights)
    else:
        scale, grad_lse, same = upstream_of_all(spread, scale[0].float() if call.uniform else scale, grad_lse)
        reduced = Reduced(spread)
        finish(
            e, c, saved.here, scale, spread.chunk, grad_lse=grad_lse, finished=lambda part: reduced.add(grad_e, part)
        )
        if grad_e is not None:
            grad_e = reduced.result()
        if same is not None:
            same.check(DIFFERENT)
    if x.stats is not None:
        FilterStats.write_exact(x.stats)
    return grad_e, sums.grad_c, sums.grad_bias


# ----------------------------------------------------------------------------------------------------------- autograd
class _Direct(torch.autograd.Function):
    """The loss without custom operators: e, c and bias, which get gradients, all inputs, and the call."""

    @staticmethod
    def forward(ctx, _e, _c, _bias, x, call):
        program = backend_of(x.e).program
        found, ctx.program = (_forward(x, call), None) if program is None else program.forward(_forward, x, call)
        if call.place is not None and found.metrics is not None:
            ctx.mark_non_differentiable(found.metrics)
        if found.plan is not None:
            kept = found.saved if ctx.program is not None else found.saved.flat()
            _keep(ctx, x, call, found.lse, found.metrics, kept, found.plan)
        return found[:3]

    @staticmethod
    def backward(ctx, *upstream):
        refuse_transforms(*upstream)
        if not torch.is_grad_enabled():
            return *_gradients(ctx, Upstream(*upstream), _directly), None, None
        with torch.no_grad():  # create_graph=True
            grads = _gradients(ctx, Upstream(*upstream), _directly)
        # What the aliases were taken of: the gradients depend on it.
        leaves = [node.variable for node, _ in ctx.next_functions if hasattr(node, "variable")]
        of = *ctx.saved_tensors[:3], *leaves, *upstream
        return *[None if grad is None else _Final.apply(grad, *of) for grad in grads], None, None


class _Final(torch.autograd.Function):
    """The identity on a gradient; its backward raises an error.

    Without this node, a penalty on the gradient would silently have no effect.
    """

    @staticmethod
    def forward(ctx, grad, *_):
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(NOT_TWICE)


def _keep(ctx, x: Inputs, call: Call, lse: Any, metrics: Any, kept: Sequence[Any], plan: Plan | None) -> None:
    ctx.call, ctx.plan, ctx.finished = call, plan, False
    ctx.set_materialize_grads(False)
    # Not main_grad_c and stats: both may be written to before and in the backward pass. An alias of a leaf keeps the
    # memory if its .data is replaced before backward, as by DeepSpeed's ZeRO-3.
    ctx.written = x.main_grad_c, x.stats
    inputs = [t.detach() if t is not None and t.is_leaf else t for t in (x.e, x.c, x.bias, *x[6:])]
    ctx.save_for_backward(*inputs, lse, metrics if call.place is None else None, *kept)


def _gradients(ctx, up: Upstream, compute) -> list[Any]:
    """The gradients of e, c and bias in their inputs' dtypes. compute: `_directly` or `_by_operator`."""
    e, c, bias, weights, every_target, every_weight, lse, metrics, *kept = ctx.saved_tensors
    call, x = ctx.call, Inputs._make((e, c, lse, bias, *ctx.written, weights, every_target, every_weight))
    plan: Any = ctx.plan or _plan(x, call)
    # A second backward pass recomputes the logits, and so does one of entropies.
    finish = bool(plan.rows) and not ctx.finished and up.metrics is None
    grads = compute(ctx, up, x, lse, metrics, kept, call, plan, finish)
    return [
        None if dtype is None else grad if grad.dtype == dtype else grad.to(dtype)
        for grad, dtype in zip(grads, _dtypes(x, call), strict=True)
    ]


def _directly(ctx, up, x, lse, metrics, kept, call, plan, finish):
    ctx.finished |= finish
    if ctx.program is not None:
        return ctx.program.backward(_backward, up, x, metrics, kept, call, finish)
    saved = Saved.of(kept, plan.rows)
    return _backward(up, x, lse, metrics, saved.used_up() if finish else saved, call, plan, finish)


def _by_operator(_ctx, up, x, lse, metrics, kept, call, plan, finish):
    n_sums = len(GradientSums._fields) if plan.rows else 0
    held, sums = kept[: len(kept) - n_sums], GradientSums(*kept[len(kept) - n_sums :])
    e, c, _, *others = x
    grads = _backward_op(*up, e, c, *others, lse, metrics, held, [*sums] if finish else [], call.handle())
    if not finish:
        return grads
    own = call.place is not None and call.place.own
    return grads[0] if own else sums.grad_e, sums.grad_c, sums.grad_bias


# ---------------------------------------------------------------------------------------------------------- operators
def _as_tensors(forward):
    """A forward pass for a custom operator: empty tensors for None, and no plan."""

    def run(*x):
        call = Call.of(x[-1])
        loss, lse, metrics, saved, _ = forward(Inputs(*x[:-1]), call)
        flat = [metrics, *(() if saved is None else saved.flat())]
        metrics, *state = [lse.new_empty(0) if t is None else t for t in flat]
        return loss, lse, metrics, state

    return run


_forward_op = torch.library.custom_op(
    f"{NAMESPACE}::cross_entropy",
    _as_tensors(_forward),
    mutates_args=(),
    schema="(Tensor e, Tensor c, Tensor targets, Tensor? bias, Tensor? main_grad_c, Tensor? stats, Tensor? weights, "
    "Tensor? every_target, Tensor? every_weight, str call) -> (Tensor, Tensor, Tensor, Tensor[])",
)
_forward_op.register_fake(_as_tensors(_fake_forward))


def _backward_as_tensors(
    grad_loss, grad_lse, grad_metrics, e, c, bias, main_grad_c, stats, weights, every_target, every_weight, lse,
    metrics, held, sums, handle,
):  # fmt: skip
    """`_backward`, with empty tensors for None, and for sums, which an operator must not return.

    sums: those of three products if they are to be finished. They are apart from `held` because torch.compile copies
    every tensor that an operator may write to.
    """
    call = Call.of(handle)
    x = Inputs(e, c, lse, bias, main_grad_c, stats, weights, every_target, every_weight)
    plan, finish = _plan(x, call), bool(sums)
    assert plan is not None
    state = [*held, *sums] if finish or not plan.rows else [*held, *[None] * len(GradientSums._fields)]
    saved = Saved.of(state, plan.rows)
    grads = _backward(Upstream(grad_loss, grad_lse, grad_metrics), x, lse, metrics, saved, call, plan, finish)
    if finish:
        own = call.place is not None and call.place.own
        grads = grads[0] if own else None, None, None
    return tuple(e.new_empty(0) if grad is None else grad for grad in grads)


_backward_op = torch.library.custom_op(
    f"{NAMESPACE}::cross_entropy_backward",
    _backward_as_tensors,
    mutates_args=("main_grad_c", "stats", "sums"),
    schema="(Tensor? grad_loss, Tensor? grad_lse, Tensor? grad_metrics, Tensor e, Tensor c, Tensor? bias, "
    "Tensor(a!)? main_grad_c, Tensor(b!)? stats, Tensor? weights, Tensor? every_target, Tensor? every_weight, "
    "Tensor lse, Tensor? metrics, Tensor[] held, Tensor(c!)[] sums, str call) -> (Tensor, Tensor, Tensor)",
)


@_backward_op.register_fake
def _(grad_loss, grad_lse, grad_metrics, e, c, bias, main_grad_c, stats, *_others):
    *_, lse, _metrics, _held, sums, handle = _others
    call = Call.of(handle)
    dtype_e, dtype_c, dtype_bias = _dtypes(Inputs(e, c, lse, bias, main_grad_c, stats, None), call)
    if sums:
        own = call.place is not None and call.place.own
        dtype_e, dtype_c, dtype_bias = dtype_e and torch.float32 if own else None, None, None
    wanted = ((e, dtype_e), (c, dtype_c), (bias, dtype_bias))
    return tuple(e.new_empty(0 if dtype is None else x.shape, dtype=dtype) for x, dtype in wanted)


def _setup_operator(ctx, inputs, output) -> None:
    call, (_, lse, metrics, state) = Call.of(inputs[-1]), output
    ctx.mark_non_differentiable(*([] if call.place is None else [metrics]), *state)
    _keep(ctx, Inputs(*inputs[:-1]), call, lse, metrics, state, None)


def _backward_of_operator(ctx, *upstream):
    grad_e, grad_c, grad_bias = _gradients(ctx, Upstream(*upstream[:3]), _by_operator)
    return grad_e, grad_c, None, grad_bias, *[None] * 6


_forward_op.register_autograd(_backward_of_operator, setup_context=_setup_operator)
