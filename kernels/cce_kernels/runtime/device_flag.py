"""Reads a flag from the device without waiting, so that the host need not launch work that the flag rules out.

A copy to the host is queued behind the work that writes the flag. If the copy has not arrived when the host looks, the
host launches the kernels all the same. They read the flag on the device and return at once. The results are equal.
"""

from __future__ import annotations

import torch
from torch import Tensor

_UNKNOWN = -1


class Glance:
    """The value that the work queued so far gives a flag, () int32, not negative."""

    def __init__(self, flag: Tensor) -> None:
        self._seen: Tensor | None = None
        # A CUDA graph that is being captured will run again with other values of the flag.
        if flag.is_cuda and not torch.cuda.is_current_stream_capturing():
            self._seen = torch.full((), _UNKNOWN, dtype=flag.dtype, pin_memory=True)
            self._seen.copy_(flag, non_blocking=True)

    def is_zero(self) -> bool:
        """Whether the copy has arrived and is 0."""
        return self._seen is not None and self._seen.item() == 0
