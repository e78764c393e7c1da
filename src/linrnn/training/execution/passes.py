"""The forward and backward pass of a micro-step, which the trainer and the benchmarks of whole steps share."""

from typing import Any

import torch
from torch import Tensor

from linrnn.data import Batch
from linrnn.losses import LossBackend
from linrnn.profiling import LossObserver, watched_loss
from linrnn.training.runtime import loss_inputs


def forward_backward(
    model: Any,
    loss: LossBackend,
    batch: Batch,
    *observers: LossObserver,
    tokens: int,
    scale: float,
    precision: str,
    device: torch.device,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Add the gradients of a micro-step.

    Args:
        model: as the ranks share it.
        batch: of this rank, (sequences, tokens), on any device.
        observers: are told when the passes of the loss begin and end.
        tokens: labels of the whole step on all ranks. Gradients are those of the mean loss over all of them.
        scale: a factor of the gradients, `Ranks.loss_scale`.
        precision: `trainer.precision` without `auto`.

    Returns:
        This rank's share of the step's mean loss, in nats, on the device; the backend's statistics by metric.
    """
    # The loss's inputs have no name here, so that they are freed before the blocks' backward pass.
    output = watched_loss(loss, *loss_inputs(model, batch, precision, device), *observers)
    mean_nats = output.sum_nats / tokens
    (mean_nats * scale).backward()
    return mean_nats.detach(), {f"loss/{name}": value for name, value in output.stats.items()}
