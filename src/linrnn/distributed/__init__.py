"""Several processes of one run: replicas, shards, and how a failure of one ends all."""

from linrnn.distributed.join import join, under
from linrnn.distributed.launch import Launch
from linrnn.distributed.ranks import DistributedRanks, Ranks

__all__ = ["DistributedRanks", "Launch", "Ranks", "join", "under"]
