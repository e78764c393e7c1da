"""Launches that find their compiled kernel by a short key, with less time on the host.

For each `kernel[grid](...)` Triton binds the arguments, works out what each one specialises the kernel for, and looks
up the result; kernels of a small problem take no longer than that. `quick` keeps the compiled kernel under a key of
all that Triton compiles for, and launches that.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
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
        self._specialised = [not p.do_not_specialize for p in params[: self._constants]]
        self._compiled: dict[tuple, CompiledKernel] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        key = (
            driver.active.get_current_device(), args[self._constants :], *options.items(),
            *map(_compiled_for, args, self._specialised),
        )  # fmt: skip
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[(*grid, 1, 1)](*args, *(options[name] for name in self._names[len(args) :]))
            return
        compiled = self.kernel[grid](*args, **options)
        if isinstance(compiled, CompiledKernel):
            self._compiled[key] = compiled


def quick(kernel: Any) -> Any:
    """The kernel with quick launches; in the interpreter, which compiles nothing, the kernel itself."""
    return kernel if INTERPRETED else Quick(kernel)


def _compiled_for(x: Any, specialised: bool) -> Any:
    """What of an argument Triton compiles for: of a tensor its dtype and whether it is 16-byte aligned, of an integer
    its width and, unless the kernel is not to be specialised on it, whether it is 1 or a multiple of 16."""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if type(x) is int:
        return -(2**31) <= x < 2**31, specialised and (x == 1, x % 16 == 0)
    if x is None or type(x) is float:
        return type(x)
    if isinstance(x, TensorDescriptor) or hasattr(x, "block_shape"):  # Triton's, Gluon's
        return x.base.dtype, *x.block_shape, getattr(x, "layout", None)
    raise TypeError(f"an argument of type {type(x).__name__} is not one that launches are known by")
