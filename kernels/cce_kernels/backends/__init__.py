"""Chooses the backend, which computes the loss, by device.

    device                                    backend
    CPU                                       in_torch.py, or with_triton.py under TRITON_INTERPRET=1
    NVIDIA, compute capability 8.0 and up     with_triton.py
    older NVIDIA, AMD (ROCm), Intel (XPU)     in_torch.py, with one warning for each device
    every other device (MPS, ...)             none: an error

Tensors without memory (on "meta", or fake) get shapes only.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from ..runtime.devices import REHEARSAL, properties
from ..runtime.interpreter import INTERPRETED
from . import in_torch

SERVED = ("cpu", "cuda", "xpu", "meta")  # device types; AMD GPUs have torch's type "cuda", too
LEAST_CAPABILITY = 80  # bf16 on the tensor cores


def refuse_device(e: Tensor) -> None:
    """Raise a ValueError if the loss does not run on e's device."""
    if e.device.type not in SERVED:
        raise ValueError(
            f"e: is on {e.device}; cce_kernels runs on CPU, NVIDIA, AMD (ROCm) and Intel (XPU) devices. Move e, c and "
            "targets to the CPU, or use torch.nn.functional.cross_entropy"
        )


def backend_of(x: Tensor) -> ModuleType:
    """The backend of x's device: a module with target_columns, find_targets, prepare, plan, forward, backward,
    reduce_loss, mean_gradient and row_coefficients.

    with_triton.py also has settle, three_products, select and gather, for plans that only it makes, and the modules
    program, which repeats passes, and ahead, which compiles; in_torch.py has None for them.
    """
    return _backend_on(REHEARSAL.device or x.device)


def refuse_given_back(**inputs: Tensor | None) -> None:
    """Raise a RuntimeError in a backward pass if inputs e, c, bias or main_grad_c have lost their memory."""
    for name, x in inputs.items():
        if x is not None and (x.dim() != (1 if name == "bias" else 2) or not x.untyped_storage().nbytes()):
            raise RuntimeError(
                f"{name}: its memory was given back between the forward and the backward pass; keep it until then "
                "(under ZeRO-3 or FSDP gather it for both passes)"
            )


def restored(name: str, x: Tensor, copy: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The operand that the forward pass has prepared from the input x: its copy, or x itself if there is none (None).

    Hooks of saved tensors, such as those that offload activations, may return it with other strides. Then it is
    prepared again.
    """
    if copy is None:
        refuse_given_back(**{name: x})
    return backend_of(x).prepare(x if copy is None else copy, dtype)


@lru_cache
def _backend_on(device: torch.device) -> ModuleType:
    reason = None if INTERPRETED else without_kernels(device)
    if reason is None:
        from . import with_triton  # imported late: a machine without a GPU may lack Triton

        return with_triton
    if device.type not in ("cpu", "meta"):
        warnings.warn(
            f"cce_kernels: no kernels run on {device} ({reason}). Blockwise torch computes the loss instead: as "
            "accurate and in as little memory, but several times slower",
            stacklevel=2,
        )
    return in_torch


def without_kernels(device: torch.device) -> str | None:
    """The reason why the Triton kernels do not run on a device; None if they do."""
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
