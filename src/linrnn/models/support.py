"""Before anything is built, reject a model that cannot run on this machine, with cause and remedy."""

import importlib.metadata
import importlib.util

import torch
from packaging.version import Version

from linrnn.config.schema import ModelConfig
from linrnn.core.errors import ConfigError, UnsupportedError
from linrnn.models import cpu_ops
from linrnn.models.architecture import MODELS
from linrnn.models.chunk_size import KERNELS

FLA_VERSION = "0.6.0"
# From the first to below the second version of Triton, scalar-gated delta rules have a wrong backward pass on Hopper.
# FLA 0.6.0 refuses it there (its issue 640).
WRONG_ON_HOPPER = (Version("3.4.0"), Version("3.7.1"))


def check_supported(model: ModelConfig, device: torch.device) -> None:
    """Raise if a model cannot train on `device` with the installed versions.

    Raises:
        ConfigError: the model is unknown, or its kernel does not take this chunk size.
        UnsupportedError: FLA is missing or of another version, the device does not exist, the model has no CPU form, or
            Triton has known wrong results.
    """
    if model.name not in MODELS:
        raise ConfigError(f"model.name={model.name}: there is no such model", f"use one of {', '.join(MODELS)}")
    _check_chunk_size(model)
    try:
        installed = importlib.metadata.version("flash-linear-attention")
    except importlib.metadata.PackageNotFoundError:
        raise UnsupportedError(
            f"model={model.name} is built from flash-linear-attention, which is not installed",
            f"pip install flash-linear-attention=={FLA_VERSION}",
        ) from None
    if installed != FLA_VERSION:
        raise UnsupportedError(
            f"flash-linear-attention {installed} is installed; linrnn calls into {FLA_VERSION}",
            f"pip install flash-linear-attention=={FLA_VERSION}",
        )
    if device.type == "cuda":
        _check_cuda(model)
    elif device.type == "cpu":
        cpu_ops.check_model(model.name)
    else:
        raise UnsupportedError(f"device {device.type} is not supported", "use device=cpu or device=cuda")


def _check_chunk_size(model: ModelConfig) -> None:
    if model.chunk_size is None:
        return
    if model.name not in KERNELS:
        raise ConfigError(
            f"model.chunk_size={model.chunk_size}: {model.name} has no chunks whose size can be set",
            "use model.chunk_size=null",
        )
    sizes = KERNELS[model.name][2]
    if model.chunk_size not in sizes:
        raise ConfigError(
            f"model.chunk_size={model.chunk_size} is not one that FLA's {model.name} kernel takes",
            f"use model.chunk_size={' or '.join(map(str, sizes))}, or null for its default",
        )


def explain_resources(error: BaseException, model: ModelConfig) -> UnsupportedError | None:
    """The error to show when a Triton kernel needs more shared memory than the GPU has; None for any other error."""
    if type(error).__name__ != "OutOfResources":  # compared by name: not every machine can import Triton
        return None
    chunk = f"model.chunk_size={model.chunk_size}" if model.chunk_size else "its chunk size"
    remedy = "use a smaller model.chunk_size, or null" if model.chunk_size else "use a size with smaller heads"
    return UnsupportedError(
        f"a kernel of {model.name} with {chunk} needs more than this GPU has ({str(error).split('. ')[0]})", remedy
    )


def _check_cuda(model: ModelConfig) -> None:
    if not torch.cuda.is_available():
        raise UnsupportedError(
            f"PyTorch {torch.__version__} sees no GPU", "use device=cpu, or install a CUDA build of PyTorch"
        )
    if importlib.util.find_spec("triton") is None:
        raise UnsupportedError(f"model={model.name} needs Triton on a GPU", "pip install 'triton>=3.7.1,<3.8'")
    hopper = torch.cuda.get_device_capability()[0] == 9
    triton = Version(importlib.metadata.version("triton"))
    if model.name == "gated_deltanet" and hopper and WRONG_ON_HOPPER[0] <= triton < WRONG_ON_HOPPER[1]:
        raise UnsupportedError(
            f"Gated DeltaNet's backward pass is wrong on Hopper GPUs with Triton {triton} (FLA's issue 640)",
            "pip install 'triton>=3.7.1,<3.8', or use model=kda or model=gla",
        )
