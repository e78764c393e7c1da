"""What a flag on the device says, as far as the device has got: work that it rules out need not be launched.

Nothing waits. A copy to the host is queued behind the work that writes the flag; whoever looks before it has arrived
learns nothing, and launches what finds the flag on the device and returns at once. Results are the same either way.
"""

from __future__ import annotations

import torch
from torch import Tensor

_UNKNOWN = -1


class Glance:
    """At flag, () int32, not negative, as the work queued so far leaves it."""

    def __init__(self, flag: Tensor) -> None:
        self._seen: Tensor | None = None
        # A graph that is being captured is replayed for other flags.
        if flag.is_cuda and not torch.cuda.is_current_stream_capturing():
            self._seen = torch.full((), _UNKNOWN, dtype=flag.dtype, pin_memory=True)
            self._seen.copy_(flag, non_blocking=True)

    def is_zero(self) -> bool:
        """Whether the flag is known to be 0 by now."""
        return self._seen is not None and self._seen.item() == 0
