"""Gives a function its derivative: as a custom operator with torch.compile, and directly without.

operators.py and parallel/operators.py use it. Their functions take e, c, targets, bias, main_grad_c, stats and weights
first. They return loss, LSE, metrics, the state of the backward pass and its plan. Metrics and tensors of the state may
be None; runtime/state.py turns them into the tensors of an operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .runtime.devices import without_values

NOT_TWICE = "cce_kernels: the loss has no second derivative; take its gradient without create_graph=True"
NO_TRANSFORM = (
    "cce_kernels: torch.func transforms (vmap, grad, jvp, …) and batched gradients (is_grads_batched) are not "
    "supported; give all rows to one call, and take gradients with backward() or torch.autograd.grad"
)
BIAS, STATS, WEIGHTS = 3, 5, 6  # indices among the inputs


def refuse_transforms(*gradients: Tensor | None) -> None:
    """Raise a RuntimeError inside a transform of torch.func, and for batched gradients.

    A kernel cannot read the memory of their tensors.
    """
    functorch = torch._C._functorch
    batched = any(x is not None and functorch.is_legacy_batchedtensor(x) for x in gradients)
    if batched or functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(NO_TRANSFORM)


class Final(torch.autograd.Function):
    """The identity on a gradient; its backward raises an error.

    Without this node, a penalty on the gradient would silently have no effect.
    """

    @staticmethod
    def forward(ctx, grad, *_):
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(NOT_TWICE)


def differentiable(
    op: Any,
    forward: Callable[..., Any],
    keep: Callable[..., None],
    gradients: Callable,
    direct_gradients: Callable,
    with_entropy: bool = False,
) -> Callable[..., tuple[Tensor, Any, Tensor | None]]:
    """Give `forward` its derivative.

    Args:
        op: the custom operator of `state.filled(forward)`.
        forward: is called directly where possible, because the dispatcher takes longer than a small problem.
        keep: called with (ctx, inputs); stores on ctx `needs`, and what else `gradients` needs besides tensors.
        gradients: called with (ctx, grad_loss, grad_lse); returns the gradients of e, c and bias, computed by custom
            operators. `ctx.saved_tensors` holds e, c, bias, weights, lse and the state, `ctx.written` main_grad_c and
            stats, `ctx.dtypes` the gradients' dtypes (None if not wanted), `ctx.plan` the plan, or None. If the
            forward pass was repeated, `ctx.program` is its program, the state is what a run has made, and lse may be
            None. The first backward pass through a loss may overwrite the state, and then sets `ctx.finished`.
        direct_gradients: like `gradients`, with direct calls instead of custom operators.
        with_entropy: whether the metrics are differentiable: their second row, the entropies. `gradients` then get
            grad_metrics, too, and the metrics stand between lse and the state in `ctx.saved_tensors`.

    Returns:
        A function of the same inputs that returns loss, LSE and metrics. Loss and LSE are differentiable. Unwanted LSE
        may be None. Unwanted metrics are None, or empty under torch.compile.
    """

    def setup_context(ctx, inputs, output, plan=None) -> None:
        e, c, _, bias, *ctx.written = inputs[:6]
        weights = inputs[WEIGHTS]
        keep(ctx, inputs)
        ctx.dtypes = [
            None if x is None or not need else x.dtype for x, need in zip((e, c, bias), ctx.needs, strict=True)
        ]
        if ctx.written[0] is not None:
            ctx.dtypes[1] = None
        _, lse, metrics, state = output
        ctx.plan, ctx.finished, ctx.program = plan, False, getattr(state, "program", None)
        ctx.set_materialize_grads(False)
        # Not main_grad_c and stats (ctx.written): both may be written to before and in the backward pass. An alias of a
        # leaf keeps the memory if its .data is replaced before backward, as by DeepSpeed's ZeRO-3.
        inputs = [x.detach() if x is not None and x.is_leaf else x for x in (e, c, bias, weights)]
        ctx.save_for_backward(*inputs, lse, *([metrics] if with_entropy else []), *state)

    def setup_op_context(ctx, inputs, output) -> None:
        ctx.mark_non_differentiable(*([] if with_entropy else [output[2]]), *output[3])
        ctx.n_inputs = len(inputs)
        setup_context(ctx, inputs, output)

    def backward(through, ctx, upstream):
        return [
            None if dtype is None else grad if grad.dtype == dtype else grad.to(dtype)
            for grad, dtype in zip(through(ctx, *upstream[: 3 if with_entropy else 2]), ctx.dtypes, strict=True)
        ]

    def op_backward(ctx, *upstream):
        grad_e, grad_c, grad_bias = backward(gradients, ctx, upstream)
        return grad_e, grad_c, None, grad_bias, *[None] * (ctx.n_inputs - 4)

    op.register_autograd(op_backward, setup_context=setup_op_context)

    class Direct(torch.autograd.Function):
        # e, c and bias, which get gradients, and all inputs in one tuple. torch takes 0.5 µs for each argument.
        @staticmethod
        def forward(ctx, _e, _c, _bias, inputs):
            *output, plan = forward(*inputs)
            loss, lse, metrics, _ = output
            if not with_entropy and metrics is not None:
                ctx.mark_non_differentiable(metrics)
            setup_context(ctx, inputs, output, plan)
            return loss, lse, metrics

        @staticmethod
        def backward(ctx, *upstream):
            refuse_transforms(*upstream)
            if not torch.is_grad_enabled():
                return *backward(direct_gradients, ctx, upstream), None
            with torch.no_grad():  # create_graph=True
                grads = backward(direct_gradients, ctx, upstream)
            # What the aliases were taken of: the gradients depend on it.
            leaves = [node.variable for node, _ in ctx.next_functions if hasattr(node, "variable")]
            return *[
                None if grad is None else Final.apply(grad, *ctx.saved_tensors[:3], *leaves, *upstream)
                for grad in grads
            ], None  # fmt: skip

    def call(*inputs: Any) -> tuple[Tensor, Any, Tensor | None]:
        compiling = torch.compiler.is_compiling()
        if not compiling and not without_values(inputs[0]):
            return Direct.apply(inputs[0], inputs[1], inputs[BIAS], inputs)
        if compiling and inputs[STATS] is not None:
            from .runtime.compiler import uncompiled  # imported late: it imports torch's compiler, which takes 2 s

            return uncompiled(call, *inputs)
        loss, lse, metrics, _ = op(*inputs)
        return loss, lse, metrics

    return call


def empty_gradient(e: Tensor, x: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    """Memory for x's gradient on e's device; an empty tensor if dtype is None."""
    return e.new_empty(0 if x is None or dtype is None else x.shape, dtype=dtype)


def stored_dtypes(
    dtype_e: torch.dtype, c: Tensor, bias: Tensor | None, main_grad_c: Tensor | None, needs: list[bool]
) -> tuple[torch.dtype | None, torch.dtype | None, torch.dtype | None]:
    """Dtypes for which the three-product scheme sums the gradients of e, c and bias; None for those not wanted.

    dC is summed in bf16 if main_grad_c takes it.
    """
    dtype_c = torch.bfloat16 if main_grad_c is not None else c.dtype
    dtype_bias = None if bias is None or not needs[2] else bias.dtype
    return dtype_e if needs[0] else None, dtype_c if needs[1] else None, dtype_bias
