"""Load a checkpoint into an existing model, optimizer and generators. Every rank reads its own part, alone."""

import random
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException

from linrnn.core.errors import ConfigError
from linrnn.training.checkpoint.format import (
    RNG,
    TENSORS,
    Tensors,
    model_tensors,
    read_state,
    shapes,
    state_keys,
    unreadable,
)


def load(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Restore model, optimizer and generators in place. `format.read_progress` reads the rest.

    Raises:
        ConfigError: names or shapes differ from the model's.
        DataError: a file cannot be read.
    """
    load_model(path, model)
    load_optimizer(path, model, optimizer)
    _restore_generators(path)


@torch.no_grad()
def load_model(path: Path, model: torch.nn.Module) -> None:
    """Restore the parameters only.

    Raises:
        ConfigError: names or shapes differ from the model's.
        DataError: a file cannot be read.
    """
    tensors = model_tensors(model)
    there = {name: shape for name, shape in shapes(path / TENSORS).items() if "/" not in name}
    for name in sorted(there.keys() | tensors.keys()):
        ours = tuple(tensors[name].shape) if name in tensors else "absent"
        theirs = there.get(name, "absent")
        if ours != theirs:
            raise ConfigError(
                f"{path}: {name} is {theirs} in the checkpoint and {ours} in this model",
                "use the model, size and vocabulary that the checkpoint was trained with",
            )
    _read(tensors, path / TENSORS)


def load_optimizer(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Restore the optimizer's state (moments and step counts). Learning rates and weight decay stay as they are.

    Raises:
        ConfigError: another optimizer wrote the state.
        DataError: a file cannot be read.
    """
    parameters = dict(model.named_parameters())
    members = [(parameter, state_keys(group)) for group in optimizer.param_groups for parameter in group["params"]]
    numbers = {id(parameter): number for number, (parameter, _) in enumerate(members)}
    keys = {id(parameter): own for parameter, own in members}
    tensors: Tensors = {}
    state: dict[int, Tensors] = {}
    for full, shape in shapes(path / TENSORS).items():
        name, _, key = full.partition("/")
        if not key:
            continue
        parameter = parameters[name]
        if key not in keys[id(parameter)]:
            its_own, weights = "muon" if key == "momentum_buffer" else "adamw", shlex.quote(f"init_from={path}")
            raise ConfigError(
                f"{path} holds {key} of {name}, which belongs to another optimizer",
                f"use optimizer={its_own}, or {weights} continue_from=null for its weights alone",
            )
        # Sharded like its parameter, or a scalar that all ranks have.
        like = shape == tuple(parameter.shape)
        tensors[full] = torch.zeros_like(parameter, requires_grad=False) if like else torch.zeros(shape)
        state.setdefault(numbers[id(parameter)], {})[key] = tensors[full]
    _read(tensors, path / TENSORS)
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _read(into: Tensors, directory: Path) -> None:
    """Fill tensors, or this rank's parts of them, with the values stored under their names below `directory`.

    Raises:
        DataError: a file or a name is missing, or a file is not safetensors.
    """
    try:
        dcp.load(into, storage_reader=dcp.HuggingFaceStorageReader(str(directory)), no_dist=True)
    except CheckpointException as failure:
        raise unreadable(directory, next(iter(failure.failures.values()))[0]) from failure  # type: ignore[arg-type]
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise unreadable(directory, error) from error


# ------------------------------------------------------------------------------------------------------ generators
def generator_tensors() -> Tensors:
    """States of torch's generators."""
    tensors = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        tensors["cuda"] = torch.cuda.get_rng_state()
    return tensors


def generator_values() -> dict[str, Any]:
    """States of Python's and numpy's global generators, as JSON values."""
    kind, keys, *rest = np.random.get_state()
    return {"python": random.getstate(), "numpy": [kind, np.asarray(keys).tolist(), *rest]}


def _restore_generators(path: Path) -> None:
    """Put back what :func:`generator_tensors` and :func:`generator_values` gave."""
    try:
        tensors = load_file(path / RNG)
    except (SafetensorError, OSError) as error:
        raise unreadable(path / RNG, error) from error
    values = read_state(path)["generators"]
    torch.set_rng_state(tensors["cpu"])
    if "cuda" in tensors and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(tensors["cuda"])
    version, internal, gauss = values["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = values["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
