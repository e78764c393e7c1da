"""The loss as custom operators, opaque to torch.compile, and their derivative.

`cross_entropy` returns loss, log-sum-exps and metrics. If gradients are wanted, its operator also returns the state of
the backward pass. The scheme (planner.py; backends/in_torch.py on CPUs) follows from shapes, dtypes and options alone.
So the fake kernels know every output's shape.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .backends import backend_of, refuse_given_back, restored
from .derivative import differentiable, empty_gradient, stored_dtypes
from .filter.rule import FilterStats
from .options import Options, options_of
from .planner import Plan, Problem, skips_ignored
from .row_math import assemble_loss, where_it_counts
from .runtime.devices import kernels_on
from .runtime.interpreter import INTERPRETED
from .runtime.state import State, filled, present, used_up

# torch knows operators by name. A second copy of this package (a Hub kernel) must not replace these. A graph that
# torch.compile keeps on disk holds the plan of one backend, and must not be found by the other.
NAMESPACE = str(__package__).replace(".", "_") + ("_interpreted" if INTERPRETED else "")
# The fields of Options in order: the last inputs of most operators.
OPTIONS = (
    "float? softcap, float logit_scale, float label_smoothing, float z_loss, float? filter_eps, bool filter_unbiased, "
    "float? filter_mass, bool filter_e, bool filter_c, bool filter_if_faster, str accumulate, float? workspace_mib"
)
# e: (N, D). c: (V, D). targets: (N,) int64. bias: (V,). main_grad_c: (V, D) fp32, dC is added to it.
# stats: (5,) fp32, written (filter.rule.FilterStats). dtype: of the products. reduction: of the row losses.
# weights: (N,) fp32, what each row's loss is multiplied by. reduction "mean" divides by their sum.
# with_lse: whether log-sum-exps are wanted; if not, those of ignored rows are undefined.
# needs: whether gradients of e, c and bias are wanted.
INPUTS = (
    "Tensor e, Tensor c, Tensor targets, Tensor? bias, Tensor? main_grad_c, Tensor? stats, Tensor? weights, "
    "int ignore_index, ScalarType dtype, str reduction, bool with_lse, bool with_metrics, bool[] needs"
)


def _cross_entropy(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    main_grad_c: Tensor | None,
    stats: Tensor | None,
    weights: Tensor | None,
    ignore_index: int,
    dtype: torch.dtype,
    reduction: str,
    with_lse: bool,
    with_metrics: bool,
    needs: list[bool],
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor | None, State, Plan | None]:
    """Loss, () or (N,), LSE (N,), metrics (2, N) or None, all fp32; and state and plan of the backward pass.

    The state has no entries, and the plan is None, if no gradient is wanted.
    """
    o = options_of(*options)
    backend = backend_of(e)
    with kernels_on(e):
        # Before any computation, because it refuses a workspace that is too small.
        plan = _plan(e, c, bias, main_grad_c, dtype, _uniform(reduction, with_lse), needs, o)
        o = o if plan is None else plan.options(o)
        e_as, c_as = backend.prepare(e, dtype), backend.prepare(c, dtype)
        bias = None if bias is None else bias.contiguous()
        state: State = []
        dtypes = stored_dtypes(e.dtype, c, bias, main_grad_c, needs)
        columns, z_target = backend.find_targets(e_as, c_as, bias, targets, ignore_index, o, not with_lse)
        if plan is not None and plan.rows:
            rows, state = backend.three_products.forward(
                e_as, c_as, columns, plan.rows, dtypes, with_metrics, o, z_target=z_target, with_lse=with_lse,
                weights=weights, bias=bias, skip=_skips(e, c, bias, with_lse),
            )  # fmt: skip
        elif plan is not None and plan.capacity:
            rows, state = backend.select.forward(e_as, c_as, columns, plan.capacity, with_metrics, o, z_target)
        else:
            rows = backend.forward(e_as, c_as, bias, columns, with_metrics, o, z_target)
        loss, counted = backend.reduce_loss(assemble_loss(rows, columns, o), columns, reduction, weights)
    if plan is None:
        return loss, rows.lse, rows.metrics, [], None
    # A custom operator must not return an input, so the state holds e and c only if they were copied.
    copies = [None if x_as is x else x_as for x, x_as in ((e, e_as), (c, c_as))]
    return loss, rows.lse, rows.metrics, [counted, columns, rows.lost, *copies, *state], plan


# Indices among a call's results: loss, LSE, metrics, divisor of the mean, columns, what LSE lost, copies of e and c,
# stored state.
COUNTED, COPIES, STORED = 3, 6, 8


def _cross_entropy_again(*inputs: Any) -> tuple[Tensor, Tensor | None, Tensor | None, State, Plan | None]:
    """`_cross_entropy`, repeated if this kind of call has a program (runtime/program.py). Unwanted LSE is then None."""
    backend = backend_of(inputs[0])
    if backend.program is None or not backend.program.saves_plainly():
        return _cross_entropy(*inputs)
    tensors, with_lse, calls = inputs[:7], inputs[10], backend.program.CALLS
    kind = backend.program.kind_of(*tensors, (*inputs[7:12], *inputs[12], *inputs[13:]))  # inputs[12] is a list
    program = calls.find(kind)
    if program is not None:
        with kernels_on(inputs[0]):
            made = program.run(tensors, inputs[0])
        lse = program.result(1, made) if with_lse else None
        return program.taken(0, made), lse, program.taken(2, made), made, program.beside
    with calls.tape(kind) as tape:
        loss, lse, metrics, state, plan = _cross_entropy(*inputs)
    if plan is None or not plan.capacity:
        results = [loss, lse, metrics, *state]
        sums = STORED + (backend.three_products.SUMS if plan is not None and plan.rows else 0)
        own = (loss, lse if with_lse else None, metrics, *results[COPIES : STORED + 1], *results[sums:])  # at STORED: w
        calls.keep(kind, tape, tensors, [x for x in own if x is not None], results, plan)
    return loss, lse, metrics, state, plan


_cross_entropy_op = torch.library.custom_op(
    f"{NAMESPACE}::cross_entropy",
    filled(_cross_entropy),
    mutates_args=(),
    schema=f"({INPUTS}, {OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor[])",
)


def _fake_cross_entropy(
    e, c, targets, bias, main_grad_c, stats, weights, ignore_index, dtype, reduction, with_lse, with_metrics, needs,
    *options,
):  # fmt: skip
    o = options_of(*options)
    plan = _plan(e, c, bias, main_grad_c, dtype, _uniform(reduction, with_lse), needs, o)
    lse = e.new_empty(e.shape[0], dtype=torch.float32)
    loss = torch.empty_like(lse) if reduction == "none" else lse.new_empty(())
    metrics = lse.new_empty((2, e.shape[0])) if with_metrics else None
    if plan is None:
        return loss, lse, metrics, [], None
    backend = backend_of(e)
    copies = []
    for x in (e, c):
        x_as = backend.prepare(x, dtype)
        copies.append(None if x_as is x else x_as)
    state = []
    if plan.rows:
        state = backend.three_products.empty_state(
            e if copies[0] is None else copies[0], c, plan.rows, stored_dtypes(e.dtype, c, bias, main_grad_c, needs), o,
            with_lse=with_lse, skip=_skips(e, c, bias, with_lse),
        )  # fmt: skip
    elif plan.capacity:
        state = backend.select.empty_state(targets, int(c.shape[1]), int(c.shape[0]), plan.capacity, o)
    counted = None
    if reduction == "mean":
        counted = (targets if weights is None else lse).new_empty(())
    lost = None if plan.rows or plan.capacity else torch.empty_like(lse)
    return loss, lse, metrics, [counted, torch.empty_like(targets), lost, *copies, *state], plan


_cross_entropy_op.register_fake(filled(_fake_cross_entropy))


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
    width: int,
    dtype_e: torch.dtype | None,
    dtype_c: torch.dtype | None,
    dtype_bias: torch.dtype | None,
    entropy: Tensor | None,
    grad_entropy: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of e, c and bias from recomputed logits, `width` columns at a time; empty where no dtype is given.

    grad_rows: () or (N,), dL/d(row loss), with the row's weight. entropy, grad_entropy: (N,) fp32, each row's entropy
    and dL/d(entropy); None where it has no gradient. lost: (N,) fp32 or None, as in `row_math.Rows`.
    """
    refuse_given_back(e=e, c=c, bias=bias, main_grad_c=main_grad_c)
    o = options_of(*options)
    recorder = None if stats is None else FilterStats(stats, backend_of(e).filter_figures, c.shape[0])
    with kernels_on(e):
        a, b = backend_of(e).row_coefficients(grad_rows, grad_lse, lse, columns, o, lost)
        bias = None if bias is None else bias.contiguous()
        of_entropy = None
        if entropy is not None and grad_entropy is not None:
            of_rows, entropy = where_it_counts(grad_entropy, columns), where_it_counts(entropy, columns)
            if lost is not None:  # for exp(z − lse) in place of p
                of_rows, entropy = of_rows * torch.exp(-lost), entropy - lost
            of_entropy = torch.stack((of_rows, entropy))
        grads = backend_of(e).backward(
            e, c, bias, columns, lse, a, b, width, o, (dtype_e, dtype_c, dtype_bias), main_grad_c, recorder,
            entropy=of_entropy,
        )  # fmt: skip
    grad_e, grad_c, grad_bias = (e.new_empty(0) if grad is None else grad for grad in grads)
    return grad_e, grad_c, grad_bias


