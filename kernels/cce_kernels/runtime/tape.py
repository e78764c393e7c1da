"""A tape hears of everything that a pass of the loss launches, allocates and computes. program.py repeats the pass."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

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


class Piece(NamedTuple):
    """Memory that a pass has allocated."""

    number: int
    size: int  # bytes
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Spot(NamedTuple):
    """An address that a launch has got, or that a result has."""

    piece: Piece | None  # in which it lies; None for memory that was there before the pass
    address: int
    memory: int  # where the memory begins that the address lies in


class Tape(TorchDispatchMode):
    """What a pass launches and allocates, while the tape is entered. `foreign`: what else happened.

    A tape keeps no tensor, because the pass would then take more memory than it usually does. So one address may
    belong to several pieces, one after another.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[tuple[Any, list[Spot]]] = []  # open launches, and the addresses of their spots
        self.pieces: list[Piece] = []
        self.foreign: list[Any] = []
        self._at: dict[int, Piece] = {}  # the latest piece that begins at an address

    def add(self, launch: tuple[Any, list[Tensor]] | None) -> None:
        """A launch, and the tensors of its spots; None for a launch that cannot be repeated."""
        if launch is None:
            self.foreign.append("a launch of Triton's")
        else:
            self.launches.append((launch[0], [self.spot(x) for x in launch[1]]))

    def spot(self, x: Tensor) -> Spot:
        """Where x, which is alive, lies."""
        memory = x.untyped_storage().data_ptr()
        return Spot(self._at.get(memory), x.data_ptr(), memory)

    def __enter__(self) -> Tape:
        RECORDING.tape = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        RECORDING.tape = None
        super().__exit__(*error)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        if operator in _ALLOCATE:
            memory = result.untyped_storage()
            piece = Piece(len(self.pieces), memory.nbytes(), result.shape, result.stride(), result.dtype)
            self.pieces.append(piece)
            self._at[memory.data_ptr()] = piece
        elif operator not in _VIEW:
            self.foreign.append(operator)
        return result
