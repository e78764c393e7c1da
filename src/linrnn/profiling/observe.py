"""Observe the output layer's passes: tell observers when a pass begins and ends, and mark the passes in a profile."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

LOSS_FORWARD, LOSS_BACKWARD = "loss/forward", "loss/backward"


@contextlib.contextmanager
def nvtx_range(name: str) -> Iterator[None]:
    """A named range in Nsight Systems (with CUDA) and torch.profiler. Without a profiler it costs microseconds."""
    nvtx = torch.cuda.nvtx.range(name) if torch.cuda.is_available() else contextlib.nullcontext()
    with torch.profiler.record_function(name), nvtx:
        yield


def marked(tensor: Tensor, reached: Callable[[], None]) -> Tensor:
    """A view of a tensor. `reached` is called when the backward pass has computed the view's gradient."""
    view = tensor.view_as(tensor)
    if view.requires_grad:
        view.register_hook(lambda grad: reached())
    return view


class _BackwardEnds(torch.autograd.Function):
    """Identity on the output layer's inputs. Its backward pass runs once the gradients of both exist."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, end: Callable[[], None]) -> tuple[Tensor, Tensor]:
        ctx.end = end
        views = hidden.view_as(hidden), weight.view_as(weight)
        frozen = (view for view, needs_grad in zip(views, ctx.needs_input_grad, strict=False) if not needs_grad)
        ctx.mark_non_differentiable(*frozen)
        return views

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        ctx.end()
        return *grads, None  # type: ignore[return-value]


class LossObserver(Protocol):
    """Told when the output layer's passes begin and end: LOSS_FORWARD and LOSS_BACKWARD."""

    def begin(self, name: str) -> None: ...
    def end(self, name: str) -> None: ...


def watched_loss(
    loss: Callable[[Tensor, Tensor, Tensor], Any],
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    *observers: LossObserver,
) -> Any:
    """Call a loss backend, mark its forward and backward pass as NVTX ranges, and tell the observers.

    Args:
        loss: returns a dataclass with a scalar `sum_nats`.
        observers: are told when the passes begin and end.

    Returns:
        The result of `loss`. Values and gradients are unchanged; gradients are passed on, not copied.
    """
    backward = contextlib.ExitStack()

    def begin_backward() -> None:
        backward.enter_context(_watched(LOSS_BACKWARD, observers))

    hidden_ND, weight_VD = _BackwardEnds.apply(hidden_ND, weight_VD, backward.close)
    with _watched(LOSS_FORWARD, observers):
        output = loss(hidden_ND, weight_VD, labels_N)
    return replace(output, sum_nats=marked(output.sum_nats, begin_backward))


@contextlib.contextmanager
def _watched(name: str, observers: Sequence[LossObserver]) -> Iterator[None]:
    with nvtx_range(name.replace("/", " ")):
        for observer in observers:
            observer.begin(name)
        yield
        for observer in observers:
            observer.end(name)
