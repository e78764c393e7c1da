"""Print as JSON what FLA's own modules hold in a training step, on CPU tensors without the Triton kernels.

Kernels only fill tensors that FLA has allocated. Without the kernels every tensor exists, with meaningless values.
Matrix products are left out too: without bf16 units they take minutes on a CPU. No tensor has real memory.

Arguments: sequences, their length, vocabulary. The cases are every model at the size mve, other chunk sizes than FLA's,
and shared projections, each with several kinds of activation checkpointing, under bf16 autocast. The figures are bytes
beyond the parameters: when the loss begins, and the peak in the backward pass after the final norm.
"""

import json
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.jit import JITFunction

from linrnn.config import load_config
from linrnn.data import Batch
from linrnn.models import build_model, chunk_size, cpu_ops
from linrnn.models.architecture import MODELS, resolve
from linrnn.models.chunk_size import _ChunkGLA
from linrnn.training.runtime import loss_inputs

OWN_SIZES = [("gla", 64), ("gla", 128), ("gated_deltanet", 16), ("kda", 32)]
CASES = [
    *([f"model={name}"] for name in MODELS),
    *([f"model={name}", f"model.chunk_size={size}"] for name, size in OWN_SIZES),
    *([f"model={name}", "model.shared_projection_rank=64"] for name in ("gla", "transformer")),
]
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)


class Held(TorchDispatchMode):
    """Bytes of the live storages that operations have made, and their maximum since `peak` was set."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: dict[int, Any] = {}

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation in PRODUCTS:
            *_, left, right = args
            result = left.new_empty(*left.shape[:-1], right.shape[-1])
        else:
            result = operation(*args, **(kwargs or {}))
        # On a GPU logsigmoid's buffer is empty.
        made = result[:1] if operation is torch.ops.aten.log_sigmoid_forward.default else result
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def leave_out(self, model: nn.Module) -> None:
        """Do not count parameters and buffers where an operation gives them back, as `detach` does."""
        for tensor in (*model.parameters(), *model.buffers()):
            self._alive[id(tensor.untyped_storage())] = weakref.ref(tensor.untyped_storage())

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._alive:
            return
        self._alive[key] = weakref.ref(storage, lambda _: self._gone(key, size))
        self.now += size
        self.peak = max(self.peak, self.now)

    def _gone(self, key: int, size: int) -> None:
        del self._alive[key]
        self.now -= size


def without_kernels() -> None:
    """Launches do nothing, FLA's functions are not replaced, and its autograd functions follow the CPU's autocast."""
    for launcher in (JITFunction, Autotuner, Heuristics):
        launcher.run = lambda *_, **__: None  # type: ignore[method-assign, union-attr]
    cpu_ops.install = lambda: None
    chunk_size.mixers = SimpleNamespace(chunk_gla=chunk_gla)  # type: ignore[assignment]
    for name in ("custom_fwd", "custom_bwd"):
        original = getattr(torch.amp, name)
        setattr(torch.amp, name, lambda function=None, *, device_type, of=original: of(function, device_type="cpu"))


def chunk_gla(*tensors: Tensor, initial_state: Any, cu_seqlens: Any, chunk_size: int, **options: bool) -> Any:
    """The function that a GPU runs if a chunk size is set, in place of the CPU's version."""
    return _ChunkGLA.apply(*tensors, initial_state, *options.values(), cu_seqlens, chunk_size)


def take_numbers_out(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replace every parameter and buffer by a fake tensor of its size. Shared ones stay shared."""
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter not in made:
                made[parameter] = nn.Parameter(mode.from_tensor(parameter.detach()))
            setattr(module, name, made[parameter])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, made.setdefault(buffer, mode.from_tensor(buffer)))


def bytes_held(case: list[str], checkpointing: str, batch_size: int, seq_len: int, vocab_size: int) -> tuple[int, int]:
    """Bytes when the loss begins, and the peak after the final norm's backward pass."""
    config = load_config([*case, "size=mve"])
    model = build_model(resolve(config.model, config.size, vocab_size), device="cpu", seed=0)
    model.set_activation_checkpointing(checkpointing)
    without_numbers = FakeTensorMode()
    take_numbers_out(model, without_numbers)
    with without_numbers, Held() as held:
        held.leave_out(model)
        tokens = torch.zeros(batch_size, seq_len, dtype=torch.int64)
        held.now = 0
        batch = Batch(tokens.clone(), tokens.clone(), None, tokens.numel())
        inputs = list(loss_inputs(model, batch, "bf16_autocast", torch.device("cpu")))
        before_loss = held.now
        loss = inputs[0].sum(dtype=torch.float32) + inputs[1].sum(dtype=torch.float32)
        inputs.clear()

        def blocks_begin(_: torch.Tensor) -> None:
            held.peak = held.now

        model.hf.model.norm.weight.register_post_accumulate_grad_hook(blocks_begin)
        loss.backward()
    return before_loss, held.peak


if __name__ == "__main__":
    without_kernels()
    sizes = [int(size) for size in sys.argv[1:]]
    found = {
        " ".join([*case, checkpointing]): bytes_held(case, checkpointing, *sizes)  # type: ignore[call-arg]
        for case in CASES
        for checkpointing in ("none", *([] if "chunk_size" in case[-1] else ["selective"]), "full")
    }
    print(json.dumps(found))
