"""Peak memory by component, read from the allocator's counters. Steps do not become slower."""

import resource
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from linrnn.models.build import own_rows
from linrnn.profiling.observe import LOSS_BACKWARD, LOSS_FORWARD


def tensor_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of `tensors` on this rank; None counts as 0. The tensors must not share memory."""
    return sum(own_rows(tensor).nbytes for tensor in tensors if tensor is not None)


class MemoryByComponent:
    """Bytes of parameters, gradients, optimizer state, activations and the output layer, and the peak.

    After :meth:`start`, the first call of :func:`watched_loss` and the first optimizer update are measured in detail.
    The host only reads the allocator's counters, so that step takes no longer than others. On CPU the tensors are
    counted. The peak there is the resident set of the whole process since its start, including imports and data
    (`resident_peak`). Activations and output layer cannot be separated on CPU.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._parameters, self._optimizer = list(model.parameters()), optimizer
        self._device, self._cuda = device, device.type == "cuda"
        self._before_loss = 0
        self._earlier_peak = 0  # the peak before the last reset of the allocator's own peak
        self._due: set[str] = set()
        self._bytes: dict[str, int] = {"parameters": tensor_bytes(self._parameters)}
        optimizer.register_step_pre_hook(self._count_gradients)

    def start(self) -> None:
        """Start measuring: reset the peak, and measure the next step in detail."""
        self._due = {"gradients", LOSS_FORWARD, LOSS_BACKWARD}
        if self._cuda:
            self._earlier_peak = 0
            torch.cuda.reset_peak_memory_stats(self._device)

    def report(self) -> dict[str, int]:
        """Bytes by component, for the components measured so far.

        On CUDA:

        * `peak`: the most that was allocated at once since :meth:`start`.
        * `activations`: allocated when the output layer began, minus parameters, gradients and optimizer state. These
          are saved activations, compute-dtype copies of weights, and the batch.
        * `loss_forward`, `loss_backward`: the most that each pass of the output layer allocated beyond that, including
          gradients of hidden states and weight.
        """
        state = (value for entry in self._optimizer.state.values() for value in entry.values())
        report = {**self._bytes, "optimizer": tensor_bytes(value for value in state if torch.is_tensor(value))}
        if self._cuda:
            return {**report, "peak": self._peak()}
        return {**report, "resident_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}

    def begin(self, name: str) -> None:
        """A pass of the output layer begins. Called by :func:`watched_loss`."""
        if self._cuda and name in self._due:
            self._earlier_peak = self._peak()
            torch.cuda.reset_peak_memory_stats(self._device)
            if name == LOSS_FORWARD:
                self._before_loss = torch.cuda.memory_allocated(self._device)
                fixed = self.report()["optimizer"] + self._bytes["parameters"] + self._gradient_bytes()
                self._bytes["activations"] = self._before_loss - fixed

    def end(self, name: str) -> None:
        """A pass of the output layer ends. Called by :func:`watched_loss`."""
        if self._cuda and name in self._due:
            self._due.discard(name)
            most = torch.cuda.max_memory_allocated(self._device)
            self._bytes[name.replace("/", "_")] = most - self._before_loss

    def _count_gradients(self, *_: object) -> None:
        if "gradients" in self._due:
            self._due.discard("gradients")
            self._bytes["gradients"] = self._gradient_bytes()

    def _gradient_bytes(self) -> int:
        return tensor_bytes(parameter.grad for parameter in self._parameters)

    def _peak(self) -> int:
        return max(self._earlier_peak, torch.cuda.max_memory_allocated(self._device))
