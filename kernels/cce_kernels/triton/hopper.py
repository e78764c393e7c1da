"""Says which operands, devices and Triton versions the two Gluon kernels for Hopper serve.

hopper_kernels.py holds the kernels. Gluon is experimental. If Triton lacks it or has moved it, the Triton kernels
compute the same.
"""

from __future__ import annotations

from torch import Tensor

from ..runtime.launch import known_version
from ..runtime.tiles import device_of, hopper_tiles

try:
    from . import hopper_kernels as kernels
except (ImportError, AttributeError):
    kernels = None  # type: ignore[assignment]  # a module otherwise

# Registers a thread at launch: 65536 over three warpgroups. Then the producer gives registers back, and the consumers
# take them.
REGISTERS = 168


def fits(e: Tensor) -> bool:
    """Whether these kernels serve operands like e (N, D) on its device."""
    if kernels is None or e.itemsize != 2 or device_of(e).capability != 90:
        return False
    # If a row took fewer steps than the ring has buffers, one consumer could get a tile ahead of the other.
    tiles = hopper_tiles(e.shape[1])
    long_enough = e.shape[1] > tiles.inner * (tiles.num_stages - 1)
    # A ring that miscounts waits forever. So a version is known after tests/kernels/devices/test_hopper.py has passed.
    return long_enough and known_version()
