"""How the processes of a run find each other, and how they end."""

import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist

from linrnn.config.schema import DistributedConfig, FsdpConfig, ParallelConfig
from linrnn.core.errors import InterruptedRun, LinrnnError, RankFailedError, UnsupportedError, described
from linrnn.core.interrupts import install, restore
from linrnn.distributed.launch import Launch
from linrnn.distributed.ranks import DistributedRanks, Ranks, ReplicatedRanks
from linrnn.distributed.watch import Failure, Watch

_REPORTED, _LEFT = "reported", "left"


@contextlib.contextmanager
def join(parallel: ParallelConfig, device: str) -> Iterator[Ranks]:
    """The ranks of this process's run. Whatever ends the block on one rank ends it on all.

    Args:
        device: `auto`, `cpu` (gloo) or `cuda` (NCCL, one GPU for each rank of a machine).

    Raises:
        ConfigError: the launched processes do not match `parallel`.
        UnsupportedError: this machine has more ranks than GPUs.
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
    watch = Watch(launch, store.clone(), timeout).start()
    try:
        with _signals(watch):
            dist.init_process_group(
                backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timeout
            )
            ranks = under(parallel, launch, store, watch)
            try:
                yield ranks
            except BaseException as error:
                raise _conclusion(watch, store, ranks, error) from error
            _leave(watch, store, ranks)
    finally:
        watch.end()
    dist.destroy_process_group()


def under(parallel: DistributedConfig, launch: Launch, store: dist.Store, watch: Watch) -> DistributedRanks:
    """The ranks, with the method that `parallel` names to distribute a model."""
    if not isinstance(parallel, FsdpConfig):
        return ReplicatedRanks(launch, store, watch, parallel)
    from linrnn.distributed.sharding import ShardedRanks  # half a second to import: only where a model is sharded

    return ShardedRanks(launch, store, watch, parallel)


def _claim_device(launch: Launch, device: str) -> str:
    """Make this rank's GPU the current one. Returns the backends for torch.distributed."""
    if device == "cpu" or not torch.cuda.is_available():
        return "gloo"
    if launch.local_rank >= torch.cuda.device_count():
        raise UnsupportedError(
            f"rank {launch.rank} has no GPU: this machine has {torch.cuda.device_count()}, and more processes",
            f"use torchrun --nproc-per-node={torch.cuda.device_count()}, or device=cpu",
        )
    torch.cuda.set_device(launch.local_rank)
    return "cpu:gloo,cuda:nccl"


@contextlib.contextmanager
def _signals(watch: Watch) -> Iterator[None]:
    """Handle signals outside the trainer's own handling.

    While a rank is being set up, a signal ends it, and so it does in a benchmark. A trainer handles signals itself.
    After its run they are ignored: when one rank has failed, a launcher sends SIGTERM to all, and they still have to
    write a summary.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        if watch.when_lost is None:
            if failure := watch.wait_for_failure(watch.NOTICE_SECONDS):
                raise failure.error()
            raise InterruptedRun("interrupted; no checkpoint was written", "run the same command again", number)

    previous = install(handle)
    try:
        yield
    finally:
        restore(previous)


def _conclusion(watch: Watch, store: dist.Store, ranks: DistributedRanks, error: BaseException) -> BaseException:
    """The exception that this rank raises at its end. A failure that several ranks share is reported once."""
    error = ranks.explain(error)
    mine = not isinstance(error, RankFailedError)
    if isinstance(error, LinrnnError):
        failure = Failure(ranks.rank, error.cause, error.remedy, error.exit_code)
    elif isinstance(error, KeyboardInterrupt):
        failure = Failure(ranks.rank, "interrupted", "run the same command again to continue", 130)
    else:
        failure = Failure(ranks.rank, described(error), "see the output of that rank", 1)
    with contextlib.suppress(RuntimeError, OSError):  # without the store every rank reports for itself
        recorded = watch.record(failure)
        same = mine and recorded.rank != ranks.rank and recorded.cause == failure.cause
        if same or (not mine and store.add(_REPORTED, 1) > 1):
            error = SystemExit(recorded.exit_code)
    if mine and not watch.patient:
        time.sleep(watch.NOTICE_SECONDS)  # other ranks read the cause before this process closes the connections
    else:
        _leave(watch, store, ranks)
    return error


def _leave(watch: Watch, store: dist.Store, ranks: Ranks) -> None:
    """Wait until every rank is here or dead. After a failure, wait no longer than the grace time."""
    with contextlib.suppress(RuntimeError, OSError):  # the rank that held the store has left
        store.add(_LEFT, 1)
        until = time.monotonic() + watch.GRACE_SECONDS
        while store.add(_LEFT, 0) + len(watch.dead()) < ranks.world_size:
            if watch.failure and not watch.patient and time.monotonic() > until:
                return
            time.sleep(watch.POLL_SECONDS / 4)
        if ranks.is_first:
            time.sleep(watch.POLL_SECONDS)  # the store may go with this process
