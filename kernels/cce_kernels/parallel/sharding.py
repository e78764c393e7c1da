"""Which rows of C and of E each rank of a process group has, and the collectives that exchange rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from ..arguments import as_integer
from ..options import Place
from ..row_math import IGNORED

LINE = 64  # 16-bit numbers in a line of 128 bytes


def any_distributed(*tensors: Any) -> bool:
    """Whether one of them is a DTensor, or a tensor on which a collective still works (dtensors.py)."""
    if torch.compiler.is_compiling():  # torch.compile sees no __tensor_flatten__
        from torch.distributed.tensor import DTensor

        return any(isinstance(x, DTensor) for x in tensors)
    found = (type(x).__name__ for x in tensors if hasattr(x, "__tensor_flatten__"))
    return any(name in ("DTensor", "AsyncCollectiveTensor") for name in found)


def vocabulary_shards(vocab: int, ranks: int) -> list[int]:
    """The number of rows of C on each rank, divided as torch.chunk and DTensor's Shard(0) do.

    Raises:
        TypeError, ValueError: vocab or ranks is no positive integer.
        ValueError: a rank would have no rows.
    """
    for name, x in (("vocab", vocab), ("ranks", ranks)):
        if as_integer(name, x) < 1:
            raise ValueError(f"{name}: must be positive, got {x}")
    each = -(-vocab // ranks)
    shards = [min(each, max(0, vocab - rank * each)) for rank in range(ranks)]
    if shards[-1] == 0:
        raise ValueError(
            f"vocab: {vocab} entries in shards of {each} leave some of {ranks} ranks without any; give shards yourself"
        )
    return shards


def chunk_rows(rows: int, ranks: int, own: bool) -> int:
    """Rows of a chunk: `rows`, or with `own` the multiple of `ranks` below it (but `ranks` itself at least)."""
    return max(rows // ranks, min(rows, 1)) * ranks if own else rows


@dataclass(frozen=True)
class Spread:
    """The layout of C and E over the ranks of a group, seen from one rank: a `Place` with the group's name and rank."""

    name: str
    rank: int
    shards: tuple[int, ...]
    own: bool
    agreed: bool = False
    # Rows of a chunk; 0 for one chunk of all rows. With rows="own" gathered rows lie chunk by chunk, in order of rank
    # within a chunk. So one chunk can be gathered, and its gradient reduced and scattered, by itself.
    chunk: int = 0

    @classmethod
    def of(cls, place: Place, rows: int) -> Spread:
        """The layout of a call, seen from this rank, with chunks of `chunk_rows(rows, …)` rows."""
        chunk = chunk_rows(rows, len(place.shards), place.own)
        return cls(place.group, process_group(place.group).rank(), *place[1:], chunk)

    @property
    def group(self) -> dist.ProcessGroup:
        return process_group(self.name)

    @property
    def ranks(self) -> int:
        return len(self.shards)

    @property
    def size(self) -> int:
        return self.shards[self.rank]

    @property
    def vocab(self) -> int:
        return sum(self.shards)

    def columns(self, columns: Tensor) -> Tensor:
        """Target columns (N,) as columns of this rank's shard; IGNORED where the shard does not hold the target."""
        here = columns - sum(self.shards[: self.rank])
        return torch.where((here >= 0) & (here < self.size), here, IGNORED)

    def owners(self, columns: Tensor) -> Tensor:
        """The rank that holds each target column (N,); an arbitrary rank for negative columns."""
        return torch.bucketize(columns, self.ends(columns.device), right=True).clamp(max=self.ranks - 1)

    def ends(self, device: torch.device) -> Tensor:
        """The end of each rank's columns, (W,) int64."""
        return _ends(self.shards, device)

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's x (n, ...), in order of rank: (W n, ...)."""
        out = x.new_empty(self.ranks * x.shape[0], *x.shape[1:])
        all_gather(out, x.contiguous(), self.group).wait()
        return out

    def mine(self, x: Tensor) -> Tensor:
        """This rank's rows of x (N, ...), which has all ranks' rows."""
        if not self.own:
            return x
        return torch.cat([piece.chunk(self.ranks)[self.rank] for piece in x.split(self.chunk or len(x))])


_groups: WeakValueDictionary[str, dist.ProcessGroup] = WeakValueDictionary()


def name_of(group: dist.ProcessGroup) -> str:
    """The group's name, by which `process_group` finds the group from now on. Custom operators take names."""
    group = getattr(group, "real_obj", group)  # torch.compile traces with a proxy of the group
    _groups[group.group_name] = group
    return group.group_name


def process_group(name: str) -> dist.ProcessGroup:
    """The group with this name: the default group, or one that `name_of` has seen.

    Raises:
        ValueError: this process has no such group, or has destroyed it.
    """
    world = dist.group.WORLD
    if world is not None and world.group_name == name:
        return world
    group = _groups.get(name)
    if group is None:
        raise ValueError(f"group: there is no process group {name!r} in this process, or it has been destroyed")
    return group


