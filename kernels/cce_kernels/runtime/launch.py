"""`quick` wraps a Triton kernel so that a launch takes less time on the host.

At each `kernel[grid](...)` Triton binds the arguments, derives the specialisation of each one, and looks up the
compiled kernel. A small problem's kernels run no longer than that takes. A quick kernel does less, in two ways:

    the launch repeats an earlier one, addresses included    the driver gets what it got then (`opened`)
    any other launch                                         the compiled kernel is looked up by a short key of
                                                             everything that Triton specialises on

If launch hooks are set (profilers set them), Triton's own launch runs, which calls them. A tape (program.py) hears of
every launch of its thread.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Sequence
from copy import copy
from functools import cache, partial
from typing import Any, NamedTuple

import triton
from torch import Tensor
from torch.nn import Parameter
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from .devices import REHEARSAL
from .interpreter import INTERPRETED

try:
    from triton.backends.nvidia.driver import CudaLauncher, make_tensordesc_arg
except ImportError:  # every launch then goes through Triton's launcher: slower, with the same results
    CudaLauncher = make_tensordesc_arg = None

TRITONS = ("3.6.", "3.7.")  # versions with which `opened` and Hopper's own kernels have run on GPUs
MOST_REPEATED = 256  # launches of a kernel that are kept for repetition; each takes about 1 KiB


class _Recording(threading.local):
    tape: Any = None  # hears of launches by its method `add`


RECORDING = _Recording()  # the tape of this thread


class Quick:
    """A kernel of `triton.jit` or Gluon, called in the same way: `kernel[grid](*arguments, **options)`.

    Arguments are positional, in the kernel's order, constants (tl.constexpr) last. Options are Triton's, num_warps for
    example. A Gluon kernel may list some of these options as its last parameters.
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
        self._repeated: dict[tuple, Call] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        if REHEARSAL.launch is not None:
            REHEARSAL.launch(self.kernel, grid, args, options)
            return
        tape, active, hooked = RECORDING.tape, driver.active, _hooked()
        device = active.get_current_device()
        exact = _exact([device, grid, *options.items()], args)
        call = self._repeated.get(exact)
        if call is not None and tape is None and not hooked:
            call.launch(*call.grid, active.get_current_stream(device), *call.rest)
            return
        compiled = self._find(device, grid, args, options)
        if compiled is None:
            if tape is not None:
                tape.add(None)
            return
        if len(args) < len(self._names):
            args += tuple(options[name] for name in self._names[len(args) :])
        x, y, z, *_ = (*grid, 1, 1)
        launch = None if hooked else opened(compiled, (x, y, z), args)
        if tape is not None:
            tape.add(launch)
        if hooked:
            compiled[(x, y, z)](*args)
            return
        stream = active.get_current_stream(device)
        if launch is None:
            compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *args)
            return
        call = launch[0].at([tensor.data_ptr() for tensor in launch[1]])
        call.launch(x, y, z, stream, *call.rest)
        if len(self._repeated) >= MOST_REPEATED:
            self._repeated.clear()
        self._repeated[exact] = call

    def _find(self, device: int, grid: tuple[int, ...], args: tuple, options: dict[str, Any]) -> CompiledKernel | None:
        """The compiled kernel for these arguments. The first time Triton compiles and launches it, and this is None."""
        key = (
            device, args[self._constants :], *options.items(),
            *[readers[type(x)](x) for readers, x in zip(self._readers, args, strict=False)],  # not the constants
        )  # fmt: skip
        known = self._compiled.get(key)
        if known is None:
            compiled = self.kernel[grid](*args, **options)
            if isinstance(compiled, CompiledKernel):
                self._compiled[key] = compiled
        return known


def quick(kernel: Any) -> Any:
    """The kernel with quick launches; in the interpreter, which compiles nothing, the kernel itself."""
    return kernel if INTERPRETED else Quick(kernel)


