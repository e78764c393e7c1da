"""What a process settles before it builds anything: device, precision, seeds, determinism, memory budget."""

import os
import random

import numpy as np
import torch

from linrnn.config.schema import Config
from linrnn.core.errors import ConfigError, UnsupportedError
from linrnn.core.machine import GIB
from linrnn.models import tuning


def device_name(device: torch.device) -> str:
    """The GPU's name, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def synchronize(device: torch.device) -> None:
    """Wait for the GPU, which raises the error of an operation that has failed there."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def resolve_device(name: str) -> torch.device:
    """The device of this name. `auto` is the GPU if there is one, else the CPU.

    Raises:
        UnsupportedError: `cuda` was asked for, and PyTorch sees no GPU.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU-only build"
        raise UnsupportedError(
            f"device=cuda: PyTorch {torch.__version__} ({build}) sees no GPU",
            "use device=cpu, or install a CUDA build of PyTorch and check nvidia-smi",
        )
    return torch.device("cuda", torch.cuda.current_device())


def a_gpu() -> str:
    """For remedies: how a run that is on the CPU gets a GPU."""
    return "device=cuda" if torch.cuda.is_available() else "a machine with a GPU"


def resolve_precision(name: str, device: torch.device) -> str:
    """`auto` is `bf16_autocast` on a GPU and `fp32` on the CPU."""
    if name == "auto":
        return "bf16_autocast" if device.type == "cuda" else "fp32"
    return name


def prepare_process(config: Config, device: torch.device) -> None:
    """Seed every generator; set determinism, the kernels' choices, Triton's cache and the memory budget.

    Raises:
        ConfigError: there is a memory budget but no GPU, or the budget exceeds the GPU's memory.
    """
    random.seed(config.seed)
    np.random.seed(config.seed % 2**32)
    torch.manual_seed(config.seed)
    if config.trainer.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if config.trainer.deterministic != torch.are_deterministic_algorithms_enabled():  # it imports torch's compiler
        torch.use_deterministic_algorithms(config.trainer.deterministic)
    tuning.use(config.trainer.kernel_choices)
    if device.type == "cuda":
        from triton import knobs

        # Inductor sets TRITON_CACHE_DIR to its own directory when it builds its first kernel, with a compiled loss
        # after the model's forward pass. FLA would then tune its backward kernels anew, for minutes.
        os.environ.setdefault("TRITON_CACHE_DIR", knobs.cache.dir)
    if (budget := check_memory_budget(config.memory_budget_gib, device)) is not None:
        torch.cuda.set_per_process_memory_fraction(budget, device)


def check_memory_budget(gib: float | None, device: torch.device) -> float | None:
    """The budget as a share of the GPU's memory; None for no budget.

    Raises:
        ConfigError: there is a memory budget but no GPU, or the budget exceeds the GPU's memory.
    """
    if gib is None:
        return None
    if device.type != "cuda":
        raise ConfigError("memory_budget_gib needs a GPU", f"use memory_budget_gib=null, or {a_gpu()}")
    total = torch.cuda.get_device_properties(device).total_memory / GIB
    if not 0 < gib <= total:
        cause = f"memory_budget_gib={gib} is not within the GPU's {total:.0f} GiB"
        raise ConfigError(cause, f"use a value above 0 and up to {total:.0f}")
    return gib / total
