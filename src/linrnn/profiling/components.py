"""Measure memory and time of a model's parts in training steps: mixers, MLPs, norms, embedding, loss, optimizer."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.hooks import RemovableHandle

from linrnn.models import LanguageModel
from linrnn.models.language_model import KEPT_PRODUCTS
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


def _parts(modules: dict[str, list[nn.Module]]) -> list[tuple[str, nn.Module]]:
    return [(part, module) for part, own in modules.items() for module in own]


@contextlib.contextmanager
def _removed(hooks: Sequence[RemovableHandle]) -> Iterator[None]:
    """Remove the hooks after the block."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# --------------------------------------------------------------------------------------------- saved activations
class SavedActivations:
    """Bytes that the autograd graph keeps for the backward pass, by the part that saved them.

    The parts are those of :func:`part_modules` and:

    * `loss`: saved after the final norm, including hidden states and a copy of the head.
    * `weight_copies`: the blocks' weights in the compute dtype, under autocast.
    * `other`: saved between the parts. With activation checkpointing a block's inputs count here.

    With selective checkpointing the results that it keeps count for the mixers and the MLPs.

    A tensor that several parts keep counts once, for the first. Parameters do not count.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._part = "other"
        self._seen: set[int] = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self._weight_shapes = {tuple(p.shape) for p in model.parameters() if p.dim() == 2}
        self._weight_shapes |= {shape[::-1] for shape in self._weight_shapes}
        self.bytes: defaultdict[str, int] = defaultdict(int)

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Count what is saved inside the block, during one forward and backward pass."""
        parts = _parts(part_modules(self._model))
        products = _Products(self._product) if self._model.checkpointing == "selective" else contextlib.nullcontext()
        hooks = [
            *(module.register_forward_pre_hook(partial(self._now, part)) for part, module in parts),
            *(module.register_forward_hook(partial(self._now, "other")) for _, module in parts),
            *(block.register_forward_pre_hook(self._block_inputs, with_kwargs=True) for block in self._model.blocks),
            self._model.register_forward_hook(partial(self._now, "loss")),
        ]
        with _removed(hooks), torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor), products:
            yield

    def _now(self, part: str, *_: Any) -> None:
        self._part = part

    def _block_inputs(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._model.checkpointing != "none" and torch.is_grad_enabled():
            for value in (*args, *kwargs.values()):
                if torch.is_tensor(value) and value.is_floating_point():
                    self._count(value)

    def _product(self, result: Tensor) -> None:
        if self._part in ("mixer", "mlp") and torch.is_grad_enabled():
            self._count(result)

    def _pack(self, tensor: Tensor) -> Tensor:
        self._count(tensor)
        return tensor.detach()  # shares the memory; a node that keeps its own output would be a reference cycle

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._seen:
            return
        self._seen.add(storage.data_ptr())
        is_copy = tuple(tensor.shape) in self._weight_shapes and self._part not in ("embedding", "loss")
        self.bytes["weight_copies" if is_copy else self._part] += storage.nbytes()


class _Products(TorchDispatchMode):
    """Shows `seen` the result of each operation that selective checkpointing keeps."""

    def __init__(self, seen: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        if str(operation) in KEPT_PRODUCTS:
            self._seen(result)
        return result


# ---------------------------------------------------------------------------------------------------------- time
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
        parts = _parts({**part_modules(self._model), PROJECTIONS: projections(self._model)})
        hooks = [
            *(module.register_forward_pre_hook(self._enter(part), with_kwargs=True) for part, module in parts),
            *(module.register_forward_hook(self._leave(part)) for part, module in parts),
            self._optimizer.register_step_pre_hook(lambda *_: self.begin("optimizer")),
            self._optimizer.register_step_post_hook(lambda *_: self.end("optimizer")),
        ]
        with _removed(hooks), set_checkpoint_early_stop(False):
            begun = time.perf_counter()
            self.begin("step")
            yield
            self.end("step")
            self._host_seconds = time.perf_counter() - begun

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
