"""The optimizer's work on a rank's own rows, as plain tensors.

Parameters of a sharded model are DTensors. On a list of DTensors an operation describes every result anew: Python code,
for each parameter. Nothing here calls such an operation in a step.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

NO_DIVISION_BY_ZERO = 1e-6  # as in torch.nn.utils.clip_grad_norm_


@torch.no_grad()
def own_rows(tensor: Tensor) -> Tensor:
    """This rank's rows of a sharded tensor, in the same memory. A tensor that is not sharded stays as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW that updates a rank's own rows. The moments of a DTensor are DTensors, as in torch's.

    `_init_group` fills the lists of tensors that torch's step works on (torch 2.11 to 2.13).
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = map(own_rows, tensors)
        return has_complex


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None) -> Tensor:
    """Scale all gradients so that their global L2 norm is at most `max_norm` (None: leave them).

    Gradients may be sharded (DTensors of one mesh). Returns the norm before clipping, a scalar on the gradients'
    device. The host does not wait for a GPU. A model that is not sharded gets what torch.nn.utils.clip_grad_norm_
    gives, bit for bit.

    Raises:
        TypeError: some gradients are sharded, and others are not.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    sharded = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
    if sharded and len(sharded) < len(gradients):
        raise TypeError("some gradients are sharded, and others are whole: their norms cannot be added")
    rows = [own_rows(gradient) for gradient in gradients]
    norm = nn.utils.get_total_norm(rows)
    if sharded:
        norm = norm.square()
        dist.all_reduce(norm, group=sharded[0].device_mesh.get_group("shard"))
        norm = norm.sqrt()
    if max_norm is not None:
        scale = (max_norm / (norm + NO_DIVISION_BY_ZERO)).clamp(max=1)
        for dtype in {row.dtype for row in rows}:  # one list of one dtype is one kernel
            torch._foreach_mul_([row for row in rows if row.dtype == dtype], scale)
    return norm