def _hooked() -> bool:
    """Whether a launch hook of Triton's is set."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))  # a hook chain, a function or None


def watched() -> bool:
    """Whether every launch has to go through Triton, because of hooks or a rehearsal."""
    return _hooked() or REHEARSAL.device is not None


def _exact(key: list[Any], args: tuple) -> tuple:
    """The parts of `key`, and everything that a launch reads of its arguments."""
    for x in args:
        kind = type(x)
        if kind in _NUMBERS:
            key.append(x)
        elif kind in _TENSORS:
            key += (x.data_ptr(), x.dtype)
        elif kind in EXACT:
            key.append(x.exact)
        else:
            key.append(_described(x))
    return tuple(key)


def _described(x: Any) -> Any:
    """What a launch reads of an argument that is neither a number nor a plain tensor: mostly a TMA descriptor."""
    if isinstance(x, Tensor):
        return x.data_ptr(), x.dtype
    known = next((kind for kind in READERS if isinstance(x, kind)), None)
    if known is None:  # a constant
        return x
    extra = [getattr(x, name, None) for name in ("padding", "layout", "round_f32_to_tf32")]
    return x.base.data_ptr(), x.base.dtype, *x.shape, *x.strides, *x.block_shape, *extra


_NUMBERS = {int, float, bool, type(None)}
_TENSORS = {Tensor, Parameter}
EXACT: set[type] = set()  # types of arguments that name all that a launch reads of them, in a tuple `exact`


def _fits_32_bits(x: int) -> bool:
    return -(2**31) <= x < 2**31


def _specialised(x: int) -> tuple[bool, bool, bool]:
    return -(2**31) <= x < 2**31, x == 1, x % 16 == 0


class _Readers(dict[type, Callable[[Any], Any]]):
    """Functions from an argument to the part of it that Triton specialises on, by the argument's type.

    For a tensor: the dtype, and whether the pointer is 16-byte aligned. For an integer: whether it fits 32 bits. An
    integer that the kernel is specialised on adds whether it is 1, and whether it is a multiple of 16.
    """

    def __init__(self, specialised: bool) -> None:
        super().__init__({int: _specialised if specialised else _fits_32_bits, float: type, type(None): type})

    def __missing__(self, kind: type) -> Callable[[Any], Any]:
        for known, reader in READERS.items():
            if issubclass(kind, known):
                self[kind] = reader
                return reader
        raise TypeError(f"cce_kernels: a kernel got an argument of type {kind.__name__}; add a reader to READERS")


# These types also serve their subclasses. hopper_kernels.py adds Gluon's descriptors.
READERS: dict[type, Callable[[Any], Any]] = {
    Tensor: lambda x: (x.dtype, x.data_ptr() % 16 == 0),
    TensorDescriptor: lambda x: (x.base.dtype, *x.block_shape),
}
SPECIALISED, PLAIN = _Readers(True), _Readers(False)


# --------------------------------------------------------------------------------------------------- repeated launches
class Call(NamedTuple):
    """A launch without its stream: `launch(*grid, stream, *rest)`. It holds addresses, but keeps no tensor alive."""

    launch: Callable[..., None]
    grid: tuple[int, int, int]
    rest: tuple


class Open(NamedTuple):
    """A launch whose addresses are open. `spots` says where each one goes: (index among the values, descriptor, meta).

    A descriptor without a tensor, and what encodes it, stand beside the address of a TMA descriptor; else None.
    """

    launch: Callable[..., None]
    grid: tuple[int, int, int]
    head: tuple
    nested: bool  # whether the driver takes the values as one list
    values: tuple
    spots: tuple[tuple[int, Any, Any], ...]

    def at(self, addresses: Sequence[int]) -> Call:
        """The launch with these addresses, one for each spot."""
        values = list(self.values)
        for (index, described, meta), address in zip(self.spots, addresses, strict=True):
            if described is None:
                values[index] = address
            else:  # the sizes that follow the encoded descriptor do not depend on the address
                there = copy(described)  # another thread may launch the same program
                there.base = _Address(address)
                values[index] = make_tensordesc_arg(there, meta)[0]
        return Call(self.launch, self.grid, (*self.head, values) if self.nested else (*self.head, *values))


class _Address(int):
    """An address in place of a descriptor's tensor."""

    def data_ptr(self) -> int:
        return self


