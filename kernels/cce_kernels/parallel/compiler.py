"""What torch.compile treats as a constant: the name of a process group."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .sharding import name_of


@torch.compiler.assume_constant_result
def constant_name_of(group: dist.ProcessGroup) -> str:
    """`spread.name_of`, called while a graph is traced."""
    return name_of(group)
