"""The processes of one run: ranks that train replicas of one model, and stop together.

`torchrun --nproc-per-node=N train.py … parallel=ddp` starts N processes, each with its rank in its environment. All
run the same program on their share of every batch; rank 0 alone writes. With one process nothing here does anything.

A rank that fails leaves the cause in the store that all share, and every rank watches the store and the processes of
its own machine: whoever waits for a lost rank ends with that cause. A rank of another machine that vanishes without a
word ends the others through closed connections, or at `parallel.timeout_seconds`.
"""

import contextlib
import functools
import json
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from linrnn.config.schema import DistributedConfig, FsdpConfig, ParallelConfig, VocabConfig
from linrnn.errors import ConfigError, InterruptedRun, LinrnnError, RankFailedError, UnsupportedError
from linrnn.interrupts import heeded
from linrnn.output import say
from linrnn.sharding import make_mesh, shard, vocabulary_shards

POLL_SECONDS = 0.2  # between looks at the store and the processes of this machine
NOTICE_SECONDS = 5 * POLL_SECONDS  # in which every rank has learnt of a failure
GRACE_SECONDS = 10.0  # for a rank to end by itself once another has failed; torchrun kills it after 30
_FAILURE, _REPORTED, _LEFT, _PROCESS, _FIRST = "failure", "reported", "left", "process", "first"
T = TypeVar("T")


# ---------------------------------------------------------------------------------------------------------- launch
@dataclass(frozen=True)
class Launch:
    """What a launcher says of this process: its rank among all, its rank on this machine, and how many there are."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    launched: bool = False

    @classmethod
    def from_environment(cls) -> "Launch":
        """Read torchrun's variables (others that set them serve as well); without them, a process of its own."""
        if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            return cls()
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return cls(rank, int(os.environ.get("LOCAL_RANK", rank)), world_size, launched=True)

    def world_size_of(self, parallel: ParallelConfig) -> int:
        """Ranks of a run with this `parallel`.

        Raises:
            ConfigError: processes and `parallel` do not belong together.
        """
        if parallel.name == "none" and self.world_size > 1:
            raise ConfigError(
                f"a launcher started {self.world_size} processes, and parallel=none is a run of one",
                "add parallel=ddp, or call python train.py without a launcher",
            )
        if parallel.name != "none" and not self.launched:
            raise ConfigError(
                f"parallel={parallel.name}: this process was not started by torchrun",
                f"use torchrun --nproc-per-node=N train.py … parallel={parallel.name}, or parallel=none",
            )
        return self.world_size


# ----------------------------------------------------------------------------------------------------------- ranks
class Ranks:
    """The ranks of a run, as one of them sees them; this class is a run of one process."""

    rank = 0
    world_size = 1

    @property
    def is_first(self) -> bool:
        """Whether this rank writes."""
        return self.rank == 0

    @property
    def loss_scale(self) -> int:
        """What a rank's loss is to be multiplied by so that the gradients are those of the sum of all ranks' losses."""
        return 1

    def spread(self, model: Any, compute: torch.dtype) -> Any:
        """`model` (a LanguageModel) over the ranks; to be called like it, and to be asked for its head.

        Args:
            compute: what products are computed in.
        """
        return model

    def accumulating(self, replica: Any) -> contextlib.AbstractContextManager[None]:
        """A context for forward and backward passes whose gradients stay on their rank until the next one outside."""
        return contextlib.nullcontext()

    def zero_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Forget the gradients of a step."""
        optimizer.zero_grad(set_to_none=True)

    def vocabulary(self, vocab_size: int) -> tuple[dist.ProcessGroup, list[int]] | None:
        """The ranks that hold rows of the head of a model that was `spread`, and how many; None if each has all."""
        return None

    def share(self, items: Sequence[T], blank: Callable[[T], T]) -> Iterator[T]:
        """This rank's items, the only ones that it asks for. All ranks get the same number: in the last round some get
        a `blank` one."""
        yield from items

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of all ranks' tensors, on the tensor's device; the host does not wait for a GPU."""
        return tensor

    def total(self, *values: float) -> list[float]:
        """Sums of the hosts' numbers over all ranks (exact for integers below 2**53)."""
        return list(values)

    def largest(self, *values: float) -> list[float]:
        """The largest of each of the hosts' numbers."""
        return list(values)

    def from_first(self, find: Callable[[], T]) -> T:
        """What `find` returns on rank 0, which alone calls it."""
        return find()

    def first_then_others(self, prepare: Callable[[], T]) -> T:
        """What `prepare` returns here, called by the others once rank 0 is through, however long that takes."""
        return prepare()

    def shield(self, when_lost: Callable[[LinrnnError], None]) -> None:
        """From now on signals are for the trainer alone; `when_lost` is called if this rank has to be ended from
        outside, because another has failed and this one hangs."""

    def end_together(self) -> None:
        """Every rank has come to the end of the run: let each take its time to write what it has to."""

    def explain(self, error: BaseException) -> BaseException:
        """The failure of another rank behind `error`, or `error` itself."""
        return error


