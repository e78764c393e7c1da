"""A model without memory for its parameters, and its initial weights: bit for bit those of `build_model`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from linrnn.models.architecture import Architecture
from linrnn.models.build import initialised, kept_dtype, prepare
from linrnn.models.deferred.part import Part, keep
from linrnn.models.deferred.tape import Tape, Wanted, place_of
from linrnn.models.language_model import LanguageModel

NO_WEIGHT_DECAY = "_no_weight_decay"  # FLA's mark on a parameter


class BlankModel:
    """A model that is sharded before its weights exist.

    Shard `model`, which also gives its parameters memory. Then call :meth:`draw`, or load other weights.

    Attributes:
        model: its parameters are on the meta device. Its buffers have their values, on the device of the run.
        part: the rows of each parameter that this rank will hold.
    """

    def __init__(
        self,
        arch: Architecture,
        part: Part,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        seed: int | None = None,
    ) -> None:
        """Build it. For the other arguments and the errors see :func:`linrnn.models.build_model`.

        Args:
            part: the rows of each parameter that this rank will hold.
        """
        prepare(arch, device, dtype)
        self.part, self._seed, self._tape = part, seed, Tape()
        with self._tape.recording():
            hf = initialised(arch)
        self._places = {name: place_of(parameter) for name, parameter in hf.named_parameters()}
        _move_to_meta(hf, dtype)
        self._tape.play(_other_tensors(hf, device))
        self.model = LanguageModel(hf, arch).train()

    def draw(self) -> None:
        """Give the parameters their initial values, of which this rank keeps its part.

        Every rank draws each parameter as a whole, one after the other. The generator's state is restored.
        """
        parameters = dict(self.model.hf.named_parameters())
        with torch.random.fork_rng(devices=[], enabled=self._seed is not None):
            if self._seed is not None:
                torch.manual_seed(self._seed)
            self._tape.play([(place, _copy_into(parameters[name], self.part)) for name, place in self._places.items()])


def allocate(model: nn.Module, device: torch.device | str) -> None:
    """Give each parameter on the meta device memory without values: of a sharded one only this rank's part.

    The parameters lose their marks and hooks.
    """
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)


def _copy_into(parameter: nn.Parameter, part: Part) -> Callable[[Tensor], None]:
    def copy(whole: Tensor) -> None:
        keep(parameter.detach(), whole, part)

    return copy


def _move_to_meta(hf: Any, dtype: torch.dtype) -> None:
    """Replace the parameters, which have no memory, by some on the meta device. Ties and marks stay."""
    blanks: dict[int, nn.Parameter] = {}
    names = {id(parameter): name for name, parameter in hf.named_parameters()}
    for module in hf.modules():
        for own_name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in blanks:
                kept = kept_dtype(names[id(parameter)], parameter, dtype)
                blank = torch.empty(parameter.shape, dtype=kept, device="meta")
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
        holder[name] = value.to(device)

    return put
