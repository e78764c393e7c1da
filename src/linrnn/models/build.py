"""A model that is sharded before its weights exist, and its initial weights, of which each rank keeps its rows.

The model is built on the meta device. Then one part of it after the other is made on the device of the run, as FLA does
it: a block by its constructor, an embedding, a norm or the head by its reset. A part's random numbers depend on the
seed and the part's name alone. So the weights are the same for any number of ranks, and no rank ever holds more than
its rows and one part.
"""

import copy
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from linrnn.core.errors import ConfigError
from linrnn.models import cpu_ops
from linrnn.models.architecture import Architecture
from linrnn.models.facts import KEPT_IN_FP32
from linrnn.models.fla_any import backbone_of, build_hf
from linrnn.models.language_model import LanguageModel

NO_WEIGHT_DECAY = "_no_weight_decay"  # FLA's mark on a parameter


@dataclass(frozen=True)
class RowShard:
    """The rows of one rank, out of `count` shards of equal size. The last ones may have fewer rows or none.

    FSDP2 and torch.chunk cut tensors in the same way.
    """

    index: int
    count: int

    def of(self, whole: Tensor) -> Tensor:
        """These rows of a tensor, as a view."""
        rows = -(-len(whole) // self.count) if whole.ndim else 0
        return whole[self.index * rows : (self.index + 1) * rows] if whole.ndim else whole


WHOLE = RowShard(0, 1)


def own_rows(tensor: Tensor) -> Tensor:
    """This rank's rows of a sharded tensor (a DTensor), in the same memory. Any other tensor stays as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def copy_rows(tensor: Tensor, value: Tensor, row_shard: RowShard) -> None:
    """Copy a value into a tensor; into a DTensor, whose rows this rank has as `row_shard`, those rows of the value."""
    if hasattr(tensor, "to_local"):
        tensor.to_local().copy_(row_shard.of(value))
    else:
        tensor.copy_(value)


def build_model(
    arch: Architecture, *, device: torch.device | str, dtype: torch.dtype = torch.float32, seed: int = 0
) -> LanguageModel:
    """Build FLA's model for `arch`, initialised as FLA does.

    A seed gives the same weights for any number of ranks. A CPU and a GPU give other ones.

    Args:
        dtype: of the parameters, fp32 or bf16; A_log and dt_bias stay in fp32.

    Raises:
        ConfigError: another dtype.
        UnsupportedError: the model has no CPU form, and `device` is a CPU.
    """
    blank = BlankModel(arch, device=torch.device(device), dtype=dtype)
    blank.init_weights(seed)
    return blank.model


class BlankModel:
    """A model that can be sharded before its weights exist.

    Attributes:
        model: its parameters have no values. Its buffers have theirs, on the device of the run.
        row_shard: the rows of each parameter that this rank will hold.
    """

    def __init__(
        self,
        arch: Architecture,
        row_shard: RowShard | None = None,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Build it. For the other arguments and the errors see :func:`linrnn.models.build_model`.

        Args:
            row_shard: the rows of each parameter that this rank will hold. The parameters are on the meta device, and
                sharding gives them memory. None: this process holds the whole model. The parameters have memory.
        """
        if dtype not in (torch.float32, torch.bfloat16):
            raise ConfigError(f"parameters in {dtype} are not supported", "use fp32 or bf16 parameters")
        cpu_ops.prepare(arch.kind, device)
        hf = build_hf(arch.kind, arch.settings, "meta")
        self.row_shard, self._device = row_shard or WHOLE, device
        self._makers = dict(_makers(hf))
        _replace_parameters(hf, dtype, torch.device("meta") if row_shard else device)
        for name, maker in self._makers.items():
            module = hf.get_submodule(name)
            if next(module.buffers(), None) is not None:
                with self._on_device(0):
                    made = dict(maker().named_modules())
                for layer_name, layer in module.named_modules():
                    layer._buffers.update(made[layer_name]._buffers)
        self.model = LanguageModel(hf, arch).train()

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Give the parameters their initial values, of which this rank keeps its rows.

        The numbers come from the device's own generator, whose state is restored. A CPU and a GPU give other values.
        """
        missing = dict(self.model.hf.named_parameters())  # a tied head is not among them
        for name, maker in self._makers.items():
            here = {key: missing.pop(key) for key in [*missing] if key.startswith(f"{name}.")}
            if not here:
                continue
            with self._on_device(int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8])):
                values = dict(maker().named_parameters(name))
            for key, parameter in here.items():
                copy_rows(parameter.detach(), values[key], self.row_shard)
        for parameter in missing.values():  # the backbone's own, FLA's lower bounds of decay
            parameter.detach().zero_()

    @contextmanager
    def _on_device(self, seed: int) -> Iterator[None]:
        """Within the context, new tensors are on the device, and random numbers are those of the seed."""
        gpus = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(gpus), torch.device(self._device):
            torch.manual_seed(seed)
            yield


def allocate(model: nn.Module, device: torch.device | str) -> None:
    """Give each parameter on the meta device memory without values: of a sharded one only this rank's rows.

    The parameters lose their marks and hooks.
    """
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)


def _makers(hf: Any) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """For each part of FLA's model `hf`, by its name: what makes another one, with initial values."""
    backbone, names = backbone_of(hf), {module: name for name, module in hf.named_modules()}
    for number, block in enumerate(backbone.layers):
        yield names[block], partial(_another_block, copy.copy(backbone), type(block), number)
    for owner in (backbone, hf):
        for name, module in owner.named_children():
            if module is not backbone and module is not backbone.layers:
                yield names[module], partial(_another_part, copy.copy(owner), name, copy.deepcopy(module))


def _another_block(owner: Any, kind: type[nn.Module], number: int) -> nn.Module:
    return _initialised(owner, "block", kind(owner.config, number))


def _another_part(owner: Any, name: str, blank: nn.Module) -> nn.Module:
    """A part outside of the blocks, first as torch makes it."""
    part = copy.deepcopy(blank).to_empty(device=torch.get_default_device())
    for module in part.modules():
        if reset := getattr(module, "reset_parameters", None):
            reset()
    return _initialised(owner, name, part)


def _initialised(owner: Any, name: str, part: nn.Module) -> nn.Module:
    """A part with the values that transformers gives it at the end of FLA's constructor.

    Args:
        owner: FLA's model whose part it is. It keeps no other part.
    """
    owner._modules = {name: part}
    owner._is_hf_initialized = True  # its own parameters
    owner.initialize_weights()
    owner._modules = {}
    return part


def _replace_parameters(hf: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Replace the parameters on the meta device by some on `device` without values. Ties and marks stay."""
    blanks: dict[int, nn.Parameter] = {}
    names = {id(parameter): name for name, parameter in hf.named_parameters()}
    for module in hf.modules():
        for own_name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in blanks:
                kept = parameter.dtype if names[id(parameter)].endswith(KEPT_IN_FP32) else dtype
                blank = torch.empty(parameter.shape, dtype=kept, device=device)
                blanks[id(parameter)] = nn.Parameter(blank, parameter.requires_grad)
                if hasattr(parameter, NO_WEIGHT_DECAY):
                    setattr(blanks[id(parameter)], NO_WEIGHT_DECAY, True)
            module._parameters[own_name] = blanks[id(parameter)]
