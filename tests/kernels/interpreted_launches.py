"""Lets a tape (cce_kernels/runtime/program.py) record launches of Triton's interpreter, which compiles nothing."""

from __future__ import annotations

import ctypes
from copy import copy
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes


class OpenInInterpreter(NamedTuple):
    """What `launch.Open` is to a GPU: a launch whose addresses are open."""

    run: Any
    grid: tuple[int, ...]
    args: tuple
    options: dict[str, Any]
    spots: tuple[tuple[int, torch.dtype, torch.Size, tuple[int, ...]], ...]  # index, and what lies at the address

    def at(self, addresses: list[int]) -> tuple[Any, tuple, tuple]:
        """The launch with these addresses, one for each spot: a function of (*grid, stream, *rest), grid and rest."""
        args = list(self.args)
        for (index, dtype, shape, stride), address in zip(self.spots, addresses, strict=True):
            extent = (1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))) * dtype.itemsize
            there = torch.frombuffer((ctypes.c_char * extent).from_address(address), dtype=dtype)
            args[index] = described(args[index], there.as_strided(shape, stride))

        def launch(*values: Any) -> None:
            self.run(*values[len(self.grid) + 1 :], grid=self.grid, **self.options)

        return launch, self.grid, tuple(args)


def described(x: Any, base: Any) -> Any:
    """A copy of descriptor x with another tensor; the tensor itself where x is None."""
    if x is None:
        return base
    x = copy(x)
    x.base = base
    return x


def record_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on tapes hear of the interpreter's launches."""
    from cce_kernels.runtime.launch import RECORDING
    from triton.runtime.interpreter import InterpretedFunction

    own = InterpretedFunction.run

    def run(self: Any, *args: Any, grid: tuple[int, ...], **options: Any) -> None:
        if RECORDING.tape is not None:
            of_args = [(i, x if isinstance(x, torch.Tensor) else getattr(x, "base", None)) for i, x in enumerate(args)]
            tensors = [(i, x) for i, x in of_args if x is not None]
            without = [
                None if x is args[i] else described(args[i], None) if x is not None else args[i] for i, x in of_args
            ]
            spots = tuple((i, x.dtype, x.shape, x.stride()) for i, x in tensors)
            opened = OpenInInterpreter(own.__get__(self), grid, tuple(without), options, spots)
            RECORDING.tape.add((opened, [x for _, x in tensors]))
        with _disable_current_modes():  # the interpreter copies tensors with operators of torch
            own(self, *args, grid=grid, **options)

    monkeypatch.setattr(InterpretedFunction, "run", run)
