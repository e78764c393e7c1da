"""The ranks of one run, as one of them sees them.

`torchrun --nproc-per-node=N train.py … parallel=ddp` starts N processes, each with its rank in its environment. All run
the same program on their share of every batch. Only rank 0 writes files. :class:`Ranks` itself is a run of one process.
"""

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from linrnn.config.schema import DistributedConfig
from linrnn.core.errors import LinrnnError, RankFailedError, first_line
from linrnn.distributed.launch import Launch
from linrnn.distributed.watch import Watch
from linrnn.models.build import RowShard

_FIRST = "first"
T = TypeVar("T")


class Ranks:
    """The ranks of a run, as one of them sees them. This class is a run of one process."""

    rank = 0
    world_size = 1

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files."""
        return self.rank == 0

    @property
    def loss_scale(self) -> int:
        """Factor for a rank's loss, so that gradients are those of the sum of all ranks' losses."""
        return 1

    @property
    def row_shard(self) -> RowShard | None:
        """The rows of every parameter that this rank holds after :meth:`parallelize`; None: all rows."""
        return None

    def parallelize(self, model: Any, compute: torch.dtype) -> Any:
        """Distribute `model` (a LanguageModel) over the ranks. The result can be called and has a head, like the model.

        Args:
            compute: the dtype of matrix products.
        """
        return model

    def broadcast_weights(self, model: nn.Module) -> None:
        """Give every copy of the model the first one's weights: GPUs of two kinds draw other random numbers."""

    def no_sync(self, replica: Any) -> contextlib.AbstractContextManager[None]:
        """As `DistributedDataParallel.no_sync`: passes keep gradients on their rank. The next one outside sums them."""
        return contextlib.nullcontext()

    def reshard(self) -> None:
        """Free parameters that were gathered from other ranks. The next pass gathers them anew."""

    def zero_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Reset the gradients of a step."""
        optimizer.zero_grad(set_to_none=True)

    def vocabulary(self, vocab_size: int) -> tuple[dist.ProcessGroup, list[int]] | None:
        """The ranks that share the head's rows, and the number of rows of each; None if every rank has all rows."""
        return None

    def share(self, items: Sequence[T], blank: Callable[[T], T]) -> Iterator[T]:
        """This rank's items. All ranks get the same number of items; in the last round some get a `blank` one."""
        yield from items

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of all ranks' tensors, on the tensor's device. The host does not wait for a GPU."""
        return tensor

    def sum_on_host(self, *values: float) -> list[float]:
        """The sum over all ranks of each of the hosts' numbers (exact for integers below 2**53)."""
        return list(values)

    def max_on_host(self, *values: float) -> list[float]:
        """The maximum over all ranks of each of the hosts' numbers."""
        return list(values)

    def max_on_host_async(self, find: Callable[[], Sequence[float]]) -> Callable[[], Sequence[float]]:
        """Begin to find the maximum over all ranks of each of the hosts' numbers. The returned function waits for it.

        With several ranks `find` is called now. If the result is asked for a step later, the ranks have had that long
        to answer. In a process alone `find` is called when the result is asked for.
        """
        return find

    def from_first(self, find: Callable[[], T]) -> T:
        """The result of `find` on rank 0. Only rank 0 calls it."""
        return find()

    def first_then_others(self, prepare: Callable[[], T]) -> T:
        """The result of `prepare`. All other ranks call it once rank 0 has finished, however long that takes."""
        return prepare()

    def on_lost_rank(self, callback: Callable[[LinrnnError], None]) -> None:
        """Call `callback` before this rank is ended because it hangs after another one has failed.

        From now on only the trainer handles signals.
        """

    def end_together(self) -> None:
        """Every rank has reached the end of the run. Each may now take its time to write its files."""

    def explain(self, error: BaseException) -> BaseException:
        """The failure of another rank that caused `error`, or `error` itself."""
        return error


class DistributedRanks(Ranks):
    """Several processes, joined by :func:`linrnn.distributed.join`. `joined` are the arguments, for another method."""

    def __init__(self, launch: Launch, store: dist.Store, watch: Watch, parallel: DistributedConfig) -> None:
        self.rank, self.world_size = launch.rank, launch.world_size
        self._store, self._watch = store, watch
        self._parallel: Any = parallel
        self.joined = launch, store, watch

    def share(self, items: Sequence[T], blank: Callable[[T], T]) -> Iterator[T]:
        for first in range(0, len(items), self.world_size):
            own = first + self.rank
            yield items[own] if own < len(items) else blank(items[first])

    def sum(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor := tensor.clone())
        return tensor

    def sum_on_host(self, *values: float) -> list[float]:
        return self.sum(torch.tensor(values, dtype=torch.float64)).tolist()

    def max_on_host(self, *values: float) -> list[float]:
        return self.max_on_host_async(lambda: values)()

    def max_on_host_async(self, find: Callable[[], Sequence[float]]) -> Callable[[], list[float]]:
        tensor = torch.tensor(list(find()), dtype=torch.float64)
        work = dist.all_reduce(tensor, dist.ReduceOp.MAX, async_op=True)

        def result() -> list[float]:
            work.wait()
            return tensor.tolist()

        return result

    def from_first(self, find: Callable[[], T]) -> T:
        found: list[Any] = [find() if self.is_first else None]
        dist.broadcast_object_list(found)
        return found[0]

    def first_then_others(self, prepare: Callable[[], T]) -> T:
        if self.is_first:
            prepared = prepare()
            self._store.set(_FIRST, "")
            return prepared
        while not self._store.check([_FIRST]):
            if failure := self._watch.failure:
                raise failure.error()
            time.sleep(self._watch.POLL_SECONDS)
        return prepare()

    def on_lost_rank(self, callback: Callable[[LinrnnError], None]) -> None:
        self._watch.when_lost = callback

    def end_together(self) -> None:
        self._watch.patient = True

    def explain(self, error: BaseException) -> BaseException:
        if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
            return error
        if (failure := self._watch.wait_for_failure(self._watch.GRACE_SECONDS / 2)) and failure.rank != self.rank:
            return failure.error()
        if isinstance(error, dist.DistError) or "gloo" in str(error).lower() or "timed out" in str(error).lower():
            return RankFailedError(
                f"no answer from the other ranks within {self._parallel.timeout_seconds:g} s, or no connection to them "
                f"({first_line(error)})",
                "look at the other machines; raise parallel.timeout_seconds if a rank may take longer than that",
            )
        return error


class ReplicatedRanks(DistributedRanks):
    """Ranks that each have a whole model: parallel=ddp."""

    @property
    def loss_scale(self) -> int:
        return self.world_size  # replicas take the mean

    def parallelize(self, model: nn.Module, compute: torch.dtype) -> nn.Module:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # torch 2.11 has no newer name for it
            return _Replica(model, broadcast_buffers=False, gradient_as_bucket_view=True)

    def broadcast_weights(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), src=0)

    def no_sync(self, replica: Any) -> contextlib.AbstractContextManager[None]:
        return replica.no_sync()

    def zero_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)  # gradients are views of the replica's buckets, which stay


class _Replica(DistributedDataParallel):
    """A DDP replica that also gives access to the head."""

    def head(self, dtype: torch.dtype) -> Tensor:
        return self.module.head(dtype)
