"""What torch.compile has to leave out of its graphs, or to take for a constant.

Imported late, because it imports torch's compiler, which takes 2 s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..parallel.sharding import name_of


@torch.compiler.disable(
    reason="cce_kernels: return_stats=True runs outside of a compiled graph, because a graph cannot return tensors "
    "that its backward pass fills in; call without return_stats to compile the whole graph"
)
def uncompiled(function: Callable[..., Any], *inputs: Any) -> Any:
    """Call function(*inputs) eagerly."""
    return function(*inputs)


@torch.compiler.assume_constant_result
def constant_name_of(group: dist.ProcessGroup) -> str:
    """`sharding.name_of`, called while torch.compile traces a graph."""
    return name_of(group)
