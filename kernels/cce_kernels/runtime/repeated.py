"""Launches with the arguments of an earlier launch, without Triton's work on each argument.

At each launch Triton encodes every TMA descriptor anew, and asks CUDA about every pointer. That takes 10 to 30 µs for
each descriptor. But a training step mostly repeats the launches of the step before, with the same addresses, because
torch's allocator hands out the same memory. `opened` therefore expands a launch once, into numbers that stay right as
long as sizes and dtypes are the same; `Open.at` adds the addresses.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from copy import copy
from functools import cache
from typing import Any, NamedTuple

import triton
from torch import Tensor

try:
    from triton.backends.nvidia.driver import CudaLauncher, make_tensordesc_arg
except ImportError:  # every launch then goes through Triton's launcher: slower, with the same results
    CudaLauncher = make_tensordesc_arg = None

# Triton versions whose launchers this file knows. With another version every launch goes through Triton's launcher.
TRITONS = ("3.6.0", "3.7.1")


class Call(NamedTuple):
    """A launch without its stream: `launch(*grid, stream, *rest)`. It holds addresses, but keeps no tensor alive."""

    launch: Callable[..., None]
    grid: tuple[int, int, int]
    rest: tuple


class Open(NamedTuple):
    """A launch whose addresses are open. `spots` says where each one goes: (index among the values, descriptor, meta).

    A descriptor without a tensor, and what encodes it, stand beside the address of a TMA descriptor; else None.
    """

    launch: Callable[..., None]
    grid: tuple[int, int, int]
    head: tuple
    nested: bool  # whether the driver takes the values as one list
    values: tuple
    spots: tuple[tuple[int, Any, Any], ...]

    def at(self, addresses: Sequence[int]) -> Call:
        """The launch with these addresses, one for each spot."""
        values = list(self.values)
        for (index, described, meta), address in zip(self.spots, addresses, strict=True):
            if described is None:
                values[index] = address
            else:  # the sizes that follow the encoded descriptor do not depend on the address
                there = copy(described)  # another thread may launch the same program
                there.base = _Address(address)
                values[index] = make_tensordesc_arg(there, meta)[0]
        return Call(self.launch, self.grid, (*self.head, values) if self.nested else (*self.head, *values))


class _Address(int):
    """An address in place of a descriptor's tensor."""

    def data_ptr(self) -> int:
        return self


def known_version() -> bool:
    """Whether this file knows the launcher of the installed Triton."""
    return triton.__version__.split("+")[0] in TRITONS


@cache
def _inside(launch: Callable[..., None]) -> tuple[Callable[..., None], set[int], list[Any]] | None:
    """The driver's launch, the places of descriptors among a kernel's arguments, and what encodes them.

    None if they are not where this file looks for them.
    """
    if not inspect.isfunction(launch):  # the driver's launch itself: the kernel has no descriptors
        return launch, set(), []
    inside = inspect.getclosurevars(launch).nonlocals  # Triton's loop over descriptors, around the driver's launch
    if not {"launcher", "tensordesc_indices", "tensordesc_meta"} <= inside.keys():
        return None
    return inside["launcher"], inside["tensordesc_indices"], inside["tensordesc_meta"]


def opened(compiled: Any, grid: tuple[int, int, int], args: tuple) -> tuple[Open, list[Tensor]] | None:
    """The launch of a compiled kernel with these arguments, and the tensors whose addresses go to its spots.

    None where only Triton's launcher serves it. The launch stays right as long as the shapes, strides and dtypes of all
    arguments are the same, and the 16-byte alignment of the addresses.
    """
    run = compiled.run
    if CudaLauncher is None or type(run) is not CudaLauncher or not known_version():
        return None
    if run.global_scratch_size or run.profile_scratch_size:  # Triton allocates this memory anew for every launch
        return None
    inside = _inside(run.launch)
    if inside is None:
        return None
    launch, described, metas = inside[0], inside[1], iter(inside[2])
    values: list[Any] = []
    spots: list[tuple[int, Any, Any]] = []
    tensors: list[Tensor] = []
    for place, x in enumerate(args):
        if place in described:
            meta = next(metas)
            if meta is None:  # the kernel takes pointers instead of descriptors
                return None
            without = copy(x)
            without.base = None
            spots.append((len(values), without, meta))
            tensors.append(x.base)
            values += (None, *x.shape, *x.strides)
        elif isinstance(x, Tensor):
            if not x.is_cuda:  # Triton's launcher says what is wrong
                return None
            spots.append((len(values), None, None))
            tensors.append(x)
            values.append(None)
        else:
            values.append(x)
    first = (compiled.function, run.launch_cooperative_grid, run.launch_pdl)
    nothing = None, None, None  # launch metadata and two hooks
    nested = hasattr(run, "arg_annotations")  # 3.7
    head: tuple
    if nested:
        scratch = None, None
        head = (*first, compiled.packed_metadata, *nothing, *scratch, run.arg_annotations, run.kernel_signature)
    else:
        head = (*first, None, None, compiled.packed_metadata, *nothing)
    return Open(launch, grid, head, nested, tuple(values), tuple(spots)), tensors
