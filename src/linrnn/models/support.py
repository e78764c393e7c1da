"""Before anything is built, reject a model that cannot run on this machine, with cause and remedy."""

import importlib.metadata
import importlib.util
import traceback

import torch
from packaging.version import Version

from linrnn.config.schema import FlaModelConfig, ModelConfig
from linrnn.core.errors import ConfigError, UnsupportedError, accessed_illegally
from linrnn.models import cpu_ops
from linrnn.models.architecture import MODELS
from linrnn.models.facts import facts_of

FLA_VERSION = "0.6.0"
HOPPER = 9  # major compute capability
# What FLA raises where it does not take a GPU, a version or dimensions.
FLA_REFUSES = (ImportError, AssertionError, NotImplementedError, ValueError, TypeError, RuntimeError)


def check_supported(model: ModelConfig, device: torch.device) -> None:
    """Raise if a model cannot train on `device` with the installed versions.

    Raises:
        ConfigError, UnsupportedError: as for :func:`check_installed` and :func:`check_device`.
    """
    check_installed(model)
    check_device(model, device)


def check_installed(model: ModelConfig) -> None:
    """Raise if a model cannot be built with the installed versions, on any device.

    Raises:
        ConfigError: the model is unknown, or its kernel does not take this chunk size.
        UnsupportedError: FLA is missing or of another version.
    """
    if not isinstance(model, FlaModelConfig) and facts_of(model.name).mixer is None:
        raise ConfigError(f"model.name={model.name}: there is no such model", f"use one of {', '.join(MODELS)}")
    _check_chunk_size(model)
    try:
        there = f"{importlib.metadata.version('flash-linear-attention')} is installed"
    except importlib.metadata.PackageNotFoundError:
        there = "is not installed"
    if there != f"{FLA_VERSION} is installed":
        raise UnsupportedError(
            f"model={model.name}: flash-linear-attention {there}; linrnn calls into {FLA_VERSION}",
            f"pip install flash-linear-attention=={FLA_VERSION}",
        )


def check_device(model: ModelConfig, device: torch.device) -> None:
    """Raise if a model cannot train on `device`.

    Raises:
        UnsupportedError: the device does not exist, the model has no CPU form, or Triton has known wrong results.
    """
    kind = model.config if isinstance(model, FlaModelConfig) else model.name
    if device.type == "cuda":
        _check_cuda(kind)
    elif device.type == "cpu":
        cpu_ops.check_model(kind)
    else:
        raise UnsupportedError(f"device {device.type} is not supported", "use device=cpu or device=cuda")


def _check_chunk_size(model: ModelConfig) -> None:
    if model.chunk_size is None:
        return
    if (chunks := facts_of(model.name).chunks) is None:
        raise ConfigError(
            f"model.chunk_size={model.chunk_size}: {model.label} has no chunks whose size can be set",
            "use model.chunk_size=null",
        )
    if model.chunk_size not in chunks.sizes:
        raise ConfigError(
            f"model.chunk_size={model.chunk_size} is not one that FLA's {model.name} kernel takes",
            f"use model.chunk_size={' or '.join(map(str, chunks.sizes))}, or null for its default",
        )


def explain_refusal(error: BaseException, model: ModelConfig) -> UnsupportedError | None:
    """The error to show when a model's kernels refuse this GPU or these dimensions; None for any other error.

    FLA and Triton find out in the first step: a package is missing, a Triton version is wrong, heads are too narrow.
    """
    kind = type(error).__name__  # Triton's errors are compared by name: not every machine can import Triton
    if kind == "OutOfResources":
        chunk = f"model.chunk_size={model.chunk_size}" if model.chunk_size else "its chunk size"
        remedy = "use a smaller model.chunk_size, or null" if model.chunk_size else "use a size with smaller heads"
        return UnsupportedError(
            f"a kernel of {model.name} with {chunk} needs more than this GPU has ({str(error).split('. ')[0]})", remedy
        )
    refused = kind == "CompilationError" or isinstance(error, FLA_REFUSES)
    if isinstance(model, FlaModelConfig) and refused and _comes_from_fla(error):
        lines = str(error).strip().splitlines() or [kind]
        reason = lines[-1] if kind == "CompilationError" else lines[0]  # the compiler quotes the source first
        if "active drivers" in reason:  # Triton's words for a machine without a GPU
            return UnsupportedError(
                f"model.config={model.config}: with these options FLA needs a Triton kernel, and there is no GPU here",
                "run it on a GPU, or leave the model.options out that ask for this kernel",
            )
        return UnsupportedError(
            f"model.config={model.config}: FLA cannot train it here ({reason})",
            "install what the reason names, set FLA's fields with model.options.KEY=VALUE, or use another model",
        )
    return None


def _comes_from_fla(error: BaseException) -> bool:
    """Whether FLA's code raised the error, itself or through Triton.

    An illegal access to memory says nothing about where it comes from: CUDA reports it at a later call.
    """
    if accessed_illegally(error):
        return False
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    between = ("triton.", "linrnn.models.tuning.")  # what compiles and tunes FLA's kernels
    return next((name for name in reversed(modules) if not name.startswith(between)), "").startswith("fla.")


def _check_cuda(kind: str) -> None:
    if not torch.cuda.is_available():
        raise UnsupportedError(
            f"PyTorch {torch.__version__} sees no GPU", "use device=cpu, or install a CUDA build of PyTorch"
        )
    if importlib.util.find_spec("triton") is None:
        raise UnsupportedError(f"{kind} needs Triton on a GPU", "pip install 'triton>=3.7.1,<3.8'")
    triton = Version(importlib.metadata.version("triton"))
    wrong = kind == "gated_deltanet" and Version("3.4.0") <= triton < Version("3.7.1")
    if wrong and torch.cuda.get_device_capability()[0] == HOPPER:
        raise UnsupportedError(
            f"Gated DeltaNet's backward pass is wrong on Hopper GPUs with Triton {triton} (FLA's issue 640)",
            "pip install 'triton>=3.7.1,<3.8', or use model=kda or model=gla",
        )
