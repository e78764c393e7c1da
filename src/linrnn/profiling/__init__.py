"""Time and memory of training steps, by component."""

from linrnn.profiling.memory import MemoryByComponent, tensor_bytes
from linrnn.profiling.observe import LOSS_BACKWARD, LOSS_FORWARD, BackwardMark, LossObserver, nvtx_range, watched_loss
from linrnn.profiling.timers import LossTimer, SpeedMeter, StepTimer, WallClock, matmul_rate
from linrnn.profiling.traces import memory_snapshot, trace

__all__ = [
    "LOSS_BACKWARD",
    "LOSS_FORWARD",
    "BackwardMark",
    "LossObserver",
    "LossTimer",
    "MemoryByComponent",
    "SpeedMeter",
    "StepTimer",
    "WallClock",
    "matmul_rate",
    "memory_snapshot",
    "nvtx_range",
    "tensor_bytes",
    "trace",
    "watched_loss",
]