class DistributedRanks(Ranks):
    """Several processes, joined by :func:`join`."""

    def __init__(self, launch: Launch, store: dist.Store, watch: "Watch", timeout: timedelta) -> None:
        self.rank, self.world_size = launch.rank, launch.world_size
        self._launch, self._store, self._watch, self._timeout = launch, store, watch, timeout

    def under(self, parallel: DistributedConfig) -> "DistributedRanks":
        """The same processes with another way to spread a model."""
        return _ranks(parallel, self._launch, self._store, self._watch, self._timeout)

    def share(self, items: Sequence[T], blank: Callable[[T], T]) -> Iterator[T]:
        for first in range(0, len(items), self.world_size):
            own = first + self.rank
            yield items[own] if own < len(items) else blank(items[first])

    def sum(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor := tensor.clone())
        return tensor

    def total(self, *values: float) -> list[float]:
        return self.sum(torch.tensor(values, dtype=torch.float64)).tolist()

    def largest(self, *values: float) -> list[float]:
        dist.all_reduce(tensor := torch.tensor(values, dtype=torch.float64), dist.ReduceOp.MAX)
        return tensor.tolist()

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
            time.sleep(POLL_SECONDS)
        return prepare()

    def shield(self, when_lost: Callable[[LinrnnError], None]) -> None:
        self._watch.when_lost = when_lost

    def end_together(self) -> None:
        self._watch.patient = True

    def explain(self, error: BaseException) -> BaseException:
        if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
            return error
        if (failure := self._watch.wait_for_failure(GRACE_SECONDS / 2)) and failure.rank != self.rank:
            return failure.error()
        if isinstance(error, dist.DistError) or "gloo" in str(error).lower() or "timed out" in str(error).lower():
            return RankFailedError(
                f"no answer from the other ranks within {self._timeout.total_seconds():g} s, or no connection to them "
                f"({str(error).strip().splitlines()[0]})",
                "look at the other machines; raise parallel.timeout_seconds if a rank may take longer than that",
            )
        return error


class ReplicatedRanks(DistributedRanks):
    """Ranks with a whole model each: parallel=ddp."""

    @property
    def loss_scale(self) -> int:
        return self.world_size  # replicas take the mean

    def spread(self, model: nn.Module, compute: torch.dtype) -> nn.Module:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # torch 2.11 knows no newer word
            return _Replica(model, broadcast_buffers=False, gradient_as_bucket_view=True)

    def accumulating(self, replica: Any) -> contextlib.AbstractContextManager[None]:
        return replica.no_sync()

    def zero_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)  # they are views of the replica's buckets, which stay


class ShardedRanks(DistributedRanks):
    """Ranks that hold one model between them: parallel=fsdp and parallel=vocab."""

    def __init__(self, *arguments: Any, parallel: FsdpConfig) -> None:
        super().__init__(*arguments)
        self._parallel = parallel

    @functools.cached_property
    def _mesh(self) -> DeviceMesh:
        return make_mesh(self._parallel, "cuda" if "nccl" in dist.get_backend_config() else "cpu")

    def spread(self, model: nn.Module, compute: torch.dtype) -> nn.Module:
        self._replicas = shard(model, self._mesh, compute, isinstance(self._parallel, VocabConfig))
        return model

    def accumulating(self, replica: Any) -> contextlib.AbstractContextManager[None]:
        return self._replicas.accumulating()

    def vocabulary(self, vocab_size: int) -> tuple[dist.ProcessGroup, list[int]] | None:
        if not isinstance(self._parallel, VocabConfig):
            return None
        return self._mesh.get_group("shard"), vocabulary_shards(vocab_size, self._mesh)


