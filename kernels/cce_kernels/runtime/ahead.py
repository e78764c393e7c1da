"""Compiles the kernels of a call on all cores before the call launches the first of them.

Triton compiles a kernel at its first launch, so one after the other: 14 s for the exact loss on a host with an H100.
`compile_kernels` rehearses the first call of a kind, with its backward pass, on tensors without values (torch's meta
device). A launch then only gives its kernel to threads, which compile. The call itself finds its kernels in Triton's
cache. No result depends on a rehearsal: a kernel that it has not met is compiled at its launch.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ..options import Call, Inputs
from .devices import REHEARSAL
from .launch import watched

Loss = Callable[[Inputs, Call], Any]
MOST_KINDS = 32  # calls that a process rehearses; each takes some 50 ms if its kernels are compiled already
_kinds: set[Hashable] = set()  # of calls that were rehearsed


def compile_kernels(loss: Loss, x: Inputs, call: Call) -> None:
    """Compile the kernels of loss(x, call) on a GPU, and of its backward pass, if it is the first call of its kind.

    If that fails, a warning says so once. Several ranks compile at the launch, because they would compare their calls.
    """
    if not x.e.is_cuda or call.place is not None or len(_kinds) >= MOST_KINDS:
        return
    kind = _kind(x, call)
    if kind in _kinds or watched() or torch.cuda.is_current_stream_capturing():
        return
    _kinds.add(kind)
    try:
        # On a thread of its own, where no mode, hook or autocast of the caller's thread sees it.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(_rehearse, loss, x, call).result()
    except Exception as error:
        _warn_once(f"{type(error).__name__}: {error}")


@cache
def _warn_once(reason: str) -> None:
    warnings.warn(
        f"cce_kernels: kernels could not be compiled ahead ({reason}). So the first call compiles one after another, "
        "with the same results",
        stacklevel=4,
    )


def _kind(x: Inputs, call: Call) -> Hashable:
    """What the kernels of a call depend on: of the number of rows, which few of them depend on, only the magnitude."""
    shapes = (x.e.shape[0] - 1).bit_length(), x.e.shape[1], x.c.shape, x.e.stride(), x.c.stride()
    return call, x.e.device, shapes, *[None if t is None else t.dtype for t in x]


def _rehearse(loss: Loss, x: Inputs, call: Call) -> None:
    with rehearsal(x.e.device):
        inputs = Inputs._make([None if t is None else _without_values(t) for t in x])
        of = inputs.e, inputs.c, inputs.bias
        wanted = [t.requires_grad_() for t, need in zip(of, call.needs, strict=True) if need and t is not None]
        with torch.enable_grad():
            found = loss(inputs, call)[0]
        if wanted:
            torch.autograd.grad(found, wanted, torch.empty_like(found), allow_unused=True)


@contextmanager
def rehearsal(device: torch.device) -> Iterator[list[Any]]:
    """In this thread, tensors on the meta device stand for those of a GPU, and launches run nothing.

    When the context ends, the kernels are compiled, and loaded to the GPU. The list that it yields then holds them.
    """
    found: list[Any] = []

    def launch(kernel: Any, grid: tuple[int, ...], args: tuple, options: dict[str, Any]) -> None:
        found.append(kernel.warmup(*args, grid=grid, **options))

    def load(compiled: Any) -> None:
        with suppress(Exception), torch.cuda.device(device):  # its launch will raise the same
            compiled.run  # noqa: B018  Triton 3.6 also compiles a launcher in C

    present = torch.cuda.is_available()
    with torch.cuda.device(device) if present else nullcontext(), ThreadPoolExecutor(cores()) as pool:
        REHEARSAL.device, REHEARSAL.launch = device, launch
        try:
            with triton.AsyncCompileMode(pool, ignore_errors=True), _Elementwise():
                yield found
        finally:
            REHEARSAL.device = REHEARSAL.launch = None
        ready = [x.result(ignore_errors=True) if hasattr(x, "finalize_compile") else x for x in found]
        found[:] = {id(each): each for each in ready if each is not None}.values()
        if present:
            list(pool.map(load, found))


class _Elementwise(TorchDispatchMode):
    """Gives elementwise results on the meta device their form, by the same operator on one number on the CPU.

    torch's own way there begins with an import of torch._dynamo, which takes 2.5 s.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # a mode that does imports torch._dynamo, too

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.Tag.pointwise not in operator.tags:
            return operator(*args, **kwargs)
        if operator._schema.is_mutable:
            return kwargs.get("out", args[0])
        shapes = [x.shape for x in args if isinstance(x, Tensor)]
        one = tree_map_only(Tensor, lambda x: torch.empty((1,) * x.ndim, dtype=x.dtype), args)
        return torch.empty(torch.broadcast_shapes(*shapes), dtype=operator(*one, **kwargs).dtype, device="meta")


def _without_values(x: Tensor) -> Tensor:
    """A tensor like x, also in its strides and its place in its memory, without values."""
    whole = torch.empty(x.untyped_storage().nbytes() // x.itemsize, dtype=x.dtype, device="meta")
    return whole.as_strided(x.shape, x.stride(), x.storage_offset())


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
