"""FLOPs, bytes and time of a training step from formulas. Nothing is built or run.

Formulas are registered by the names of models and losses; a loss's formulas stand in its own file. A model or loss
without formulas has None (*unknown* in reports), never the figure of another one.
"""

from linrnn.costs.devices import ASSUMED_CPU_SHARE, ASSUMED_MFU, peak_flops_per_second
from linrnn.costs.flops import kernel_flops, mfu, model_flops
from linrnn.costs.gpus import GPUS, Gpu, step_seconds, uncertainty
from linrnn.costs.memory import MemoryEstimate, loss_memory, memory_estimate, training_state

__all__ = [
    "ASSUMED_CPU_SHARE", "ASSUMED_MFU", "GPUS", "Gpu", "MemoryEstimate", "kernel_flops",
    "loss_memory", "memory_estimate", "mfu", "model_flops", "peak_flops_per_second", "step_seconds",
    "training_state", "uncertainty",
]  # fmt: skip
