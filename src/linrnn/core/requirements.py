"""What losses, loggers and sweeps need from the machine. Each `require_*` raises UnsupportedError with a remedy."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linrnn.core.errors import UnsupportedError

if TYPE_CHECKING:
    import torch


def require_cuda(device: torch.device, what: str, alternative: str) -> None:
    """Require a GPU for `what` (the start of a sentence)."""
    if device.type != "cuda":
        raise UnsupportedError(
            f"{what} has Triton kernels only, which need an NVIDIA GPU (device is {device.type})",
            f"run it on a GPU machine, or {alternative}",
        )


def require_package(
    module: str, distribution: str, what: str, install: str, load: Callable[[str], Any] | None = None
) -> None:
    """Require that `module` of `distribution` can be imported, by `load` if given.

    `install` is the requirement to give to pip.
    """
    try:
        (load or importlib.import_module)(module)
    except ImportError as error:
        installed = version_of(distribution)
        broken = f"{module} of {distribution} {installed} does not import ({error})"
        state = broken if installed else f"{distribution} is not installed"
        raise UnsupportedError(f"{what}: {state}", f'{how_to_install(distribution)} "{install}"') from error


def how_to_install(distribution: str) -> str:
    """The command for a distribution that does not import. To install one that is there would change nothing."""
    return "pip install --force-reinstall" if version_of(distribution) else "pip install"


def require_torch_compile(device: torch.device, what: str) -> None:
    """Require what torch.compile needs. GPU: Triton and a C compiler. CPU: a C++ compiler and Python's headers."""
    if device.type == "cuda":
        require_triton(what)
    elif cxx_compiler() is None:
        raise UnsupportedError(
            f"{what} uses torch.compile, which needs a C++ compiler on CPU; there is none on the PATH",
            "install g++ (apt install g++), set CXX to a compiler, or choose loss=standard",
        )
    elif not has_python_headers():
        raise UnsupportedError(
            f"{what} uses torch.compile, which needs Python.h; {sysconfig.get_path('include')} lacks it",
            "install Python's headers (apt install python3-dev), or choose loss=standard",
        )


def require_triton(what: str) -> None:
    """Require Triton, and the C compiler with which it builds its launchers."""
    require_package("triton", "triton", what, "triton>=3.6,<3.8")
    if c_compiler() is None:
        raise UnsupportedError(
            f"{what} runs Triton kernels, whose launchers need a C compiler; there is none on the PATH",
            "install gcc (apt install gcc) or set CC to a compiler",
        )


def c_compiler() -> str | None:
    """Path of the C compiler that Triton would use, or None."""
    return _first_found(os.environ.get("CC"), "gcc", "clang")


def cxx_compiler() -> str | None:
    """Path of the C++ compiler that torch.compile would use on CPU, or None."""
    return _first_found(os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++"))


def has_python_headers() -> bool:
    """Whether C code can be built against this interpreter."""
    return Path(sysconfig.get_path("include"), "Python.h").is_file()


def version_of(distribution: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _first_found(*commands: str | None) -> str | None:
    return next(filter(None, map(shutil.which, filter(None, commands))), None)
