"""A process group's name, which torch.compile treats as a constant."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .sharding import name_of


@torch.compiler.assume_constant_result
def constant_name_of(group: dist.ProcessGroup) -> str:
    """`sharding.name_of`, called while torch.compile traces a graph."""
    return name_of(group)
