"""A pass of the loss, recorded once and then repeated without the Python that leads to its launches.

A small problem's kernels wait for that Python. But a training step repeats the passes of the step before. `Passes`
runs the first pass of a kind as usual, the second one under a `Tape`, and later ones from its `Program`: the tape's
launches, with their addresses open, and a plan of the memory:

    inputs      tensors that the caller gives; their addresses may change from call to call
    own         memory that leaves the pass as a tensor of its own: losses, gradients, exponentials
    arena       one allocation for all small tensors that only the next pass takes up
    scratch     everything else, until the pass ends: in own memory that no launch of the pass uses, or in one
                allocation. Tensors that the launches use one after another share its bytes

A pass is repeatable if nothing but launches and allocations happens in it. It runs as usual while launches are watched,
and a forward pass while hooks handle saved tensors: checkpointing compares the saved tensors of two forward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import driver

from ..filter.rule import FilterStats
from ..options import Call, Inputs
from ..saved import GradientSums, Held, Saved
from .devices import kernels_on
from .launch import RECORDING, watched

ALIGNMENT = 512  # bytes, as torch's allocator aligns
MOST_PASSES = 64  # kinds of passes that are remembered
MOST_BOUND = 8  # sets of addresses that a program remembers its launches for
SAVED = 3  # the number of the first tensor of `Saved` among a forward pass's results; and those of the gradients
GRADIENTS = [SAVED + 7 + len(Held._fields) + GradientSums._fields.index(x) for x in ("grad_e", "grad_c", "grad_bias")]
MOST_TRIES = 4  # recordings of a kind of pass; a launch that has to be compiled spoils a recording
_aten = torch.ops.aten
_ALLOCATE = {_aten.empty.memory_format, _aten.new_empty.default, _aten.empty_like.default, _aten.empty_strided.default}
_VIEW = {
    _aten.view.default, _aten.slice.Tensor, _aten.select.int, _aten.as_strided.default, _aten.detach.default,
    _aten.alias.default, _aten.view.dtype, _aten.unsqueeze.default, _aten._unsafe_view.default,
}  # fmt: skip


class Piece(NamedTuple):
    """Memory that a pass has allocated: its number, bytes and form."""

    number: int
    size: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Spot(NamedTuple):
    """An address of a launch or a result, where its memory begins, and its piece (None: from before the pass)."""

    piece: Piece | None
    address: int
    memory: int


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

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first tape imports torch._dynamo, which takes 2.5 s of a second call

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


class Program:
    """The launches of a recorded pass, for any addresses.

    Its memories have numbers: the inputs, then what a run allocates (`made`): own tensors, the arena, the scratch.
    """

    def __init__(
        self, tape: Tape, inputs: Sequence[Tensor | None], own: Sequence[Tensor] = (),
        results: Sequence[Tensor | None] = (), beside: Any = None,
    ) -> None:  # fmt: skip
        """
        Args:
            own: results that need memory of their own.
            results: all tensors that the pass hands on; their memory lasts as long as `made`.
            beside: what the pass returns besides tensors.

        Raises:
            LookupError: a launch reads memory that is neither an input nor made in the pass, or a result is not.
        """
        self._count = len(inputs)
        made: list[Any] = list(dict.fromkeys(tape.spot(x).piece for x in own))
        if None in made:
            raise LookupError("a result was not made in the pass")
        self._allocations = [(tuple(x.shape), x.stride, x.dtype) for x in made]
        placed = {piece.number: (self._count + i, 0) for i, piece in enumerate(made)}
        spots = [None if x is None else tape.spot(x) for x in results]
        kept = {spot.piece.number for spot in spots if spot is not None and spot.piece is not None} - placed.keys()
        arena = arranged({number: (tape.pieces[number].size, 0, 0) for number in kept})
        scratch = arranged(_lives(tape, placed.keys() | kept))
        used = {spot.piece for _, at in tape.launches for spot in at}
        idle = next((placed[x.number][0] for x in made if x not in used and x.size >= scratch[1]), None)
        placed |= self._allocate(*arena)
        self._kept = len(self._allocations)  # the others last until the pass ends
        placed |= self._allocate(*scratch, idle)
        given = [(i, tape.spot(x)) for i, x in enumerate(inputs) if x is not None]
        self._launches = [(launch, [_place(spot, placed, given) for spot in at]) for launch, at in tape.launches]
        allocations = [None] * self._count + self._allocations
        self._results: list[Any] = []  # the place of each result, its form, and whether it is all of its memory
        for x, spot in zip(results, spots, strict=True):
            place = None if spot is None else _place(spot, placed, given)
            form = None if x is None else (x.shape, x.stride(), x.dtype)
            whole = place is not None and allocations[place[0]] == form
            self._results.append(None if place is None or form is None else (place, *form, whole))
        self._bound: dict[tuple[int, ...], list[Any]] = {}
        self.beside, self.next = beside, Passes()  # next: of the pass that takes up these results

    def _allocate(self, offsets: dict[int, int], size: int, memory: int | None = None) -> dict[int, tuple[int, int]]:
        """The places of pieces of these offsets (`arranged`): in `memory`, if it is given, or in an allocation."""
        if memory is None and offsets:
            self._allocations.append(((size,), (1,), torch.uint8))
        memory = self._count + len(self._allocations) - 1 if memory is None else memory
        return {number: (memory, offset) for number, offset in offsets.items()}

    def run(self, inputs: Sequence[Tensor | None], like: Tensor) -> list[Any]:
        """Launch the pass; returns what it has allocated, on the device of `like`."""
        device = like.device
        made: list[Any] = [
            torch.empty_strided(shape, stride, dtype=dtype, device=device) for shape, stride, dtype in self._allocations
        ]
        addresses = tuple([0 if x is None else x.data_ptr() for x in (*inputs, *made)])
        calls = self._bound.get(addresses)
        if calls is None:
            calls = [launch.at([addresses[memory] + offset for memory, offset in at]) for launch, at in self._launches]
            if len(self._bound) >= MOST_BOUND:
                self._bound.clear()
            self._bound[addresses] = calls
        stream = driver.active.get_current_stream(device.index) if like.is_cuda else None
        for launch, grid, rest in calls:
            launch(*grid, stream, *rest)
        del made[self._kept :]  # the scratch
        return made

    def result(self, index: int, made: list[Any], take: bool = False) -> Any:
        """The tensor number `index` of the pass's results, or None, in what a run has made.

        take: `made` forgets the tensor, which its user may change in place. The next pass must not read it.
        """
        view = self._results[index]
        if view is None:
            return None
        (memory, offset), shape, stride, dtype, whole = view
        x = made[memory - self._count]
        if take:
            made[memory - self._count] = None
        first = (x.storage_offset() * x.itemsize + offset) // dtype.itemsize
        return x if whole else x.new_empty(0, dtype=dtype).set_(x.untyped_storage(), first, shape, stride)

    def backward(
        self, usual: Callable[..., Any], up: Any, x: Inputs, metrics: Any, made: list[Any], call: Call, finish: bool
    ) -> Any:
        """The gradients of a call whose forward pass was repeated: this pass is repeated, too, or recorded, or usual.

        usual: operators._backward; the other arguments are its own. made: what the forward pass has allocated.
        """
        plan, given = self.beside.plan, (up.loss, x.e, x.c, x.weights, x.main_grad_c)
        alive = x.e.untyped_storage().nbytes() and x.c.untyped_storage().nbytes()
        if not (finish and alive and up.loss is not None and not up.loss.dim() and up.lse is None):
            saved = self._saved(made)
            return usual(up, x, self.result(1, made), metrics, saved.used_up() if finish else saved, call, plan, finish)
        kind = kind_of(*given)
        program = self.next.find(kind)
        if program is not None:
            with kernels_on(x.e):
                program.run((*given, *made), x.e)
        else:
            saved = self._saved(made).used_up()
            with self.next.tape(kind) as tape:
                usual(up, x._replace(stats=None), None, None, saved, call, plan, finish)
            self.next.keep(kind, tape, (*given, *made))
        if x.stats is not None:
            FilterStats.write_exact(x.stats)
        found = [self.result(index, made) for index in GRADIENTS]
        return [None if grad is None else grad.data for grad in found]  # see Saved.used_up

    def _saved(self, made: list[Any]) -> Saved:
        results = [self.result(index, made) for index in range(SAVED, len(self._results))]
        return Saved.of(results, self.beside.plan.rows)


def _place(spot: Spot, placed: dict[int, tuple[int, int]], given: Sequence[tuple[int, Spot]]) -> tuple[int, int]:
    """Which memory of a program a spot lies in, and how many bytes from its beginning.

    placed: the places of the pieces that the pass has made. given: the numbers and spots of its inputs. Several inputs
    may lie in one memory, as the parameters of a sharded model do. Then the spot has to be where one of them begins.
    """
    if spot.piece is not None:
        number, offset = placed[spot.piece.number]
        return number, offset + spot.address - spot.memory
    within = [(number, spot.address - its.address) for number, its in given if its.memory == spot.memory]
    exact = [place for place in within if place[1] == 0]
    if exact or len(within) == 1:
        return (exact or within)[0]
    raise LookupError("a launch reads memory that is neither an input nor made in the pass")


def _lives(tape: Tape, elsewhere: Collection[int]) -> dict[int, tuple[int, int, int]]:
    """(bytes, first launch, last launch) of the pieces that go into the scratch, by number.

    A launch may begin before the one before it ends (matmul.py). So a piece stays until a launch after its last one.
    """
    lives: dict[int, tuple[int, int, int]] = {}
    for launch, (_, spots) in enumerate(tape.launches):
        for piece in {spot.piece for spot in spots if spot.piece is not None and spot.piece.number not in elsewhere}:
            first = lives[piece.number][1] if piece.number in lives else launch
            lives[piece.number] = piece.size, first, launch + 1
    return lives


def arranged(lives: dict[int, tuple[int, int, int]]) -> tuple[dict[int, int], int]:
    """An offset for each piece of memory, and the bytes of them all. Pieces that live at the same time do not overlap.

    lives: (bytes, first, last) by name. The largest piece comes first, and each goes to the lowest place that is free.
    """
    placed: list[tuple[int, int, int, int]] = []  # begin, end, first, last
    offsets = {}
    for name, (size, first, last) in sorted(lives.items(), key=lambda item: -item[1][0]):
        offset = 0
        for begin, end, other_first, other_last in sorted(placed):
            if first <= other_last and other_first <= last and begin < offset + size and offset < end:
                offset = end
        placed.append((offset, offset + -(-size // ALIGNMENT) * ALIGNMENT, first, last))
        offsets[name] = offset
    return offsets, max((end for _, end, *_ in placed), default=0)


def kind_of(*inputs: Any) -> Hashable:
    """All that the launches of a pass with these inputs depend on, but the addresses of the tensors."""
    return tuple([
        (x.device, x.dtype, x.shape, x.stride(), x.data_ptr() % 16) if isinstance(x, Tensor)
        else tuple(x) if type(x) is list else x
        for x in inputs
    ])  # fmt: skip


class Passes:
    """Programs by the kind of a pass (`kind_of`)."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Program | int] = {}  # or how often the pass was met

    def find(self, kind: Hashable) -> Program | None:
        """The program of this kind of pass, if it is recorded and may run now."""
        found = self._known.get(kind)
        return found if isinstance(found, Program) and not watched() else None

    def tape(self, kind: Hashable) -> AbstractContextManager[Tape | None]:
        """A tape for this pass, which runs as usual, if it is to be recorded: from its second call on."""
        met = self._known.get(kind, 0)
        if isinstance(met, Program) or met > MOST_TRIES or watched():
            return nullcontext()
        if met == 0 and len(self._known) >= MOST_PASSES:
            self._known.clear()
        self._known[kind] = met + 1
        return Tape() if met else nullcontext()

    def keep(self, kind: Hashable, tape: Tape | None, *program: Any) -> None:
        """Make a tape's program, for later passes of this kind, if the pass can be repeated. program: see `Program`."""
        if tape is not None and not tape.foreign:
            with suppress(LookupError):
                self._known[kind] = Program(tape, *program)


