"""Record how tensors come into being on tensors without memory, and compute the values later, one after the other.

`FakeTensorMode` runs a model's constructor on tensors that have a shape and no memory. :class:`Tape` notes every
operation that writes a tensor. :meth:`Tape.play` runs the noted operations again on real tensors, with the same random
numbers: in the same order, or parts of them on several threads. Each tensor is handed over after its last operation.
The next of its size gets its memory.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from linrnn.models.build import one_thread
from linrnn.models.deferred.generator import generator_after

# In-place operations that do not read the tensor they write. Random ones do not read it either.
OVERWRITING = ("aten.fill_", "aten.zero_", "aten.copy_")


class Place(NamedTuple):
    """Where a tensor without memory would stand.

    Attributes:
        storage: of the tensor without memory. Tensors that share it are views of each other.
    """

    storage: torch.UntypedStorage
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def key(self) -> int:
        """Identifies the storage."""
        return self.storage._cdata

    @property
    def is_whole(self) -> bool:
        """Whether the tensor has every byte of its storage."""
        numel = torch.Size(self.size).numel()
        return numel * self.dtype.itemsize == self.storage.nbytes()


def place_of(tensor: Tensor) -> Place:
    """The place of a tensor without memory."""
    return Place(
        tensor.untyped_storage(), tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
    )


# A tensor to compute, and what is called with it. The tensor holds its values only during the call.
Wanted = tuple[Place, Callable[[Tensor], None]]


@dataclass(frozen=True)
class Operation:
    """One call of an operator.

    Attributes:
        arguments, options: of the call, with a `Place` for each tensor without memory.
        results: places of the results.
        touched, written, overwritten: keys of all storages of the call, of those that it writes, and of those of which
            it writes every byte without reading one.
        random: whether it draws random numbers.
    """

    function: Any
    arguments: Any
    options: Any
    results: tuple[Place, ...]
    touched: frozenset[int]
    written: frozenset[int]
    overwritten: frozenset[int]
    random: bool


class _Part(NamedTuple):
    """Operations that follow each other, by number, and the words of random bits that are drawn before them."""

    numbers: range
    draws_before: int

    def until(self, end: int) -> "_Part":
        return _Part(range(self.numbers.start, end), self.draws_before)


class Tape(TorchDispatchMode):
    """The operations of everything that runs in :meth:`recording`."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[Operation] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within the context, new tensors have no memory, and random operations draw nothing."""
        with FakeTensorMode(allow_non_fake_inputs=True), self:
            yield

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # An operation may change the place of its arguments.
        arguments, options = tree_map(_noted, args), tree_map(_noted, kwargs)
        result = function(*args, **kwargs)
        results = tuple(place_of(tensor) for tensor in tree_leaves(result) if isinstance(tensor, FakeTensor))
        given = {place.key for place in _places((arguments, options))}
        created = {place.key for place in results} - given
        random = torch.Tag.nondeterministic_seeded in function.tags
        changed = [
            place
            for argument, value in zip(function._schema.arguments, arguments, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for place in _places(value)
        ]
        written = created | {place.key for place in changed}
        if written and not str(function).startswith(("aten.empty", "aten.new_empty")):
            plain = random or str(function).startswith(OVERWRITING)
            read = {place.key for place in _places((arguments[1:], options))}
            overwritten = {place.key for place in changed if plain and place.is_whole} - read
            keys = frozenset(given | written), frozenset(written), frozenset(created | overwritten)
            self._operations.append(Operation(function, arguments, options, results, *keys, random))
        return result

    def play(self, wanted: Iterable[Wanted], *, seed: int | None = None, threads: int = 1) -> None:
        """Compute tensors on the CPU. Call the function beside each place with the tensor that stands there.

        If one of them depends on random numbers, all noted random numbers are drawn. Then each has the numbers that it
        would have had without a tape.

        Args:
            seed: of the random numbers, which come from generators of their own; None: from torch's generator.
            threads: that play parts of the tape at the same time, and call the functions; 1 without a seed.
        """
        receivers: dict[int, list[Wanted]] = {}
        for place, receive in wanted:
            receivers.setdefault(place.key, []).append((place, receive))
        needed, last = self._needed(set(receivers))
        drawn = any(self._operations[number].random for number in needed)

        def play_part(part: _Part) -> None:
            generator = None if seed is None else generator_after(seed, part.draws_before)
            memory = _Memory()
            for number in part.numbers:
                operation = self._operations[number]
                if number in needed:
                    _run(operation, memory, generator)
                    for key in operation.touched:
                        if last[key] == number:
                            for place, receive in receivers.pop(key, ()):
                                receive(memory.tensor(place))
                            memory.free(key)
                elif drawn and operation.random:  # its numbers are thrown away
                    held = memory.keys()
                    _run(operation, memory, generator)
                    for key in memory.keys() - held:
                        memory.free(key)

        parts = self._parts(needed, last, threads if drawn and seed is not None else 1)
        with one_thread():
            if len(parts) == 1:
                play_part(parts[0])
            else:
                with ThreadPoolExecutor(len(parts), "draw", partial(torch.set_num_threads, 1)) as pool:
                    list(pool.map(play_part, parts))
        for place, receive in itertools.chain(*receivers.values()):  # nothing writes them
            receive(_Memory().tensor(place))

    def _parts(self, needed: set[int], last: dict[int, int], count: int) -> list[_Part]:
        """Up to `count` parts of the tape with about as many draws each. No storage is needed in two of them."""
        draws = [draws_of(operation) for operation in self._operations]
        known = [drawn for drawn in itertools.takewhile(lambda drawn: drawn is not None, draws) if drawn is not None]
        total, before, open_keys, parts = sum(known), 0, set[int](), [_Part(range(0), 0)]
        for number, drawn in enumerate(known):
            if not open_keys and before * count >= len(parts) * total > 0:
                parts[-1] = parts[-1].until(number)
                parts.append(_Part(range(number, number), before))
            if number in needed:
                touched = self._operations[number].touched
                open_keys = {key for key in open_keys | touched if last[key] > number}
            before += drawn
        parts[-1] = parts[-1].until(len(draws))
        return parts

    def _needed(self, keys: set[int]) -> tuple[set[int], dict[int, int]]:
        """The numbers of the operations behind the storages, and the last of them that touches each storage."""
        needed, last, open_keys = set(), dict[int, int](), set(keys)
        for number in range(len(self._operations) - 1, -1, -1):
            operation = self._operations[number]
            if operation.written & open_keys:
                needed.add(number)
                open_keys |= operation.touched
                open_keys -= operation.overwritten
                for key in operation.touched:
                    last.setdefault(key, number)
        return needed, last


def draws_of(operation: Operation) -> int | None:
    """The words of 32 bits that an operation draws from torch's CPU generator; None: not known."""
    if not operation.random:
        return 0
    name, result = str(operation.function), operation.results[0]
    count = torch.Size(result.size).numel()
    if result.dtype != torch.float32:
        return None
    if name.startswith(("aten.uniform_.", "aten.rand.")):
        return count
    contiguous = result.stride == torch.empty(result.size, device="meta").stride()
    if name.startswith("aten.normal_.") and count >= 16 and contiguous:
        return count + (16 if count % 16 else 0)
    return None


def _noted(value: Any) -> Any:
    """What an operation keeps of an argument."""
    return place_of(value) if isinstance(value, FakeTensor) else value


def _places(noted: Any) -> list[Place]:
    return [leaf for leaf in tree_leaves(noted, is_leaf=_is_place) if _is_place(leaf)]


def _is_place(value: Any) -> bool:
    return isinstance(value, Place)


class _Memory:
    """Real storages for the places of tensors without memory.

    A freed storage is used again for the next place of its size: memory that is new to the process costs a quarter of
    the time in which it is filled with random numbers.
    """

    def __init__(self) -> None:
        self._held: dict[int, torch.UntypedStorage] = {}
        self._freed: defaultdict[int, list[torch.UntypedStorage]] = defaultdict(list)  # by size in bytes

    def keys(self) -> frozenset[int]:
        """Of all places that have a storage."""
        return frozenset(self._held)

    def tensor(self, place: Place) -> Tensor:
        """The tensor at a place. A place that has no storage yet gets one."""
        if place.key not in self._held:
            size = place.storage.nbytes()
            self._held[place.key] = self._freed[size].pop() if self._freed[size] else torch.UntypedStorage(size)
        return torch.empty(0, dtype=place.dtype).set_(self._held[place.key], place.offset, place.size, place.stride)

    def hold(self, place: Place, tensor: Tensor) -> None:
        """Let a place without storage have that of a tensor."""
        self._held.setdefault(place.key, tensor.untyped_storage())

    def free(self, key: int) -> None:
        """Nothing needs a storage any more."""
        storage = self._held.pop(key)
        self._freed[storage.nbytes()].append(storage)


def _run(operation: Operation, memory: _Memory, generator: torch.Generator | None) -> None:
    """Run an operation on real storages."""

    def real(value: Any) -> Any:
        if isinstance(value, Place):
            return memory.tensor(value)
        return value.clone() if isinstance(value, Tensor) else value  # a constant, which must not change

    arguments, options = (
        tree_map(real, noted, is_leaf=_is_place) for noted in (operation.arguments, operation.options)
    )
    function = operation.function
    if operation.random and generator is not None:
        function, options = _with_generator(function), {**options, "generator": generator}
    with torch.no_grad():
        results = tree_leaves(function(*arguments, **options))
    tensors = [result for result in results if isinstance(result, Tensor)]
    for place, tensor in zip(operation.results, tensors, strict=True):
        memory.hold(place, tensor)


def _with_generator(function: Any) -> Any:
    """The overload of a random operation that takes a generator: `aten.rand.generator` for `aten.rand.default`."""
    takes = any(argument.name == "generator" for argument in function._schema.arguments)
    return function if takes else function.overloadpacket.generator
