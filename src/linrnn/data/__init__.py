"""Data: `prepare` turns text into token shards once; `BatchLoader` and `BatchesOnce` read batches from the shards."""

from linrnn.data.batches import Batch, BatchesOnce, BatchLoader
from linrnn.data.prepare import PreparedData, prepare, vocabulary_size
from linrnn.data.shards import ShardSet

__all__ = [
    "Batch",
    "BatchLoader",
    "BatchesOnce",
    "PreparedData",
    "ShardSet",
    "prepare",
    "vocabulary_size",
]
