"""The optimizer, its learning-rate schedule and gradient clipping."""

from linrnn.training.optimizer.build import build_optimizer, decay_groups
from linrnn.training.optimizer.schedule import Schedule
from linrnn.training.optimizer.shards import clip_gradients

__all__ = ["Schedule", "build_optimizer", "clip_gradients", "decay_groups"]
