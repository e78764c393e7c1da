"""Named tensors, whole or sharded (DTensors), in torch.distributed.checkpoint's Hugging Face format.

Its default format keeps its index in a pickled `.metadata`. The Hugging Face format keeps names, shapes and offsets in
the headers of the safetensors files, where :func:`shapes` and the reader find them. Every rank writes the parts that
only it holds. Tensors that several ranks hold (replicas) are divided among them. Reading needs no collective: every
rank reads its own part.
"""

import math
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

from linrnn.core.errors import ConfigError, DataError, first_line

FILE_BYTES = 2 << 30  # a file is assembled in memory, so its size is limited
Tensors = dict[str, torch.Tensor]
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def model_tensors(model: torch.nn.Module) -> Tensors:
    """Parameters and buffers by name. A tied one comes once, under its first name."""
    tensors: Tensors = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor.detach()
    return tensors


def optimizer_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """The optimizer's state as `<parameter>/<key>`."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{names[id(parameter)]}/{key}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }


def state_keys(group: dict[str, Any]) -> frozenset[str]:
    """The keys of the state that an optimizer keeps for each parameter of one of its groups: Muon's or AdamW's."""
    return frozenset({"momentum_buffer"} if "ns_steps" in group else {"step", "exp_avg", "exp_avg_sq"})


def foreseen_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of a whole checkpoint, before the optimizer has a state: parameters, buffers and moments."""
    tensors = list(model_tensors(model).values())
    for group in optimizer.param_groups:
        tensors += group["params"] * len(state_keys(group) - {"step"})
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def staged(tensors: Tensors) -> Tensors:
    """Copies in the CPU's memory, which training does not change."""
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
    )
    copies = stager.stage(tensors)
    stager.close()
    assert isinstance(copies, dict)
    return copies


def write(tensors: Tensors, directory: Path, group: dist.ProcessGroup | None) -> None:
    """Write this rank's share. Called by all ranks of `group` (CPU), or by a single process (None).

    Raises:
        OSError, SafetensorError: one rank cannot write. All ranks raise.
    """
    writer = dcp.HuggingFaceStorageWriter(
        str(directory), fqn_to_index_mapping=_file_numbers(tensors), save_distributed=True
    )
    try:
        dcp.save(tensors, storage_writer=writer, process_group=group, no_dist=group is None)
    except CheckpointException as failure:
        raise _cause(failure) from failure


def read(into: Tensors, directory: Path) -> None:
    """Fill tensors, or this rank's parts of them, with the values stored under their names below `directory`.

    Raises:
        DataError: a file or a name is missing, or a file is not safetensors.
    """
    try:
        dcp.load(into, storage_reader=dcp.HuggingFaceStorageReader(str(directory)), no_dist=True)
    except (CheckpointException, SafetensorError, OSError, KeyError, ValueError) as failure:
        error = _cause(failure) if isinstance(failure, CheckpointException) else failure
        raise _unreadable(directory, error) from failure


def shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """The unsharded shape of every tensor below `directory`, by name.

    Raises:
        DataError: a file is missing or is not safetensors.
    """
    try:
        metadata = dcp.HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise _unreadable(directory, error) from error
    return {name: tuple(entry.size) for name, entry in metadata.items()}  # type: ignore[union-attr]


def check(expected: Tensors, there: dict[str, tuple[int, ...]], source: Path) -> None:
    """Compare a model's names and shapes with those of a checkpoint.

    Raises:
        ConfigError: a name or a shape differs.
    """
    for name in sorted(there.keys() | expected.keys()):
        ours = tuple(expected[name].shape) if name in expected else "absent"
        theirs = there.get(name, "absent")
        if ours != theirs:
            raise ConfigError(
                f"{source}: {name} is {theirs} in the checkpoint and {ours} in this model",
                "use the model, size and vocabulary that the checkpoint was trained with",
            )


def empty_state(parameter: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor to read optimizer state into: sharded like its parameter, or a scalar that all ranks have."""
    if shape != tuple(parameter.shape):
        return torch.zeros(shape)
    return torch.zeros_like(parameter, requires_grad=False)


def _file_numbers(tensors: Tensors) -> dict[str, int]:
    """The file number of each tensor, the same on all ranks: in order, with a new file when one is full."""
    numbers, number, filled = {}, 1, 0
    for name, tensor in tensors.items():
        local = tensor.numel() * tensor.element_size()
        size = math.ceil(local / (tensor.device_mesh.size() if isinstance(tensor, DTensor) else 1))
        if filled and filled + size > FILE_BYTES:
            number, filled = number + 1, 0
        numbers[name], filled = number, filled + size
    return numbers


def _cause(failure: CheckpointException) -> Exception:
    """The error of the first rank that failed."""
    error = next(iter(failure.failures.values()))[0]
    return error if isinstance(error, Exception) else RuntimeError(str(error))


def _unreadable(directory: Path, error: Exception) -> DataError:
    return DataError(f"{directory} cannot be read as safetensors ({first_line(error)})", "name another checkpoint")
