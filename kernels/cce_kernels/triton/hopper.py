"""Launches the two Gluon kernels for Hopper, and says which operands, devices and Triton versions they serve.

hopper_kernels.py holds the kernels. Gluon is experimental. If Triton lacks it or has moved it, the Triton kernels
compute the same.
"""

from __future__ import annotations

from torch import Tensor

from ..runtime.launch import known_version
from ..runtime.tiles import GROUP, device_of, hopper_tiles
from .targets.live_rows import Live

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


def exponentials(
    programs: int, e: Tensor, c: Tensor, columns: Tensor | None, w: Tensor | None, z_target: Tensor,
    live: Live | None, gathered: Tensor | None, sums: Tensor, metrics: Tensor | None, unread: Tensor | None,
    splits: int, tiles_per_split: int, logit_scale: float,
) -> None:  # fmt: skip
    """Launch `hopper_exponentials_kernel`; the tensors are as for `logits.exponentials`."""
    (n_rows, dim), vocab = e.shape, c.shape[0]
    t, Descriptor = hopper_tiles(dim), kernels.Descriptor
    kernels.hopper_exponentials_kernel[(programs,)](
        Descriptor(e, t.rows // 2, t.inner), None if gathered is None else Descriptor(gathered, t.rows // 2, t.inner),
        Descriptor(c, t.cols, t.inner), None if w is None else Descriptor(w, t.rows // 2, t.cols // 2), columns,
        z_target, *((None, None, None) if live is None else (live.rows, live.count, live.some)), sums, metrics,
        unread, n_rows, vocab, dim, splits, tiles_per_split, logit_scale,
        t.num_stages, GROUP, vocab % t.cols == 0, num_warps=t.num_warps, maxnreg=REGISTERS,
    )  # fmt: skip


def gradient(
    programs: int, e: Tensor, c: Tensor, dz: Tensor, pointers: tuple[Tensor | None, ...], first: int, splits: int,
    tiles_per_split: int, logit_scale: float, on_target: float, elsewhere: float,
) -> None:  # fmt: skip
    """Launch `hopper_gradient_kernel`.

    pointers: columns, lse, a, b, active, eps and times of `gradient_kernel`. eps and times are None without a filter.
    """
    (n_rows, dim), width = e.shape, c.shape[0]
    t, Descriptor = hopper_tiles(dim), kernels.Descriptor
    kernels.hopper_gradient_kernel[(programs,)](
        Descriptor(e, t.rows // 2, t.inner), Descriptor(c, t.cols, t.inner), Descriptor(dz, t.rows // 2, t.cols // 2),
        *pointers, n_rows, width, dim, first, splits, tiles_per_split, logit_scale, on_target, elsewhere,
        t.num_stages, GROUP, num_warps=t.num_warps, maxnreg=REGISTERS,
    )  # fmt: skip
