"""Calls that torch.compile has to leave out of its graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable(
    reason="cce_kernels: return_stats=True runs outside of a compiled graph, because a graph cannot return tensors "
    "that its backward pass fills in; call without return_stats to compile the whole graph"
)
def uncompiled(function: Callable[..., Any], *inputs: Any) -> Any:
    """Call function(*inputs) eagerly."""
    return function(*inputs)
