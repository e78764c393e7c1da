"""New memory that holds zeros: for a rehearsal, in which no kernel writes its results.

A model may index tensors by what a kernel has written, as sparse attention does, or loop until a result has some value.
Memory that nothing has written may hold any index, and a GPU then reports an illegal memory access. Zero is an index of
every tensor that is not empty.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

# Torch's functions whose result nothing has written. FLA, and every other caller of Triton, allocates with them.
ALLOCATING = (
    *((torch, name) for name in ("empty", "empty_like", "empty_strided", "empty_permuted")),
    *((Tensor, name) for name in ("new_empty", "new_empty_strided")),
)


@contextlib.contextmanager
def zeroed() -> Iterator[None]:
    """Within the context, `torch.empty` and its like return zeros, in every thread.

    The functions themselves are replaced, because a backward pass allocates on autograd's own thread of the GPU. A
    `TorchDispatchMode` would also see every other operation, and would keep FLA's functions under `torch.compile` from
    being compiled in the rehearsal.
    """

    with contextlib.ExitStack() as patches:
        for owner, name in ALLOCATING:
            patches.enter_context(patch.object(owner, name, _zeroing(getattr(owner, name))))
        yield


def _zeroing(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def zeros(*args: Any, **options: Any) -> Tensor:
        tensor = allocate(*args, **options)
        tensor.detach().zero_()  # detached: it may require a gradient
        return tensor

    return zeros
