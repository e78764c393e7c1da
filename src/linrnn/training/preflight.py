"""Whether what is foreseen fits into what is there: asked before anything is built.

On a CPU a process that takes too much memory is killed without a word, and others with it: what cannot fit is refused.
The formulas describe GPU kernels and the CPU's take more, so that the figures are the least that a step needs. A GPU
answers for itself, and an out-of-memory error loses nothing: refused is only what no step could hold.
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
    """Refuse a training step that cannot fit; otherwise a line for the user where it probably will not, or None.

    On a CPU the processes of a run on one machine (torchrun's LOCAL_WORLD_SIZE) share its memory.

    Raises:
        UnsupportedError: on a CPU, the least that a step needs is more than this machine has free now.
        OutOfMemoryError: parameters, gradients and optimizer state alone are more than the GPU, or
            `memory_budget_gib`, has.
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
    """Refuse on a CPU what needs more bytes than are free.

    Args:
        what: a sentence with the figure that is foreseen.
        remedy: what to use instead.

    Raises:
        UnsupportedError: this machine has less.
    """
    there = available_memory()
    if there is not None and needed > there:
        raise UnsupportedError(
            f"{what}, and {there / GIB:.1f} GiB of memory are free here",
            f"use {remedy}; or free memory, or use a GPU or a larger machine",
        )


def check_reading_fits(arch: Architecture, device: torch.device, loss_bytes: int = 0) -> None:
    """Refuse on a CPU a model whose fp32 weights cannot be held to read with it (evaluation, generation, sparsity).

    Args:
        loss_bytes: what the loss holds beside them.

    Raises:
        UnsupportedError: they need more than this machine has free.
    """
    if device.type == "cpu":
        needed = FP32 * arch.n_parameters + loss_bytes
        what = f"{arch.n_parameters:,} parameters{' and the loss' if loss_bytes else ''} need {needed / GIB:.1f} GiB"
        check_memory(needed, what, f"a smaller {'batch_size, loss=cce_kahan, or ' if loss_bytes else ''}model")
