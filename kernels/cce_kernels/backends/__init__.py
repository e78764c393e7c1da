"""Which devices the loss runs on, and by which implementation.

    CPU                                       torch (in_torch.py), or the kernels under TRITON_INTERPRET=1
    NVIDIA of compute capability 8.0 and up   the Triton kernels (with_triton.py)
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

import torch
from torch import Tensor

from ..runtime.devices import properties
from ..runtime.interpreter import INTERPRETED
from . import in_torch

SERVED = ("cpu", "cuda", "xpu", "meta")  # types of device; torch calls AMD's "cuda" as well
LEAST_CAPABILITY = 80  # bf16 on the tensor cores


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
    row_coefficients, mean_logits, filter_figures (and, if planned, three_products, select and gather)."""
    return _backend_on(x.device)


@lru_cache
def _backend_on(device: torch.device) -> ModuleType:
    reason = None if INTERPRETED else without_kernels(device)
    if reason is None:
        from . import with_triton  # needs Triton, which a machine without a GPU may lack

        return with_triton
    if device.type not in ("cpu", "meta"):
        warnings.warn(
            f"cce_kernels: no kernels run on {device} ({reason}); the loss is computed in torch, a block of the "
            "vocabulary at a time: as accurate and in as little memory, but several times slower",
            stacklevel=2,
        )
    return in_torch


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
