"""Measure the time of a model's parts in training steps: mixers, MLPs, norms, embedding, loss, optimizer."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from linrnn.models import LanguageModel
from linrnn.profiling.observe import LOSS_BACKWARD, marked
from linrnn.profiling.timers import moment, seconds_between

PROJECTIONS = "mixer/projections"
_AGAIN = f"{PROJECTIONS}/recomputed"


def part_modules(model: LanguageModel) -> dict[str, list[nn.Module]]:
    """The modules of each part. Together they hold every parameter except an untied head's.

    A few models have a parameter for all layers, which stands in no module of a part.
    """
    return {"embedding": [model.embedding], "norms": model.norms, "mixer": model.mixers, "mlp": model.mlps}


def projections(model: LanguageModel) -> list[nn.Module]:
    """The linear layers inside of the mixers. A layer whose weight a fused kernel reads itself is never called."""
    return [layer for mixer in model.mixers for layer in mixer.modules() if isinstance(layer, nn.Linear)]


class PartClock:
    """Time between the moments when the device enters and leaves each part, forward and backward.

    The parts are those of :func:`part_modules`, and :data:`PROJECTIONS`, which lie inside of the mixers. On a GPU the
    moments are CUDA events. A part's time includes gaps in which the device waits for the host, so parts of small
    models take longer than their kernels.

    `recomputed` is what activation checkpointing runs again. It happens within a backward pass and is not counted
    there. The clock makes checkpointing finish each block; normally it leaves out the last product.

    `host` is the time until the host had given the device all work of the step.

    The clock can replace `MemoryByComponent` in :func:`linrnn.profiling.watched_loss`.
    """

    def __init__(self, model: LanguageModel, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._model, self._optimizer, self._cuda = model, optimizer, device.type == "cuda"
        self._backward = False
        self._host_seconds = 0.0
        self._open: dict[str, tuple[Any, int]] = {}  # the moment, and the number of intervals before it
        self._intervals: list[tuple[str, Any, Any, list[int]]] = []  # name, begun, ended, intervals to subtract

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Time one step: forward and backward passes and optimizer."""
        modules = {**part_modules(self._model), PROJECTIONS: projections(self._model)}
        parts = [(part, module) for part, own in modules.items() for module in own]
        hooks = [
            *(module.register_forward_pre_hook(self._enter(part), with_kwargs=True) for part, module in parts),
            *(module.register_forward_hook(self._leave(part)) for part, module in parts),
            self._optimizer.register_step_pre_hook(lambda *_: self.begin("optimizer")),
            self._optimizer.register_step_post_hook(lambda *_: self.end("optimizer")),
        ]
        try:
            with set_checkpoint_early_stop(False):
                begun = time.perf_counter()
                self.begin("step")
                yield
                self.end("step")
                self._host_seconds = time.perf_counter() - begun
        finally:
            for hook in hooks:
                hook.remove()

    def seconds(self) -> dict[str, float]:
        """Seconds by `part/forward`, `part/backward`, `part/recomputed`, `optimizer`, `step`, `host`.

        Waits for the device.
        """
        if self._cuda:
            torch.cuda.synchronize()
        lengths = [seconds_between(begun, ended) for _, begun, ended, _ in self._intervals]
        total: defaultdict[str, float] = defaultdict(float)
        for (name, _, _, inside), length in zip(self._intervals, lengths, strict=True):
            total[name] += length - sum(lengths[index] for index in inside)
        return {**total, "host": self._host_seconds}

    def _enter(self, part: str) -> Callable[..., Any]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not torch.is_grad_enabled():
                return None
            self.begin(f"{part}/{'recomputed' if self._backward else 'forward'}")
            given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
            for name, value in given.items():
                if torch.is_tensor(value) and value.requires_grad:  # the first
                    given[name] = marked(value, lambda: self.end(f"{part}/backward"))
                    break
            return tuple(given.pop(place) for place in range(len(args))), given

        return enter

    def _leave(self, part: str) -> Callable[..., Any]:
        def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if not torch.is_grad_enabled():
                return None
            self.end(f"{part}/{'recomputed' if self._backward else 'forward'}")
            first, *rest = output if isinstance(output, tuple) else (output,)
            first = marked(first, lambda: self.begin(f"{part}/backward"))
            return (first, *rest) if isinstance(output, tuple) else first

        return leave

    def begin(self, name: str) -> None:
        """A part's pass begins. Also called by :func:`watched_loss`."""
        if name.startswith("loss/"):
            self._backward = name == LOSS_BACKWARD
        self._open[name] = moment(self._cuda), len(self._intervals)

    def end(self, name: str) -> None:
        """A part's pass ends. The embedding's backward pass is not counted: no gradient reaches its input."""
        if name not in self._open:
            return
        begun, first = self._open.pop(name)
        # Projections computed again lie inside of a mixer that is computed again: subtracted with it.
        names = [interval[0] for interval in self._intervals]
        again = [i for i in range(first, len(names)) if names[i].endswith("/recomputed") and names[i] != _AGAIN]
        self._intervals.append((name, begun, moment(self._cuda), again if name.endswith("/backward") else []))
