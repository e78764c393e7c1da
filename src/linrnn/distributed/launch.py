"""Read what the launcher (torchrun) says about this process."""

import os
from dataclasses import dataclass

from linrnn.config.schema import ParallelConfig
from linrnn.core.errors import ConfigError


@dataclass(frozen=True)
class Launch:
    """What a launcher says about this process: its rank, its rank on this machine, and the number of ranks."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    launched: bool = False

    @classmethod
    def from_environment(cls) -> "Launch":
        """Read torchrun's variables, whoever set them. Without them, this process is a run of its own."""
        if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            return cls()
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return cls(rank, int(os.environ.get("LOCAL_RANK", rank)), world_size, launched=True)

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
                f"use torchrun --nproc-per-node=N train.py … parallel={parallel.name}, or parallel=none",
            )
        return self.world_size
