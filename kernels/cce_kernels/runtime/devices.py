"""The properties of a device that the kernels depend on, and a flag that is read from it without waiting."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Device(NamedTuple):
    """The properties of a device that the kernels depend on."""

    capability: int  # compute capability, 90 for Hopper; 0 in Triton's interpreter
    shared_memory: int  # bytes that one program may have
    multiprocessors: int


IN_INTERPRETER = Device(0, 227 * 1024, 4)
ABSENT = Device(90, 227 * 1024, 132)  # an H100, for the shapes of fake tensors on a machine without a GPU
# KiB of shared memory a program, by compute capability. Needed for torch versions without the property, and for
# compiling for a device that is not present.
SHARED_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}


@lru_cache
def properties(device: torch.device) -> Device:
    """The properties of an NVIDIA GPU; those of an H100 on a machine without a GPU."""
    if not torch.cuda.is_available():
        return ABSENT
    found = torch.cuda.get_device_properties(device)
    capability = 10 * found.major + found.minor
    known = SHARED_KIB.get(capability, min(SHARED_KIB.values())) * 1024
    shared_memory = getattr(found, "shared_memory_per_block_optin", known)  # older torch lacks this property
    return Device(capability, shared_memory, found.multi_processor_count)


@lru_cache
def target(capability: int) -> Device:
    """A device of this compute capability, to compile for without having one."""
    return Device(capability, SHARED_KIB[capability] * 1024, 4)


class _Rehearsal(threading.local):
    device: torch.device | None = None
    launch: Any = None


# What this thread rehearses (ahead.py): the GPU that tensors on the meta device stand for, and what takes up launches.
REHEARSAL = _Rehearsal()


def without_values(x: Tensor) -> bool:
    """Whether x has a shape but no values: a fake tensor, or one on the meta device that no rehearsal is about."""
    if x.is_meta:
        return REHEARSAL.device is None
    # Not imported here, because it imports torch's compiler, which takes 2 s. Without it no fake tensor exists.
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    return fake is not None and isinstance(x, fake.FakeTensor)


_NOTHING: AbstractContextManager[Any] = nullcontext()


def kernels_on(x: Tensor) -> AbstractContextManager[Any]:
    """A context in which x's device is the current one, and autocast is off.

    torch's own contexts take 10 µs on the host to enter and leave. So this one is empty where both hold already.
    """
    kind = x.device.type
    elsewhere = kind == "cuda" and x.device.index != torch.cuda.current_device()
    autocast = kind != "meta" and torch.is_autocast_enabled(kind)  # torch has no autocast on meta
    return _moved_to(x) if elsewhere or autocast else _NOTHING


@contextmanager
def _moved_to(x: Tensor) -> Iterator[None]:
    with torch.cuda.device_of(x), torch.autocast(x.device.type, enabled=False):
        yield


_UNKNOWN = -1


class Glance:
    """The value that the work queued so far gives a flag, () int32, not negative. Reading it waits for nothing.

    A copy to the host is queued behind the work that writes the flag. If it has not arrived when the host looks, the
    host launches the kernels that the flag may rule out, which then return at once. The results are equal.
    """

    def __init__(self, flag: Tensor) -> None:
        self._seen: Tensor | None = None
        # A CUDA graph that is being captured will run again with other values of the flag.
        if flag.is_cuda and not torch.cuda.is_current_stream_capturing():
            self._seen = torch.full((), _UNKNOWN, dtype=flag.dtype, pin_memory=True)
            self._seen.copy_(flag, non_blocking=True)

    def is_zero(self) -> bool:
        """Whether the copy has arrived and is 0."""
        return self._seen is not None and self._seen.item() == 0
