"""Launches with the arguments of an earlier launch, without Triton's work on each argument.

At each launch Triton encodes every TMA descriptor anew, and asks CUDA about every pointer. That takes 10 to 30 µs for
each descriptor. But a training step mostly repeats the launches of the step before, with the same addresses, because
torch's allocator hands out the same memory. `call_of` therefore expands a launch once, into numbers that stay right as
long as addresses, sizes and dtypes are the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
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


def call_of(compiled: Any, grid: tuple[int, int, int], args: tuple) -> Call | None:
    """The launch of a compiled kernel with these arguments; None where only Triton's launcher serves it.

    The call stays right as long as the addresses, shapes, strides and dtypes of all arguments are the same.
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
    for place, x in enumerate(args):
        if place in described:
            meta = next(metas)
            if meta is None:  # the kernel takes pointers instead of descriptors
                return None
            values += make_tensordesc_arg(x, meta)
        elif isinstance(x, Tensor):
            if not x.is_cuda:  # Triton's launcher says what is wrong
                return None
            values.append(x.data_ptr())
        else:
            values.append(x)
    first = (compiled.function, run.launch_cooperative_grid, run.launch_pdl)
    nothing = None, None, None  # launch metadata and two hooks
    if hasattr(run, "arg_annotations"):  # 3.7
        scratch = None, None
        rest = (*first, compiled.packed_metadata, *nothing, *scratch, run.arg_annotations, run.kernel_signature, values)
    else:
        rest = (*first, None, None, compiled.packed_metadata, *nothing, *values)
    return Call(launch, grid, rest)
