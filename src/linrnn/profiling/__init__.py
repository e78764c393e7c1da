"""Time and memory of training steps, by component."""

from linrnn.profiling.memory import MemoryByComponent
from linrnn.profiling.observe import LossObserver, watched_loss
from linrnn.profiling.timers import SpeedMeter, Stopwatch, matmul_rate
from linrnn.profiling.traces import memory_snapshot, trace

__all__ = [
    "LossObserver", "MemoryByComponent", "SpeedMeter", "Stopwatch", "matmul_rate", "memory_snapshot", "trace",
    "watched_loss",
]  # fmt: skip