def forward(usual: Callable[..., Any], x: Inputs, call: Call) -> tuple[Any, Program | None]:
    """What usual(x, call), operators._forward, returns; and the program, if this kind of call was repeated.

    `saved` then is what the program has allocated, for `Program.backward`. LSE that are not wanted are None.
    """
    if call.place is not None or not saves_plainly():
        return usual(x, call), None
    kind = kind_of(*x, call)
    program = CALLS.find(kind)
    if program is not None:
        with kernels_on(x.e):
            made = program.run(x, x.e)
        loss, metrics = program.result(0, made, take=True), program.result(2, made, take=True)
        lse = program.result(1, made) if call.with_lse else None
        return program.beside._replace(loss=loss, lse=lse, metrics=metrics, saved=made), program
    with CALLS.tape(kind) as tape:
        found = usual(x, call)
    loss, lse, metrics, saved, plan = found
    if tape is not None and (plan is None or not plan.capacity):
        results = [loss, lse, metrics, *(() if saved is None else saved.flat())]
        own = [loss, lse if call.with_lse else None, metrics]
        if saved is not None:
            own += [saved.e, saved.c, *(saved.held or ())[:1], *(saved.sums or ())]  # the first of `held`: w
        beside = found._replace(loss=None, lse=None, metrics=None, saved=None)
        CALLS.keep(kind, tape, x, [t for t in own if t is not None], results, beside)
    return found, None


def saves_plainly() -> bool:
    """Whether autograd saves tensors as they are. Without torch's private function that knows, this is False."""
    return _hooks_of_saved_tensors is not None and _hooks_of_saved_tensors(True) is None


_hooks_of_saved_tensors = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
CALLS = Passes()  # forward passes of the loss