@lru_cache(maxsize=64)
def _ends(shards: tuple[int, ...], device: torch.device) -> Tensor:
    """The cumulative sums of the shards. Cached, because the host waits while it copies numbers to a GPU."""
    return torch.tensor(shards, device=device).cumsum(0)


def all_gather(out: Tensor, part: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Begin to gather every rank's `part` into `out`, in order of rank. (torch 2.13 deprecates the older name.)"""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(out, part, group=group, async_op=True)


def reduce_scatter(out: Tensor, whole: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Begin to sum all ranks' `whole`, this rank's part into `out`. (torch 2.13 deprecates the older name.)"""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(out, whole, group=group, async_op=True)


class Gathered:
    """Gathers all ranks' rows x (n, ...) into `whole` (N, ...), chunk by chunk, without waiting.

    With rows="same" `whole` is x itself. Otherwise rows of 16-bit numbers begin at lines of 128 bytes, so that the
    kernels need no copy (tiles.aligned).
    """

    def __init__(self, spread: Spread, x: Tensor) -> None:
        self.whole, self._begun, self._waited = x, [], 0
        self._chunk = spread.chunk or len(x) * (spread.ranks if spread.own else 1)
        if spread.own:
            shape = x.shape[1:]
            if x.dim() == 2 and x.itemsize == 2 and x.shape[1] % LINE:
                x = pad(x, (0, -x.shape[1] % LINE))
            whole = x.new_empty(len(x) * spread.ranks, *x.shape[1:])
            parts = zip(whole.split(self._chunk), x.contiguous().split(self._chunk // spread.ranks), strict=True)
            self._begun = [all_gather(out, part, spread.group) for out, part in parts]
            self.whole = whole[:, : shape[0]] if shape else whole

    def wait(self, part: slice) -> None:
        """Wait until `whole` may be read up to the end of `part`."""
        chunks = -(-part.stop // self._chunk)
        for work in self._begun[self._waited : chunks]:
            work.wait()
        self._waited = max(self._waited, chunks)

    def all(self) -> Tensor:
        """Wait for all chunks and return `whole`."""
        self.wait(slice(0, len(self.whole)))
        return self.whole


class Reduced:
    """Sums a gradient (N, D) fp32 over the ranks, chunk by chunk, without waiting."""

    def __init__(self, spread: Spread) -> None:
        self._spread = spread
        self._begun: list[dist.Work] = []
        self._sum: Tensor | None = None

    def add(self, grad: Tensor, part: slice) -> None:
        """Begin the sum of all ranks' grad[part]; `part` covers whole chunks."""
        spread = self._spread
        if not spread.own:
            self._sum = grad
            self._begun.append(dist.all_reduce(grad[part], group=spread.group, async_op=True))
            return
        if self._sum is None:
            self._sum = grad.new_empty(len(grad) // spread.ranks, *grad.shape[1:])
        for chunk in grad[part].split(spread.chunk or len(grad)):
            first = part.start // spread.ranks
            out = self._sum[first : first + len(chunk) // spread.ranks]
            self._begun.append(reduce_scatter(out, chunk, spread.group))
            part = slice(part.start + len(chunk), part.stop)

    def result(self) -> Tensor:
        """Wait for all sums and return them; with rows="own", the sums of this rank's rows."""
        for work in self._begun:
            work.wait()
        assert self._sum is not None
        return self._sum


class Same:
    """Whether all ranks have the same numbers x (n,). The device knows at once, the host in `check`.

    NaN equals every number. The host waits for the exchange alone, after it has launched what follows. It does not
    wait, and raises no error, while a CUDA graph is captured, and where the ranks have `agreed`.
    """

    CLOSE = 1e-5  # relative tolerance: numbers that ranks compute separately may differ by rounding

    def __init__(self, x: Tensor, spread: Spread) -> None:
        every = spread.all_gather(x[None])
        self._flag = (((every - x).abs() <= self.CLOSE * x.abs()) | every.isnan() | x.isnan() | (every == x)).all()
        self._waits = not spread.agreed and not (x.is_cuda and torch.cuda.is_current_stream_capturing())
        self._seen = self._flag
        if x.is_cuda and self._waits:
            self._seen = torch.empty((), dtype=torch.bool, pin_memory=True)
            self._seen.copy_(self._flag, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def or_nothing(self, grad: Tensor) -> Tensor:
        """The gradient, or 0 if the numbers differ, so that nothing is added to any sum before `check` raises.

        Where `check` does not wait, NaN takes the place of 0.
        """
        return torch.where(self._flag, grad, 0.0 if self._waits else torch.nan)

    def check(self, message: str) -> None:
        """Raise a RuntimeError on every rank if the numbers differ, where the host waits."""
        if not self._waits:
            return
        if self._seen is not self._flag:
            self._arrived.synchronize()
        if not self._seen.item():
            raise RuntimeError(message)
