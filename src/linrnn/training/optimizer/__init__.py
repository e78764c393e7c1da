"""The optimizer, its learning-rate schedule and gradient clipping."""

from linrnn.training.optimizer.build import build_optimizer, clip_gradients, decay_groups
from linrnn.training.optimizer.schedule import Schedule

__all__ = ["Schedule", "build_optimizer", "clip_gradients", "decay_groups"]
