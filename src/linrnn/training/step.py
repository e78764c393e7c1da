"""One step: the loss's inputs, the state of the run, and the step's scalars on their way from the device."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from linrnn.data import Batch
from linrnn.models import LanguageModel
from linrnn.runs.summary import MEAN_OF_LAST
from linrnn.training.runtime import autocast, compute_dtype


def loss_inputs(
    model: LanguageModel, batch: Batch, precision: str, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The three inputs of every loss backend: hidden (N, D) and weight (V, D) in the compute dtype, labels (N,)."""
    dtype = compute_dtype(precision)
    cu_seqlens = None if batch.cu_seqlens is None else _sent(batch.cu_seqlens, device)
    input_ids, labels = _sent(batch.input_ids, device), _sent(batch.labels, device)
    with autocast(precision, device):
        hidden_BTD = model(input_ids, cu_seqlens=cu_seqlens)
    return hidden_BTD.flatten(0, 1).to(dtype), model.head(dtype), labels.flatten()


def _sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy `tensor` to the device; to a GPU from pinned memory.

    From other memory the host might wait until the GPU has finished all earlier work.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


@dataclass
class RunState:
    """The state of a run.

    Attributes:
        step: optimizer steps done by all processes of the run.
        steps_here: steps done by this process.
        recent_losses: losses of the latest steps, nats.
        continues: the run, step and tokens behind step 0; None for a run from scratch.
        saved_step: step of the newest checkpoint.
    """

    step: int = 0
    steps_here: int = 0
    recent_losses: deque[float] = field(default_factory=lambda: deque(maxlen=MEAN_OF_LAST))
    continues: dict[str, Any] | None = None
    saved_step: int | None = None


class StepRecord:
    """A step's scalars on their way from the device. They are copied without waiting, and read once they have arrived.

    Attributes:
        step: number of the step in the run.
        number_here: number of the step in this process, from 1.
        lr: the step's learning rate.
    """

    def __init__(self, state: RunState, lr: float, tensors: dict[str, torch.Tensor]) -> None:
        self.step, self.number_here, self.lr = state.step, state.steps_here, lr
        self._names = list(tensors)
        stacked = torch.stack([tensor.detach().float() for tensor in tensors.values()])
        self._values = stacked.to("cpu", non_blocking=True)
        self._arrived = torch.cuda.Event() if stacked.is_cuda else None
        if self._arrived:
            self._arrived.record()

    def read(self) -> dict[str, float]:
        if self._arrived:
            self._arrived.synchronize()
        return dict(zip(self._names, self._values.tolist(), strict=True))
