"""The tensors that a forward pass hands to its backward pass.

Tensors that are not wanted are None. A custom operator returns tensors only, so its state holds empty ones instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

State = list[Any]  # of Tensor | None


def present(x: Tensor | None) -> Any:
    """A tensor of the state, or None if it is not wanted."""
    return x if x is not None and x.numel() else None


def used_up(state: State) -> State:
    """The state's memory for a backward pass that overwrites it and returns parts of it as gradients.

    `.data` has a version counter of its own. Otherwise autograd would refuse a second backward pass, because a saved
    tensor has changed. The second pass does not read the state.
    """
    return [None if x is None else x.data for x in state]


def filled(forward: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor, Tensor, list[Tensor]]]:
    """A function of derivative.py for a custom operator: empty tensors for None, and no plan."""

    def as_tensors(*inputs):
        loss, lse, metrics, state, _ = forward(*inputs)
        metrics = lse.new_empty(0) if metrics is None else metrics
        return loss, lse, metrics, [lse.new_empty(0) if x is None else x for x in state]

    return as_tensors
