"""A model without memory for its parameters, and its initial weights: bit for bit those of `build_model`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from linrnn.models.architecture import Architecture
from linrnn.models.build import initialised, kept_dtype, prepare
from linrnn.models.deferred.part import WHOLE, Part, keep
from linrnn.models.deferred.tape import Tape, Wanted, place_of
from linrnn.models.language_model import LanguageModel

NO_WEIGHT_DECAY = "_no_weight_decay"  # FLA's mark on a parameter


class BlankModel:
    """A model that is sharded, or whose kernels are compiled, before its weights exist.

    Attributes:
        model: its parameters have no values. Its buffers have theirs, on the device of the run.
        part: the rows of each parameter that this rank will hold.
    """

    def __init__(
        self,
        arch: Architecture,
        part: Part | None = None,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        seed: int | None = None,
    ) -> None:
        """Build it. For the other arguments and the errors see :func:`linrnn.models.build_model`.

        Args:
            part: the rows of each parameter that this rank will hold. The parameters are on the meta device, and
                sharding gives them memory. None: this process holds the whole model. The parameters have memory.
        """
        prepare(arch, device, dtype)
        self.part, self._seed, self._tape = part or WHOLE, seed, Tape()
        with self._tape.recording():
            hf = initialised(arch)
        self._places = {name: place_of(parameter) for name, parameter in hf.named_parameters()}
        _replace_parameters(hf, dtype, torch.device("meta") if part else device)
        self._tape.play(_other_tensors(hf, device))
        self.model = LanguageModel(hf, arch).train()

    def draw(self, threads: int = 1) -> None:
        """Give the parameters their initial values, of which this rank keeps its part.

        Each thread draws one parameter after the other, as a whole. With a seed, the numbers come from generators of
        their own, and other threads can use the model's shapes meanwhile.

        Args:
            threads: that draw; 1 without a seed.
        """
        parameters = dict(self.model.hf.named_parameters())
        wanted = [(place, _copy_into(parameters[name], self.part)) for name, place in self._places.items()]
        self._tape.play(wanted, seed=self._seed, threads=threads)


def allocate(model: nn.Module, device: torch.device | str) -> None:
    """Give each parameter on the meta device memory without values: of a sharded one only this rank's part.

    The parameters lose their marks and hooks.
    """
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)


def _copy_into(parameter: nn.Parameter, part: Part) -> Callable[[Tensor], None]:
    def copy(whole: Tensor) -> None:
        keep(parameter.data, whole, part)  # autograd does not notice: a backward pass may run

    return copy


def _replace_parameters(hf: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Replace the parameters, which have no memory, by some on `device` without values. Ties and marks stay."""
    blanks: dict[int, nn.Parameter] = {}
    names = {id(parameter): name for name, parameter in hf.named_parameters()}
    for module in hf.modules():
        for own_name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in blanks:
                kept = kept_dtype(names[id(parameter)], parameter, dtype)
                blank = torch.empty(parameter.shape, dtype=kept, device=device)
                blanks[id(parameter)] = nn.Parameter(blank, parameter.requires_grad)
                if hasattr(parameter, NO_WEIGHT_DECAY):
                    setattr(blanks[id(parameter)], NO_WEIGHT_DECAY, True)
            module._parameters[own_name] = blanks[id(parameter)]


def _other_tensors(hf: Any, device: torch.device) -> list[Wanted]:
    """Buffers, which belong on `device`, and tensors that are plain attributes of a module, with their setters."""
    return [
        (place_of(tensor), _setter(holder, name, target))
        for module in hf.modules()
        for holder, target in ((module._buffers, device), (vars(module), torch.device("cpu")))
        for name, tensor in holder.items()
        if isinstance(tensor, FakeTensor)
    ]


def _setter(holder: dict[str, Any], name: str, device: torch.device) -> Callable[[Tensor], None]:
    def put(value: Tensor) -> None:
        holder[name] = value.to(device, copy=True)

    return put
