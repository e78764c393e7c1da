"""What the kernels need to know of a device."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch


class Device(NamedTuple):
    """A device as the kernels see it.

    capability: compute capability, 90 for Hopper; 0 in Triton's interpreter.
    shared_memory: bytes that one program may have.
    multiprocessors: as many programs run at a time.
    """

    capability: int
    shared_memory: int
    multiprocessors: int


# What stands in for a GPU where there is none: in the interpreter, and for the shapes of fake tensors (an H100).
IN_INTERPRETER = Device(0, 227 * 1024, 4)
ABSENT = Device(90, 227 * 1024, 132)
# KiB that a program may have, by compute capability, where neither the device nor torch says it.
SHARED_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}


@lru_cache
def properties(device: torch.device) -> Device:
    """Of an NVIDIA GPU."""
    if not torch.cuda.is_available():
        return ABSENT
    found = torch.cuda.get_device_properties(device)
    capability = 10 * found.major + found.minor
    known = SHARED_KIB.get(capability, min(SHARED_KIB.values())) * 1024
    shared_memory = getattr(found, "shared_memory_per_block_optin", known)  # not in every torch
    return Device(capability, shared_memory, found.multi_processor_count)


@lru_cache
def target(capability: int) -> Device:
    """A device of a compute capability that is not here, to compile for."""
    return Device(capability, SHARED_KIB[capability] * 1024, 4)
