"""Rows of C on the ranks of a process group, and how the ranks exchange rows of E: collectives, begun and waited
for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from ..row_math import IGNORED


def vocabulary_shards(vocab: int, ranks: int) -> list[int]:
    """Rows of C on each rank: as equal as torch.chunk and DTensor's Shard(0) make them.

    Raises:
        ValueError: a rank would have none.
    """
    each = -(-vocab // ranks)
    shards = [min(each, max(0, vocab - rank * each)) for rank in range(ranks)]
    if shards[-1] == 0:
        raise ValueError(f"vocab: {vocab} entries in shards of {each} leave some of {ranks} ranks without any")
    return shards


def chunk_rows(rows: int, ranks: int, own: bool) -> int:
    """Of a chunk: `rows`, or with rows of their own as few less as all ranks have the same number."""
    return max(rows // ranks, min(rows, 1)) * ranks if own else rows


@dataclass(frozen=True)
class Spread:
    """Which rows of C this rank of a group has, and whose rows of E.

    The group goes by its name, which custom operators take as well.

    With rows="own" all ranks' rows stand in chunks of `chunk` rows (0: one of all), each of them in order of rank: a
    chunk can be gathered, and its gradient reduced and scattered, by itself.
    """

    name: str
    rank: int
    shards: tuple[int, ...]
    own: bool
    chunk: int = 0

    @classmethod
    def of(cls, name: str, shards: Sequence[int], own: bool) -> Spread:
        """On this rank of the group of that name."""
        return cls(name, process_group(name).rank(), tuple(shards), own)

    @property
    def group(self) -> dist.ProcessGroup:
        return process_group(self.name)

    def by_chunks(self, rows: int) -> Spread:
        """The same in chunks of `chunk_rows`."""
        return replace(self, chunk=chunk_rows(rows, self.ranks, self.own))

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
        """Places in this rank's shard; IGNORED where the target is elsewhere or there is none."""
        here = columns - sum(self.shards[: self.rank])
        return torch.where((here >= 0) & (here < self.size), here, IGNORED)

    def owners(self, columns: Tensor) -> Tensor:
        """The rank that has each column (N,); some rank for those that are none."""
        return torch.bucketize(columns, self.ends(columns.device), right=True).clamp(max=self.ranks - 1)

    def ends(self, device: torch.device) -> Tensor:
        """Where each rank's columns end (W,) int64."""
        return _ends(self.shards, device)

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's x (n, ...), in order of rank (W n, ...)."""
        out = x.new_empty(self.ranks * x.shape[0], *x.shape[1:])
        all_gather(out, x.contiguous(), self.group).wait()
        return out

    def entries(self, x: Tensor) -> Tensor:
        """What every rank has of the entries of its shard, x (size,) here: (vocab,)."""
        parts = self.all_gather(pad(x, (0, max(self.shards) - len(x)))).chunk(self.ranks)
        return torch.cat([part[:size] for part, size in zip(parts, self.shards, strict=True)])

    def mine(self, x: Tensor) -> Tensor:
        """This rank's rows of x (N, ...)."""
        if not self.own:
            return x
        return torch.cat([piece.chunk(self.ranks)[self.rank] for piece in x.split(self.chunk or len(x))])


_groups: WeakValueDictionary[str, dist.ProcessGroup] = WeakValueDictionary()


def name_of(group: dist.ProcessGroup) -> str:
    """The group's name, by which `process_group` finds the group from now on: custom operators take names."""
    group = getattr(group, "real_obj", group)  # torch.compile traces with a stand-in
    _groups[group.group_name] = group
    return group.group_name


def process_group(name: str) -> dist.ProcessGroup:
    """The group of that name: the default group, or one that `name_of` has seen.

    Raises:
        ValueError: there is none, or none any more.
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
    """Kept: to bring numbers to a GPU the host waits for it."""
    return torch.tensor(shards, device=device).cumsum(0)


def all_gather(out: Tensor, part: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Every rank's `part`, in order of rank, into `out`, begun. (torch 2.13 renames it and warns of the old name.)"""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(out, part, group=group, async_op=True)


def reduce_scatter(out: Tensor, whole: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """This rank's part of the sum of all ranks' `whole` into `out`, begun. (As above.)"""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(out, whole, group=group, async_op=True)


class Gathered:
    """All ranks' rows `whole` (N, ...) of a tensor of which each has its own (n, ...), begun chunk after chunk."""

    def __init__(self, spread: Spread, x: Tensor) -> None:
        self.whole, self._begun, self._waited = x, [], 0
        if spread.own:
            self.whole = x.new_empty(len(x) * spread.ranks, *x.shape[1:])
        self._chunk = spread.chunk or len(self.whole)
        if spread.own:
            parts = zip(self.whole.split(self._chunk), x.contiguous().split(self._chunk // spread.ranks), strict=True)
            self._begun = [all_gather(out, part, spread.group) for out, part in parts]

    def wait(self, part: slice) -> None:
        """Until `whole` may be read as far as `part` goes."""
        chunks = -(-part.stop // self._chunk)
        for work in self._begun[self._waited : chunks]:
            work.wait()
        self._waited = max(self._waited, chunks)

    def all(self) -> Tensor:
        """`whole`, all of which may be read."""
        self.wait(slice(0, len(self.whole)))
        return self.whole


class Reduced:
    """Sums over the ranks of a gradient's rows (N, D) fp32, each begun as soon as its rows are there."""

    def __init__(self, spread: Spread) -> None:
        self._spread = spread
        self._begun: list[dist.Work] = []
        self._sum: Tensor | None = None

    def add(self, grad: Tensor, part: slice) -> None:
        """Begin the sum of all ranks' grad[part], whole chunks of rows."""
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
        """The whole sum, with rows="own" of this rank's rows."""
        for work in self._begun:
            work.wait()
        assert self._sum is not None
        return self._sum


class Same:
    """Whether numbers x (n,) of every rank are the same: known to the device at once, to the host later.

    NaNs are the same as all. The host waits for no more than the exchange, with what follows it launched already.
    """

    CLOSE = 1e-5  # relative; copies that ranks compute on their own may differ by rounding

    def __init__(self, x: Tensor, spread: Spread) -> None:
        every = spread.all_gather(x[None])
        self._flag = (((every - x).abs() <= self.CLOSE * x.abs()) | every.isnan() | x.isnan() | (every == x)).all()
        self._capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
        self._seen = self._flag
        if x.is_cuda and not self._capturing:
            self._seen = torch.empty((), dtype=torch.bool, pin_memory=True)
            self._seen.copy_(self._flag, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def or_nothing(self, grad: Tensor) -> Tensor:
        """The gradient; 0 where the numbers differ, so that nothing is added to any sum before `check` raises. In a
        CUDA graph, which cannot raise, NaN."""
        return torch.where(self._flag, grad, torch.nan if self._capturing else 0.0)

    def check(self, message: str) -> None:
        """Raise RuntimeError, on every rank, if the numbers differ."""
        if self._capturing:
            return
        if self._seen is not self._flag:
            self._arrived.synchronize()
        if not self._seen.item():
            raise RuntimeError(message)