class _Replica(DistributedDataParallel):
    """A replica that shows what the loss needs of the model."""

    def head(self, dtype: torch.dtype) -> Tensor:
        return self.module.head(dtype)


# ----------------------------------------------------------------------------------------------------------- faults
@dataclass(frozen=True)
class Failure:
    """Why a rank ended, as it is left for the others."""

    rank: int
    cause: str
    remedy: str
    exit_code: int

    def error(self) -> RankFailedError:
        return RankFailedError(f"rank {self.rank} stopped: {self.cause}", self.remedy, self.exit_code)


class Watch:
    """A thread that notices the failure of another rank, and ends this process if it hangs because of that.

    Attributes:
        failure: the first failure of any rank that is known here.
        when_lost: called before this process is ended; None while it is being set up.
        patient: whether this rank is known not to hang.
    """

    def __init__(self, launch: Launch, store: dist.Store) -> None:
        self.failure: Failure | None = None
        self.when_lost: Callable[[LinrnnError], None] | None = None
        self.patient = False
        self._launch, self._store = launch, store
        self._machine = _machine()
        self._neighbours: dict[int, int] = {}  # process ids of the other ranks on this machine
        self._noticed, self._ended = threading.Event(), threading.Event()
        store.set(f"{_PROCESS}/{launch.rank}", json.dumps([self._machine, os.getpid()]))
        self._thread = threading.Thread(target=self._run, name="linrnn-ranks", daemon=True)
        self._thread.start()

    def wait_for_failure(self, seconds: float) -> Failure | None:
        self._noticed.wait(seconds)
        return self.failure

    def record(self, failure: Failure) -> Failure:
        """Leave this failure for all ranks; returns the one that was there first."""
        text = self._store.compare_set(_FAILURE, "", json.dumps(asdict(failure)))
        return self._notice(Failure(**json.loads(text)))

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while self.failure is None and not self._ended.wait(POLL_SECONDS):
            try:
                self._look()
            except (RuntimeError, OSError):  # the store went with the process that held it
                lost = Failure(0, "the process that joins the ranks is gone", "look at what it printed", 1)
                self._notice(lost)
        if self._ended.wait(GRACE_SECONDS) or self.failure is None or self.patient:
            return
        error = self.failure.error()
        if self.when_lost:
            self.when_lost(error)
        say(f"error: {error}", sys.stderr)
        os._exit(error.exit_code)

    def _look(self) -> None:
        if self._store.check([_FAILURE]):
            self._notice(Failure(**json.loads(self._store.get(_FAILURE))))
        for rank in range(self._launch.world_size):
            key = f"{_PROCESS}/{rank}"
            if rank != self._launch.rank and rank not in self._neighbours and self._store.check([key]):
                machine, process = json.loads(self._store.get(key))
                self._neighbours[rank] = process if machine == self._machine else 0
        for rank in self.dead():
            self.record(Failure(rank, "its process has died", "look at what it printed, and at the system's log", 1))

    def dead(self) -> list[int]:
        """Ranks of this machine whose processes are gone."""
        return [rank for rank, process in self._neighbours.items() if process and not _alive(process)]

    def _notice(self, failure: Failure) -> Failure:
        self.failure = self.failure or failure
        self._noticed.set()
        return self.failure


@contextlib.contextmanager
def join(parallel: ParallelConfig, device: str) -> Iterator[Ranks]:
    """The ranks of the run that this process is part of; whatever ends the block on one rank ends it on all.

    Args:
        device: `auto`, `cpu` (gloo) or `cuda` (NCCL, a GPU for each rank of a machine).

    Raises:
        ConfigError: processes and `parallel` do not belong together.
        UnsupportedError: more ranks than GPUs on this machine, or a PyTorch without the backend.
        RankFailedError: another rank has failed.
    """
    launch = Launch.from_environment()
    if launch.world_size_of(parallel) == 1:
        yield Ranks()
        return
    assert isinstance(parallel, DistributedConfig)
    backend = _claim_device(launch, device)
    timeout = timedelta(seconds=parallel.timeout_seconds)
    store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    watch = Watch(launch, store.clone())
    try:
        with _signals(watch):
            dist.init_process_group(
                backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timeout
            )
            ranks = _ranks(parallel, launch, store, watch, timeout)
            try:
                yield ranks
            except BaseException as error:
                raise _conclusion(watch, store, ranks, error) from error
            _leave(watch, store, launch)
    finally:
        watch.end()
    dist.destroy_process_group()


