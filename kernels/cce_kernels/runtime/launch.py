"""`quick` wraps a Triton kernel so that a launch takes less time on the host.

At each `kernel[grid](...)` Triton binds the arguments, derives the specialisation of each one, and looks up the
compiled kernel. A small problem's kernels run no longer than that takes. A quick kernel does less, in three ways:

    the launch repeats an earlier one, addresses included    the driver gets what it got then
    it repeats one with other addresses                      they are put into their places (`Open`)
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
from functools import cache, partial
from typing import Any, NamedTuple

import triton
from torch import Tensor
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
MOST_REPEATED = 256  # launches of a kernel that are kept for repetition, with and without addresses; about 1 KiB each
_NUMBERS = {int, float, bool, type(None)}


class _Recording(threading.local):
    tape: Any = None  # hears of launches by its method `add`


RECORDING = _Recording()  # the tape of this thread


class Described:
    """A TMA descriptor without Triton's checks, which take most of the time to make one. The tensor is known to fit.

    kind: all that a compiled kernel depends on. form: all that a launch reads but the address.
    """

    def describe(self, x: Tensor, rows: int, cols: int) -> None:
        """Describe x for blocks of rows × cols. A block reads zeros beyond x, and writes nothing there."""
        self.base, self.shape, self.strides, self.block_shape = x, x.shape, x.stride(), [rows, cols]
        self.kind = x.dtype, rows, cols
        self.form = self.shape, self.strides, self.kind

    def at(self, address: int) -> Described:
        """The descriptor of the same form at an address. It keeps no tensor."""
        there = object.__new__(type(self))
        there.__dict__.update(self.__dict__, base=_Address(address))
        return there


class _Address(int):
    """An address in place of a descriptor's tensor."""

    def data_ptr(self) -> int:
        return self


class Descriptor(Described, TensorDescriptor):
    __init__ = Described.describe  # type: ignore[assignment]


class Quick:
    """A kernel of `triton.jit` or Gluon, called in the same way: `kernel[grid](*arguments, **options)`.

    Arguments are positional, in the kernel's order, constants (tl.constexpr) last. Options are Triton's, num_warps for
    example. A Gluon kernel may list some of these options as its last parameters.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel, params = kernel, kernel.params
        self.__name__, self.__doc__ = kernel.__name__, kernel.__doc__
        self._names = [p.name for p in params]
        self._constants = next((p.num for p in params if p.is_constexpr), len(params))
        assert all(p.is_constexpr for p in params[self._constants :]), f"{kernel.__name__}: constants come last"
        self._plain = [p.do_not_specialize for p in params[: self._constants]]
        self._compiled: dict[tuple, CompiledKernel] = {}
        self._open: dict[tuple, Open] = {}  # by the form of a launch
        self._repeated: dict[tuple, Call] = {}  # by form and addresses

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        if REHEARSAL.launch is not None:
            REHEARSAL.launch(self.kernel, grid, args, options)
            return
        tape, active, hooked = RECORDING.tape, driver.active, _hooked()
        device = active.get_current_device()
        form, addresses = _form([device, grid, *options.items()], args)
        if tape is None and not hooked:
            call = self._repeated.get((form, addresses))
            if call is None and (known := self._open.get(form)) is not None:
                call = known.at(addresses)
                _keep(self._repeated, (form, addresses), call)
            if call is not None:
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
        call = launch[0].at(addresses)
        call.launch(x, y, z, stream, *call.rest)
        _keep(self._open, form, launch[0])
        _keep(self._repeated, (form, addresses), call)

    def _find(self, device: int, grid: tuple[int, ...], args: tuple, options: dict[str, Any]) -> CompiledKernel | None:
        """The compiled kernel for these arguments. The first time Triton compiles and launches it, and this is None."""
        kinds = map(kind_of, args, self._plain)  # without the constants
        key = device, args[self._constants :], *options.items(), *kinds
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


def _form(key: list[Any], args: tuple) -> tuple[tuple, tuple[int, ...]]:
    """`key` and everything that a launch reads of its arguments but addresses; the addresses."""
    addresses: list[int] = []
    for x in args:
        if type(x) in _NUMBERS:
            key.append(x)
        elif isinstance(x, Tensor):
            addresses.append(address := x.data_ptr())
            key += (x.dtype, address % 16 == 0)
        elif isinstance(x, Described):
            addresses.append(x.base.data_ptr())
            key.append(x.form)
        else:
            key.append(x)
    return tuple(key), tuple(addresses)


def _keep(kept: dict[tuple, Any], key: tuple, value: Any) -> None:
    if len(kept) >= MOST_REPEATED:
        kept.clear()
    kept[key] = value


def kind_of(x: Any, plain: bool) -> Any:
    """The part of an argument that Triton specialises on; plain: not on an integer's value, only on its width."""
    if x is None:
        return x
    if type(x) is int:
        narrow = -(2**31) <= x < 2**31
        return narrow if plain else (narrow, x == 1, x % 16 == 0)
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    return x.kind if isinstance(x, Described) else type(x)


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
                values[index] = make_tensordesc_arg(described.at(address), meta)[0]
        return Call(self.launch, self.grid, (*self.head, values) if self.nested else (*self.head, *values))


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
    found: list[Any] = [inside.get(name) for name in ("launcher", "tensordesc_indices", "tensordesc_meta")]
    return None if None in found else (found[0], found[1], found[2])


def opened(compiled: Any, grid: tuple[int, int, int], args: tuple) -> tuple[Open, list[Tensor]] | None:
    """The launch of a compiled kernel with these arguments, and the tensors whose addresses go to its spots.

    At each launch Triton encodes every TMA descriptor anew, and asks CUDA about every pointer. That takes 10 to 30 µs
    for each descriptor. But a training step mostly repeats the launches of the step before, with the same addresses,
    because torch's allocator hands out the same memory. So a launch is expanded once, into numbers that stay right as
    long as shapes, strides, dtypes and the 16-byte alignment of the addresses are the same.

    None where only Triton's launcher serves it.
    """
    run = compiled.run
    if CudaLauncher is None or type(run) is not CudaLauncher or not known_version():
        return None
    inside = _inside(run.launch)
    # Triton allocates scratch memory anew for every launch.
    if inside is None or run.global_scratch_size or run.profile_scratch_size:
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
            spots.append((len(values), x.at(0), meta))
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
    nested = hasattr(run, "arg_annotations")  # 3.7
    head: tuple = (*first, None, None, compiled.packed_metadata, None, None, None)
    if nested:
        head = (*first, compiled.packed_metadata, *[None] * 5, run.arg_annotations, run.kernel_signature)
    return Open(launch, grid, head, nested, tuple(values), tuple(spots)), tensors
