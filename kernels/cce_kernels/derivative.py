"""What the derivatives of operators.py and operators.py share, with torch.compile and without.

Both operators take e, c, targets, bias, main_grad_c and stats first, and give loss, LSE, metrics and the state of the
backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .backends import without_values

NOT_TWICE = "cce_kernels: the loss has no second derivative; take its gradient without create_graph=True"
STATS = 5  # place among the inputs


class Final(torch.autograd.Function):
    """A gradient, and what it depends on: to differentiate it in its turn is an error. Without this node a penalty on
    it would have no effect, unnoticed."""

    @staticmethod
    def forward(ctx, grad, *_):
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(NOT_TWICE)


def differentiable(
    op: Any, forward: Callable[..., Any], keep: Callable[..., None], gradients: Callable, direct_gradients: Callable
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Give `op` its derivative; a function of its inputs to loss, LSE and metrics, the first two differentiable.

    Args:
        forward: what `op` does, without the dispatcher, whose bookkeeping takes longer than small problems do.
        keep: (ctx, inputs): notes on ctx what `gradients` needs of them beside tensors, and `needs`.
        gradients: (ctx, grad_loss, grad_lse): of e, c and bias, through operators. `ctx.saved_tensors` are e, c, bias,
            lse and the state; `ctx.written` main_grad_c and stats; `ctx.dtypes` the gradients' (None: not wanted).
            The first of several backward passes through one loss may use the state up; it then sets `ctx.finished`.
        direct_gradients: the same without the dispatcher.
    """

    def setup_context(ctx, inputs, output) -> None:
        e, c, _, bias, *ctx.written = inputs[:6]
        keep(ctx, inputs)
        ctx.dtypes = [
            None if x is None or not need else x.dtype for x, need in zip((e, c, bias), ctx.needs, strict=True)
        ]
        if ctx.written[0] is not None:
            ctx.dtypes[1] = None
        ctx.n_inputs, ctx.finished = len(inputs), False
        _, lse, _, state = output
        ctx.set_materialize_grads(False)
        # ctx.written: others may write to them before the backward pass, which does too.
        ctx.save_for_backward(e, c, bias, lse, *state)

    def setup_op_context(ctx, inputs, output) -> None:
        ctx.mark_non_differentiable(output[2], *output[3])
        setup_context(ctx, inputs, output)

    def backward(ctx, *upstream, through=gradients):
        grad_e, grad_c, grad_bias = (
            None if dtype is None else grad.to(dtype)
            for grad, dtype in zip(through(ctx, *upstream[:2]), ctx.dtypes, strict=True)
        )
        return grad_e, grad_c, None, grad_bias, *[None] * (ctx.n_inputs - 4)

    op.register_autograd(backward, setup_context=setup_op_context)

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            loss, lse, metrics, state = forward(*inputs)
            ctx.mark_non_differentiable(metrics)
            setup_context(ctx, inputs, (loss, lse, metrics, state))
            return loss, lse, metrics

        @staticmethod
        def backward(ctx, *upstream):
            if not torch.is_grad_enabled():
                return backward(ctx, *upstream, through=direct_gradients)
            with torch.no_grad():  # create_graph=True
                grads = backward(ctx, *upstream, through=direct_gradients)
            return tuple(
                None if grad is None else Final.apply(grad, *ctx.saved_tensors[:3], *upstream) for grad in grads
            )

    def call(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        compiling = torch.compiler.is_compiling()
        if not compiling and not without_values(inputs[0]):
            return Direct.apply(*inputs)
        if compiling and inputs[STATS] is not None:
            from .runtime.compiler import uncompiled  # imports all of torch's compiler: 2 s

            return uncompiled(call, *inputs)
        loss, lse, metrics, _ = op(*inputs)
        return loss, lse, metrics

    return call


def empty_gradient(e: Tensor, x: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    """Of x's shape, on e's device; one of no entries, as e's, where it is not wanted."""
    return e.new_empty(0 if x is None or dtype is None else x.shape, dtype=dtype)


def used_up(state: list[Tensor]) -> list[Tensor]:
    """The same memory for a backward pass that overwrites it and returns parts of it as gradients.

    `.data` has a version counter of its own: autograd would refuse another backward pass through the loss because a
    saved tensor has changed, although that pass does not read it.
    """
    return [x.data for x in state]


def stored_dtypes(
    dtype_e: torch.dtype, c: Tensor, main_grad_c: Tensor | None, needs: list[bool]
) -> tuple[torch.dtype | None, torch.dtype | None]:
    """What the stored scheme sums the gradients of e and c for; a main_grad is added to from a 16-bit sum."""
    dtype_c = torch.bfloat16 if main_grad_c is not None else c.dtype
    return dtype_e if needs[0] else None, dtype_c if needs[1] else None
