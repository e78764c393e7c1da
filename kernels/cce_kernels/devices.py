"""Which devices the loss runs on, by which implementation, and what the kernels need to know of them.

    CPU                                       torch (blockwise.py), or the kernels under TRITON_INTERPRET=1
    NVIDIA of compute capability 8.0 and up   the Triton kernels (fused.py)
    older NVIDIA, AMD (ROCm), Intel (XPU)     torch, with one warning for each device
    every other device (MPS, ...)             refused

Tensors without memory (on "meta", or fake) get shapes only.
"""

from __future__ import annotations

import sys
import warnings
from functools import lru_cache
from importlib.util import find_spec
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from . import blockwise
from .interpreter import INTERPRETED

SERVED = ("cpu", "cuda", "xpu", "meta")  # types of device; torch calls AMD's "cuda" as well
LEAST_CAPABILITY = 80  # bf16 on the tensor cores


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


def refuse_device(e: Tensor) -> None:
    """Raise ValueError where e's device is none that the loss runs on."""
    if e.device.type not in SERVED:
        raise ValueError(
            f"e: is on {e.device}; cce_kernels runs on CPU, NVIDIA, AMD (ROCm) and Intel (XPU) devices. Move e, c and "
            "targets to the CPU, or use torch.nn.functional.cross_entropy"
        )


def without_values(x: Tensor) -> bool:
    """Whether x has a shape and no values: it is fake, or on the meta device."""
    if x.is_meta:
        return True
    # Importing the module takes torch's compiler along: 2 s. Before somebody has, there are no fake tensors.
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    return fake is not None and isinstance(x, fake.FakeTensor)


def backend_of(x: Tensor) -> ModuleType:
    """The implementation that runs x: a module with target_columns, find_targets, prepare, plan, forward, backward,
    row_coefficients, mean_logits, filter_figures (and, if planned, stored, entries and gather)."""
    return _backend_on(x.device)


@lru_cache
def _backend_on(device: torch.device) -> ModuleType:
    reason = None if INTERPRETED else without_kernels(device)
    if reason is None:
        from . import fused  # needs Triton, which a machine without a GPU may lack

        return fused
    if device.type not in ("cpu", "meta"):
        warnings.warn(
            f"cce_kernels: no kernels run on {device} ({reason}); the loss is computed in torch, a block of the "
            "vocabulary at a time: as accurate and in as little memory, but several times slower",
            stacklevel=2,
        )
    return blockwise


def without_kernels(device: torch.device) -> str | None:
    """Why the Triton kernels do not run on a device; None if they do."""
    if device.type != "cuda":
        return f"{device.type} is no NVIDIA GPU"
    if torch.version.hip is not None:
        return "they are not tested on AMD GPUs"
    capability = properties(device).capability
    if capability < LEAST_CAPABILITY:
        return f"they need compute capability 8.0, it has {capability // 10}.{capability % 10}"
    if find_spec("triton") is None:
        return "Triton is missing: pip install triton"
    return None


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
