"""Check, before anything is built, that the expected memory is available.

On a CPU the system kills a process that takes too much memory without a message, and other processes with it. What
cannot fit is therefore rejected. The formulas describe GPU kernels; CPU kernels need more, so the figures are lower
bounds. A GPU raises its own out-of-memory error, which loses nothing. There only what no step could hold is rejected.
"""

import os

import torch

from linrnn.core.errors import OutOfMemoryError, UnsupportedError
from linrnn.core.machine import GIB, available_memory
from linrnn.models.architecture import Architecture
from linrnn.training.plan import Plan

FP32 = 4  # bytes
SMALLER = "a smaller size or trainer.batch_size, trainer.activation_checkpointing=full, or loss=cce_kahan"


def check_step_fits(plan: Plan, arch: Architecture) -> str | None:
    """Reject a training step that cannot fit. Return a line for the user if it probably will not fit, else None.

    On a CPU the processes of a run on one machine (torchrun's LOCAL_WORLD_SIZE) share its memory.

    Raises:
        UnsupportedError: on a CPU, a step needs at least more than this machine has free now.
        OutOfMemoryError: parameters, gradients and optimizer state alone exceed the GPU's memory or
            `memory_budget_gib`.
    """
    state, estimate = sum(plan.training_state(arch).values()), plan.memory_estimate(arch)
    parts = f"{state / GIB:.1f} GiB of it parameters, gradients and optimizer state"
    if plan.device.type == "cpu":
        least, processes = max(state, estimate.peak if estimate else 0), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        each = f" in each of {processes} processes" if processes > 1 else ""
        what = f"a training step needs {least / GIB:.1f} GiB or more{each} ({parts})"
        check_memory(processes * state, what, "a smaller size")  # a smaller batch would not help
        check_memory(processes * least, what, SMALLER)
        return None
    total = torch.cuda.get_device_properties(plan.device).total_memory
    budget = plan.config.memory_budget_gib
    there = total if budget is None else min(total, int(budget * GIB))
    name = "this GPU" if budget is None else "memory_budget_gib"
    if state > there:
        raise OutOfMemoryError(
            f"parameters, gradients and optimizer state alone need {state / GIB:.1f} GiB, {name} has {there / GIB:.1f}",
            "use a smaller size, trainer.precision=bf16, or parallel=fsdp on several GPUs",
        )
    if estimate and estimate.peak > there:
        needed = f"a step is foreseen to need {estimate.peak / GIB:.1f} GiB ({parts})"
        return f"{needed}, {name} has {there / GIB:.1f}: it is tried all the same"
    return None


def check_memory(needed: int, what: str, remedy: str) -> None:
    """On a CPU, reject what needs more bytes than are free.

    Args:
        what: a sentence with the expected figure.
        remedy: what to use instead.

    Raises:
        UnsupportedError: this machine has fewer bytes free.
    """
    there = available_memory()
    if there is not None and needed > there:
        raise UnsupportedError(
            f"{what}, and {there / GIB:.1f} GiB of memory are free here",
            f"use {remedy}; or free memory, or use a GPU or a larger machine",
        )


def check_reading_fits(arch: Architecture, device: torch.device, loss_bytes: int = 0) -> None:
    """On a CPU, reject a model whose fp32 weights do not fit (for evaluation, generation, sparsity).

    Args:
        loss_bytes: bytes that the loss holds in addition.

    Raises:
        UnsupportedError: weights and loss need more than this machine has free.
    """
    if device.type == "cpu":
        needed = FP32 * arch.n_parameters + loss_bytes
        what = f"{arch.n_parameters:,} parameters{' and the loss' if loss_bytes else ''} need {needed / GIB:.1f} GiB"
        check_memory(needed, what, f"a smaller {'batch_size, loss=cce_kahan, or ' if loss_bytes else ''}model")