def _ranks(parallel: DistributedConfig, *arguments: Any) -> DistributedRanks:
    if isinstance(parallel, FsdpConfig):
        return ShardedRanks(*arguments, parallel=parallel)
    return ReplicatedRanks(*arguments)


def _claim_device(launch: Launch, device: str) -> str:
    """Make this rank's GPU the current one; returns the backends of torch.distributed to use."""
    if device == "cpu" or not torch.cuda.is_available():
        return "gloo"
    if launch.local_rank >= torch.cuda.device_count():
        raise UnsupportedError(
            f"rank {launch.rank} has no GPU: {torch.cuda.device_count()} for more processes on this machine",
            f"use torchrun --nproc-per-node={torch.cuda.device_count()}, or device=cpu",
        )
    if not dist.is_nccl_available():
        raise UnsupportedError("this PyTorch has no NCCL", "install a CUDA build of PyTorch, or use device=cpu")
    torch.cuda.set_device(launch.local_rank)
    return "cpu:gloo,cuda:nccl"


@contextlib.contextmanager
def _signals(watch: Watch) -> Iterator[None]:
    """The signals that stop a run end a rank that is being set up; later they are the trainer's, and where it does not
    listen they are ignored: a launcher sends SIGTERM to all ranks when one has failed, with a summary to write."""

    def handle(number: int, frame: FrameType | None) -> None:
        if watch.when_lost is None:
            failure = watch.wait_for_failure(NOTICE_SECONDS)
            raise failure.error() if failure else interrupted(number)

    def interrupted(number: int) -> InterruptedRun:
        return InterruptedRun("interrupted before the first step", "run the same command again", number)

    previous = {number: signal.signal(number, handle) for number in heeded()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _conclusion(watch: Watch, store: dist.Store, ranks: DistributedRanks, error: BaseException) -> BaseException:
    """What this rank raises at its end, so that a failure of all is reported once."""
    error = ranks.explain(error)
    mine = not isinstance(error, RankFailedError)
    with contextlib.suppress(RuntimeError, OSError):  # without the store every rank reports for itself
        recorded = watch.record(_as_failure(ranks.rank, error))
        same = mine and recorded.rank != ranks.rank and recorded.cause == _as_failure(ranks.rank, error).cause
        if same or (not mine and store.add(_REPORTED, 1) > 1):
            error = SystemExit(recorded.exit_code)
    if mine and not watch.patient:
        time.sleep(NOTICE_SECONDS)  # the others learn why, then the connections close with this process
    else:
        _leave(watch, store, Launch(ranks.rank, world_size=ranks.world_size))
    return error


def _as_failure(rank: int, error: BaseException) -> Failure:
    if isinstance(error, LinrnnError):
        return Failure(rank, error.cause, error.remedy, error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        return Failure(rank, "interrupted", "run the same command again to continue", 130)
    first = (str(error).strip().splitlines() or [""])[0]
    return Failure(rank, f"{type(error).__name__}: {first}", "look at what that rank printed", 1)


def _leave(watch: Watch, store: dist.Store, launch: Launch) -> None:
    """Wait until all ranks are here or dead; after a failure no longer than the grace time."""
    with contextlib.suppress(RuntimeError, OSError):  # the rank that held the store has left
        store.add(_LEFT, 1)
        until = time.monotonic() + GRACE_SECONDS
        while store.add(_LEFT, 0) + len(watch.dead()) < launch.world_size:
            if watch.failure and not watch.patient and time.monotonic() > until:
                return
            time.sleep(POLL_SECONDS / 4)
        if launch.rank == 0:
            time.sleep(POLL_SECONDS)  # the store may go with this process


def _machine() -> str:
    """Processes with the same answer see each other's process ids."""
    namespace = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()} {os.readlink(namespace) if namespace.exists() else ''}"


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not _is_zombie(process)


def _is_zombie(process: int) -> bool:
    """Whether the process has ended and its parent has not asked for its exit code yet."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0] == "Z"
    except (OSError, IndexError):
        return False