def known_version() -> bool:
    """Whether the installed Triton is one of TRITONS. If not, this warns once: the caller takes a slower way."""
    known = triton.__version__.startswith(TRITONS)
    if not known:
        _warn_once(triton.__version__)
    return known


@cache
def _warn_once(version: str) -> None:
    warnings.warn(
        f"cce_kernels: Triton {version} has not run on a GPU with these kernels. Plain Triton kernels and launches "
        "compute the same loss, somewhat slower; the fast way needs Triton 3.6 or 3.7",
        stacklevel=3,
    )


@cache
def _inside(launch: Callable[..., None]) -> tuple[Callable[..., None], set[int], list[Any]] | None:
    """The driver's launch, the places of descriptors among a kernel's arguments, and what encodes them.

    None if they are not where `opened` looks for them.
    """
    if not inspect.isfunction(launch):  # the driver's launch itself: the kernel has no descriptors
        return launch, set(), []
    inside = inspect.getclosurevars(launch).nonlocals  # Triton's loop over descriptors, around the driver's launch
    if not {"launcher", "tensordesc_indices", "tensordesc_meta"} <= inside.keys():
        return None
    return inside["launcher"], inside["tensordesc_indices"], inside["tensordesc_meta"]


def opened(compiled: Any, grid: tuple[int, int, int], args: tuple) -> tuple[Open, list[Tensor]] | None:
    """The launch of a compiled kernel with these arguments, and the tensors whose addresses go to its spots.

    At each launch Triton encodes every TMA descriptor anew, and asks CUDA about every pointer. That takes 10 to 30 µs
    for each descriptor. But a training step mostly repeats the launches of the step before, with the same addresses,
    because torch's allocator hands out the same memory. So a launch is expanded once, into numbers that stay right as
    long as sizes and dtypes are the same; `Open.at` adds the addresses.

    None where only Triton's launcher serves it. The launch stays right as long as the shapes, strides and dtypes of all
    arguments are the same, and the 16-byte alignment of the addresses.
    """
    run = compiled.run
    if CudaLauncher is None or type(run) is not CudaLauncher or not known_version():
        return None
    if run.global_scratch_size or run.profile_scratch_size:  # Triton allocates this memory anew for every launch
        return None
    inside = _inside(run.launch)
    if inside is None:
        return None
    launch, described, metas = inside[0], inside[1], iter(inside[2])
    values: list[Any] = []
    spots: list[tuple[int, Any, Any]] = []
    tensors: list[Tensor] = []
    for place, x in enumerate(args):
        if place in described:
            meta = next(metas)
            if meta is None:  # the kernel takes pointers instead of descriptors
                return None
            without = copy(x)
            without.base = None
            spots.append((len(values), without, meta))
            tensors.append(x.base)
            values += (None, *x.shape, *x.strides)
        elif isinstance(x, Tensor):
            if not x.is_cuda:  # Triton's launcher says what is wrong
                return None
            spots.append((len(values), None, None))
            tensors.append(x)
            values.append(None)
        else:
            values.append(x)
    first = (compiled.function, run.launch_cooperative_grid, run.launch_pdl)
    nothing = None, None, None  # launch metadata and two hooks
    nested = hasattr(run, "arg_annotations")  # 3.7
    head: tuple
    if nested:
        scratch = None, None
        head = (*first, compiled.packed_metadata, *nothing, *scratch, run.arg_annotations, run.kernel_signature)
    else:
        head = (*first, None, None, compiled.packed_metadata, *nothing)
    return Open(launch, grid, head, nested, tuple(values), tuple(spots)), tensors
