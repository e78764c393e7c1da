"""The properties of a device that the kernels depend on."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch


class Device(NamedTuple):
    """The properties of a device that the kernels depend on.

    capability: compute capability, 90 for Hopper; 0 in Triton's interpreter.
    shared_memory: bytes of shared memory that one program may have.
    multiprocessors: number of streaming multiprocessors.
    """

    capability: int
    shared_memory: int
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
