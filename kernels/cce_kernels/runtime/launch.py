"""Launches that find their compiled kernel by a short key, with less time on the host.

For each `kernel[grid](...)` Triton binds the arguments, works out what each one specialises the kernel for, and looks
up the result; kernels of a small problem take no longer than that. `quick` keeps the compiled kernel under a key of
all that Triton compiles for, and hands it to the driver. Triton's launch hooks (profilers set them) are served by
Triton's own launch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from .interpreter import INTERPRETED


class Quick:
    """A kernel of `triton.jit` or Gluon, called like it: `kernel[grid](*arguments, **options)`.

    The arguments stand in the kernel's order, constants (tl.constexpr) last; options are Triton's (num_warps, …), of
    which Gluon's kernels take some as their last arguments.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.__name__, self.__doc__ = kernel.__name__, kernel.__doc__
        params = kernel.params
        self._names = [p.name for p in params]
        self._constants = next((p.num for p in params if p.is_constexpr), len(params))
        assert all(p.is_constexpr for p in params[self._constants :]), f"{kernel.__name__}: constants come last"
        self._readers = [PLAIN if p.do_not_specialize else SPECIALISED for p in params[: self._constants]]
        self._compiled: dict[tuple, CompiledKernel] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        active = driver.active
        device = active.get_current_device()
        key = (
            device, args[self._constants :], *options.items(),
            *[readers[type(x)](x) for readers, x in zip(self._readers, args, strict=False)],  # constants have none
        )  # fmt: skip
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self.kernel[grid](*args, **options)
            if isinstance(compiled, CompiledKernel):
                self._compiled[key] = compiled
            return
        if len(args) < len(self._names):
            args += tuple(options[name] for name in self._names[len(args) :])
        if _hooked():
            compiled[(*grid, 1, 1)](*args)
            return
        x, y, z, *_ = (*grid, 1, 1)
        stream = active.get_current_stream(device)
        compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *args)


def quick(kernel: Any) -> Any:
    """The kernel with quick launches; in the interpreter, which compiles nothing, the kernel itself."""
    return kernel if INTERPRETED else Quick(kernel)


def _hooked() -> bool:
    """Whether somebody wants to hear of launches."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))  # a chain, a function, or None


def _fits_32_bits(x: int) -> bool:
    return -(2**31) <= x < 2**31


def _specialised(x: int) -> tuple[bool, bool, bool]:
    return -(2**31) <= x < 2**31, x == 1, x % 16 == 0


class _Readers(dict[type, Callable[[Any], Any]]):
    """By an argument's type, what of it Triton compiles for: of a tensor its dtype and whether it is 16-byte aligned,
    of an integer its width and, if the kernel is specialised on it, whether it is 1 or a multiple of 16."""

    def __init__(self, specialised: bool) -> None:
        super().__init__({int: _specialised if specialised else _fits_32_bits, float: type, type(None): type})

    def __missing__(self, kind: type) -> Callable[[Any], Any]:
        for known, reader in READERS.items():
            if issubclass(kind, known):
                self[kind] = reader
                return reader
        raise TypeError(f"an argument of type {kind.__name__} is not one that launches are known by")


# Of the types of which an argument may be of a subclass; hopper_kernels.py adds its own descriptors.
READERS: dict[type, Callable[[Any], Any]] = {
    Tensor: lambda x: (x.dtype, x.data_ptr() % 16 == 0),
    TensorDescriptor: lambda x: (x.base.dtype, *x.block_shape),
}
SPECIALISED, PLAIN = _Readers(True), _Readers(False)
