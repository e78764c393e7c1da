"""Read what the launcher (torchrun) says about this process, and say the same to processes started here."""

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from linrnn.config.schema import ParallelConfig
from linrnn.core.errors import ConfigError


@dataclass(frozen=True)
class Launch:
    """What a launcher says about this process: its rank, its rank on this machine, and the number of ranks.

    `local_world_size` is the number of ranks on this machine; 0 if the launcher does not tell it.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    launched: bool = False
    local_world_size: int = 0

    @property
    def ranks_here(self) -> range:
        """The ranks of this machine, which torchrun numbers one after the other."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_world_size)

    @classmethod
    def from_environment(cls) -> "Launch":
        """Read torchrun's variables, whoever set them. Without them, this process is a run of its own."""
        if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            return cls()
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_rank, here = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", 0))
        return cls(rank, local_rank, world_size, launched=True, local_world_size=here)

    def world_size_of(self, parallel: ParallelConfig) -> int:
        """Number of ranks of a run with this `parallel`.

        Raises:
            ConfigError: the launched processes do not match `parallel`.
        """
        if parallel.name == "none" and self.world_size > 1:
            raise ConfigError(
                f"a launcher started {self.world_size} processes, and parallel=none is a run of one",
                "add parallel=ddp, or call python train.py without a launcher",
            )
        if parallel.name != "none" and not self.launched:
            raise ConfigError(
                f"parallel={parallel.name}: this process was not started by torchrun",
                f"use torchrun --nproc-per-node=N train.py … parallel={parallel.name}, in a sweep sweep.ranks=N, or "
                "parallel=none",
            )
        return self.world_size


def environments(ranks: int) -> list[dict[str, str]]:
    """For each rank of a run on this machine what torchrun would add to its environment; nothing for a single one.

    The ranks meet at a port of their own, on which nobody listens yet.
    """
    if ranks == 1:
        return [{}]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    shared |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}  # as torchrun
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


@contextlib.contextmanager
def as_first_of(ranks: int) -> Iterator[None]:
    """Within the context this process can plan a run as the first of so many ranks would."""
    before = dict(os.environ)
    os.environ |= environments(ranks)[0]
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before
