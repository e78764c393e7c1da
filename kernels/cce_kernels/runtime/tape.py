"""A tape hears of everything that a pass of the loss launches, allocates and computes. program.py repeats the pass."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_ALLOCATE = {_aten.empty.memory_format, _aten.new_empty.default, _aten.empty_like.default, _aten.empty_strided.default}
_VIEW = {
    _aten.view.default, _aten.slice.Tensor, _aten.select.int, _aten.as_strided.default, _aten.detach.default,
    _aten.alias.default, _aten.view.dtype, _aten.unsqueeze.default, _aten._unsafe_view.default,
}  # fmt: skip


class _Recording(threading.local):
    tape: Tape | None = None


RECORDING = _Recording()  # the tape of this thread


class Tape(TorchDispatchMode):
    """What a pass launches and allocates, while the tape is entered. `foreign`: what else happened."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[tuple[Any, list[Tensor]]] = []  # open launches and the tensors of their spots
        self.made: dict[int, Tensor] = {}  # allocations by address; kept, so that no address is given out twice
        self.foreign: list[Any] = []

    def add(self, launch: tuple[Any, list[Tensor]] | None) -> None:
        """A launch; None for one that cannot be repeated."""
        if launch is None:
            self.foreign.append("a launch of Triton's")
        else:
            self.launches.append(launch)

    def __enter__(self) -> Tape:
        RECORDING.tape = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        RECORDING.tape = None
        super().__exit__(*error)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        if operator in _ALLOCATE:
            self.made[memory_of(result)] = result
        elif operator not in _VIEW:
            self.foreign.append(operator)
        return result


def memory_of(x: Tensor) -> int:
    """The address of the memory that x lies in."""
    return x.untyped_storage().data_ptr()