_recompute_op = torch.library.custom_op(
    f"{NAMESPACE}::cross_entropy_backward",
    _recompute,
    mutates_args=("main_grad_c", "stats"),
    schema="(Tensor grad_rows, Tensor? grad_lse, Tensor e, Tensor c, Tensor? bias, Tensor(a!)? main_grad_c, "
    "Tensor(b!)? stats, Tensor lse, Tensor? lost, Tensor columns, int width, "
    "ScalarType? dtype_e, ScalarType? dtype_c, ScalarType? dtype_bias, Tensor? entropy, Tensor? grad_entropy, "
    f"{OPTIONS}) -> (Tensor, Tensor, Tensor)",
)


@_recompute_op.register_fake
def _(
    grad_rows, grad_lse, e, c, bias, main_grad_c, stats, lse, lost, columns, width, dtype_e, dtype_c, dtype_bias,
    entropy, grad_entropy, *options,
):  # fmt: skip
    wanted = ((e, dtype_e), (c, dtype_c), (bias, dtype_bias))
    return tuple(empty_gradient(e, x, dtype) for x, dtype in wanted)


def _gather(
    grad_rows: Tensor,
    grad_lse: Tensor | None,
    e: Tensor,
    c: Tensor,
    main_grad_c: Tensor | None,
    stats: Tensor | None,
    lse: Tensor,
    columns: Tensor,
    state: list[Tensor],
    width: int,
    dtype_e: torch.dtype | None,
    dtype_c: torch.dtype | None,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    """Gradients of e and c from the filter's lists (filter/gather.py); empty where no dtype is given."""
    refuse_given_back(e=e, c=c, main_grad_c=main_grad_c)
    o = options_of(*options)
    recorder = None if stats is None else FilterStats(stats, backend_of(e).filter_figures, c.shape[0])
    with kernels_on(e):
        a, b = backend_of(e).row_coefficients(grad_rows, grad_lse, lse, columns, o)
        grads = backend_of(e).gather.backward(
            e, c, columns, lse, a, b, state, width, o, (dtype_e, dtype_c), main_grad_c, recorder
        )
    grad_e, grad_c = (e.new_empty(0) if grad is None else grad for grad in grads)
    return grad_e, grad_c


_gather_op = torch.library.custom_op(
    f"{NAMESPACE}::cross_entropy_backward_entries",
    _gather,
    mutates_args=("main_grad_c", "stats"),
    schema="(Tensor grad_rows, Tensor? grad_lse, Tensor e, Tensor c, Tensor(a!)? main_grad_c, Tensor(b!)? stats, "
    "Tensor lse, Tensor columns, Tensor[] state, int width, ScalarType? dtype_e, ScalarType? dtype_c, "
    f"{OPTIONS}) -> (Tensor, Tensor)",
)


@_gather_op.register_fake
def _(grad_rows, grad_lse, e, c, main_grad_c, stats, lse, columns, state, width, dtype_e, dtype_c, *options):
    return empty_gradient(e, e, dtype_e), empty_gradient(e, c, dtype_c)


def _finish_stored(
    scale: Tensor,
    grad_lse: Tensor | None,
    e: Tensor,
    c: Tensor,
    columns: Tensor,
    weights: Tensor | None,
    rows: int,
    held: State,
    sums: State,
    main_grad_c: Tensor | None,
    stats: Tensor | None,
    *options: Any,
) -> None:
    """Finish the sums of all gradients in place, times scale () or (N,).

    grad_lse: (N,), dL/dLSE, or None. held: the state of three_products.py up to its index SUMS, read only. sums: the
    state from SUMS on, written. They are separate because torch.compile copies every tensor that an operator may write
    to.
    """
    refuse_given_back(e=e, c=c, main_grad_c=main_grad_c)
    with kernels_on(e):
        backend_of(e).three_products.backward(
            e, c, columns, scale, rows, [*held, *sums], main_grad_c, options_of(*options), grad_lse=grad_lse,
            weights=weights,
        )  # fmt: skip
        if stats is not None:
            FilterStats.write_exact(stats)


_finish_stored_op = torch.library.custom_op(
    f"{NAMESPACE}::cross_entropy_backward_stored",
    _finish_stored,
    mutates_args=("sums", "main_grad_c", "stats"),
    schema="(Tensor scale, Tensor? grad_lse, Tensor e, Tensor c, Tensor columns, Tensor? weights, int rows, "
    f"Tensor[] held, Tensor(a!)[] sums, Tensor(b!)? main_grad_c, Tensor(c!)? stats, {OPTIONS}) -> ()",
)


def _keep(ctx, inputs) -> None:
    _, ctx.dtype, reduction, with_lse, _, ctx.needs = inputs[7:13]
    ctx.uniform = _uniform(reduction, with_lse)
    ctx.options = inputs[13:]


def _gradients(ctx, grad_loss, grad_lse, grad_metrics, *, recompute, gather, finish_stored):
    direct = finish_stored is _finish_stored  # without custom operators
    e, c, bias, weights, lse, metrics, *kept = ctx.saved_tensors
    entropy, grad_entropy = (None, None) if grad_metrics is None else (metrics[1], grad_metrics[1])
    main_grad_c, stats = ctx.written
    if ctx.program is not None:
        once = not ctx.finished and ctx.plan is not None and ctx.plan.rows
        once = once and e.untyped_storage().nbytes() and c.untyped_storage().nbytes()
        if once and grad_loss is not None and not grad_loss.dim() and grad_lse is None and grad_metrics is None:
            gradients = _finish_again(ctx, grad_loss, e, c, weights, kept)
            if stats is not None:
                FilterStats.write_exact(stats)
            return gradients
        lse, kept = ctx.program.result(1, kept), ctx.program.results(kept, COUNTED)
    counted, columns, lost, e_as, c_as, *state = kept
    o, plan = options_of(*ctx.options), ctx.plan
    if plan is None:
        plan = _plan(e, c, bias, main_grad_c, ctx.dtype, ctx.uniform, ctx.needs, o)
        assert plan is not None
    options = plan.options(o).values()
    e, c = restored("e", e, present(e_as), ctx.dtype), restored("c", c, present(c_as), ctx.dtype)
    counted = present(counted)
    grad_rows = lse.new_zeros(()) if grad_loss is None else grad_loss
    if grad_loss is not None and counted is not None:
        grad_rows = backend_of(e).mean_gradient(grad_loss, counted) if direct else grad_loss / counted
    if plan.rows and not ctx.finished and grad_entropy is None:  # a second backward pass recomputes the logits
        if direct:
            ctx.finished, state = True, used_up(state)
        stored = backend_of(e).three_products
        held, sums = state[: stored.SUMS], state[stored.SUMS :]
        finish_stored(
            grad_rows, grad_lse, e, c, columns, weights, plan.rows, held, sums, main_grad_c, stats, *options
        )  # fmt: skip
        return state[stored.GRAD_E], state[stored.GRAD_C], state[stored.GRAD_BIAS]
    if weights is not None:
        grad_rows = grad_rows * weights
    if plan.capacity:
        return *gather(
            grad_rows, grad_lse, e, c, main_grad_c, stats, lse, columns, state, plan.columns, *ctx.dtypes[:2],
            *options,
        ), None  # fmt: skip
    return recompute(
        grad_rows, grad_lse, e, c, bias, main_grad_c, stats, lse, present(lost), columns, plan.columns, *ctx.dtypes,
        entropy, grad_entropy, *options,
    )  # fmt: skip


def _finish_again(ctx, grad_loss: Tensor, e: Tensor, c: Tensor, weights: Tensor | None, made: list[Tensor]) -> Any:
    """The gradients of e, c and bias of a call that was repeated: this pass is repeated, too, or recorded."""
    program, main_grad_c, backend = ctx.program, ctx.written[0], backend_of(e)
    stored, inputs = backend.three_products, (grad_loss, e, c, weights, main_grad_c)
    kind = backend.program.kind_of(*inputs)
    again, ctx.finished = program.next.find(kind), True
    if again is not None:
        with kernels_on(e):
            again.run((*inputs, *made), e)
    else:
        counted, columns, _, e_as, c_as, *state = used_up(program.results(made, COUNTED))
        with program.next.tape(kind) as tape:
            _finish_stored(
                grad_loss if counted is None else backend.mean_gradient(grad_loss, counted), None,
                e if e_as is None else e_as, c if c_as is None else c_as, columns, weights, ctx.plan.rows,
                state[: stored.SUMS], state[stored.SUMS :], main_grad_c, None,
                *ctx.plan.options(options_of(*ctx.options)).values(),
            )  # fmt: skip
        program.next.keep(kind, tape, (*inputs, *made))
    grads = [program.result(STORED + index, made) for index in (stored.GRAD_E, stored.GRAD_C, stored.GRAD_BIAS)]
    return used_up(grads)


_apply = differentiable(
    _cross_entropy_op,
    _cross_entropy_again,
    _keep,
    partial(_gradients, recompute=_recompute_op, gather=_gather_op, finish_stored=_finish_stored_op),
    partial(_gradients, recompute=_recompute, gather=_gather, finish_stored=_finish_stored),
    with_entropy=True,
)


def cross_entropy(*inputs: Any) -> tuple[Tensor, Any, Tensor | None]:
    """Loss, () or (N,), LSE (N,) and metrics (2, N), fp32, differentiable in e, c and bias. See INPUTS and OPTIONS.

    LSE that are not wanted may be None. Metrics that are not wanted are None, or empty under torch.compile. A gradient
    of the entropies takes four products, also where the plan has stored exponentials.
    """
    return _apply(*inputs)


def _uniform(reduction: str, with_lse: bool) -> bool:
    """Whether the backward pass will get one gradient for all row losses, and none for the log-sum-exps."""
    return reduction != "none" and not with_lse


def _skips(e: Tensor, c: Tensor, bias: Tensor | None, with_lse: bool) -> bool:
    """Whether three products leave out ignored rows."""
    return skips_ignored(int(e.shape[0]), int(e.shape[1]), int(c.shape[0]), bias is not None, with_lse)


def _plan(
    e: Tensor,
    c: Tensor,
    bias: Tensor | None,
    main_grad_c: Tensor | None,
    dtype: torch.dtype,
    uniform: bool,
    needs: list[bool],
    o: Options,
) -> Plan | None:
    """The plan of the backward pass; None if no gradient is wanted."""
    if not any(needs):
        return None
    problem = Problem(
        int(e.shape[0]), int(e.shape[1]), int(c.shape[0]), dtype,  # int() fixes a compiled graph to these sizes
        e.dtype if needs[0] else None, c.dtype if needs[1] else None, main_grad_c is not None,
        uniform, bias is not None,
    )  # fmt: skip
    return backend_of(e).plan(problem, e, o)
