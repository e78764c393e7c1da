"""FLOPs, bytes and time of a training step from formulas: nothing is built or run."""

from linrnn.accounting.communication import Communication, communication, vocabulary_loss_bytes
from linrnn.accounting.devices import ASSUMED_CPU_SHARE, ASSUMED_MFU, peak_flops_per_second, time_estimate
from linrnn.accounting.flops import StepFlops, model_flops, step_flops
from linrnn.accounting.memory import MemoryEstimate, loss_memory, memory_estimate
from linrnn.accounting.proposal import proposal_flops, proposal_memory, proposal_traffic, recurrent_state_bytes
from linrnn.accounting.traffic import loss_traffic, optimizer_traffic

__all__ = [
    "ASSUMED_CPU_SHARE",
    "ASSUMED_MFU",
    "Communication",
    "MemoryEstimate",
    "StepFlops",
    "communication",
    "loss_memory",
    "loss_traffic",
    "memory_estimate",
    "model_flops",
    "optimizer_traffic",
    "peak_flops_per_second",
    "proposal_flops",
    "proposal_memory",
    "proposal_traffic",
    "recurrent_state_bytes",
    "step_flops",
    "time_estimate",
    "vocabulary_loss_bytes",
]
