"""FLOPs, bytes and time of a training step from formulas: nothing is built or run."""

from linrnn.accounting.devices import ASSUMED_CPU_SHARE, ASSUMED_MFU, peak_flops_per_second, time_estimate
from linrnn.accounting.flops import StepFlops, model_flops, step_flops
from linrnn.accounting.memory import MemoryEstimate, loss_memory, memory_estimate

__all__ = [
    "ASSUMED_CPU_SHARE",
    "ASSUMED_MFU",
    "MemoryEstimate",
    "StepFlops",
    "loss_memory",
    "memory_estimate",
    "model_flops",
    "peak_flops_per_second",
    "step_flops",
    "time_estimate",
]
