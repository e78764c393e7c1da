"""GPUs for which a run can be estimated without having one, and the time of a step there.

A step's time is a sum: matrix products and recurrences at a share of the peak, and the bytes of activations, loss and
optimizer state at a share of the memory's bandwidth. The shares were fitted to the committed rows of whole steps of
350M and 1.3B parameters on an H100 and an H200 (results/summaries). tests/costs/test_forecasts.py compares all of them.
"""

from dataclasses import dataclass, replace

from linrnn.config.schema import Config
from linrnn.core.machine import GIB
from linrnn.costs.devices import peak_flops_per_second
from linrnn.costs.flops import kernel_flops
from linrnn.costs.memory import memory_estimate
from linrnn.models.architecture import Architecture


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    Attributes:
        name: as PyTorch gives it; by it the peak rates are found (:mod:`linrnn.costs.devices`).
        memory_bytes: what PyTorch sees; less than the datasheet's.
        bytes_per_second: the memory's bandwidth, from the datasheet.
        is_measured: whether committed rows are of this GPU.
    """

    name: str
    memory_bytes: float
    bytes_per_second: float
    is_measured: bool = False


# Bandwidths: NVIDIA's datasheets (H100 and H200 SXM, A100 SXM of 80 GB, L40S) and the Ada white paper.
GPUS = {
    "h100": Gpu("NVIDIA H100 80GB HBM3", 79.2 * GIB, 3.35e12, True),
    "h200": Gpu("NVIDIA H200", 139.8 * GIB, 4.8e12, True),
    "a100": Gpu("NVIDIA A100-SXM4-80GB", 79.2 * GIB, 2.039e12),
    "l40s": Gpu("NVIDIA L40S", 44.4 * GIB, 0.864e12),
    "rtx4090": Gpu("NVIDIA GeForce RTX 4090", 23.5 * GIB, 1.008e12),
}
SHARE_OF_PRODUCTS = 0.70  # of the peak: projections, MLP and vocabulary
SHARE_OF_SCANS = {"transformer": 0.50, "kda": 0.017}  # of the peak: attention and recurrences
SHARE_OF_OTHER_SCANS = 0.06
PASSES_OF_ACTIVATIONS = 15.3  # over what the blocks save, for all elementwise work of both passes
MORE_PASSES = {"none": 1.0, "selective": 1.22, "full": 1.0}
PASSES_OF_LOSS = 4.2  # over what the loss holds
PASSES_OF_OPTIMIZER = 28  # bytes a parameter: AdamW reads four numbers of fp32 and writes three
LEAST_SECONDS = 0.018  # of a step: the host's work for a small model
MEASURED_RANGE, OTHER_RANGE = 0.15, 0.25  # 9 of 10 rows lie within the first; another GPU has no row


def step_seconds(gpu: Gpu, arch: Architecture, config: Config, precision: str, ranks: int = 1) -> float | None:
    """Seconds of an optimizer step of a run on each of `ranks` such GPUs, without their communication.

    None for a model or a loss without formulas.
    """
    peak, again = peak_flops_per_second(gpu.name, precision), config.trainer.activation_checkpointing
    flops = kernel_flops(arch, config, precision, ranks)
    once = replace(config.trainer, activation_checkpointing="none")  # a block computed again moves the same bytes
    memory = memory_estimate(arch, replace(config, trainer=once), precision, ranks)
    if peak is None or flops is None or memory is None:
        return None
    scans = flops["mixer_scan"]
    products = (sum(flops.values()) - scans - flops["update"]) / (SHARE_OF_PRODUCTS * peak)
    products += scans / (SHARE_OF_SCANS.get(arch.model, SHARE_OF_OTHER_SCANS) * peak)
    saved = sum(memory.activations[name] for name in ("mixer", "mlp", "residual"))
    moved = PASSES_OF_ACTIVATIONS * MORE_PASSES[again] * saved
    moved += PASSES_OF_LOSS * (memory.loss_forward + memory.loss_backward)
    updated = arch.n_parameters // config.parallel.ranks_of_model(ranks)  # by this rank
    moved = config.trainer.accumulation_steps * moved + PASSES_OF_OPTIMIZER * updated
    return max(products + moved / gpu.bytes_per_second, LEAST_SECONDS)


def uncertainty(gpu: Gpu) -> float:
    """By how much of itself an estimated time may be wrong."""
    return MEASURED_RANGE if gpu.is_measured else OTHER_RANGE
