"""From a checkpoint back to a model, an optimizer and generators, in place."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from linrnn.checkpoint.files import RNG, TENSORS, read_state
from linrnn.checkpoint.tensors import Tensors, check, empty_state, model_tensors, read, shapes
from linrnn.errors import DataError


@dataclass
class Progress:
    """Where a run stands: optimizer steps done, the loader's position, the latest losses (nats per token)."""

    step: int
    data: dict[str, Any]
    recent_losses: list[float]


def load(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
    """Restore model, optimizer and generators in place; returns the progress to continue from.

    Every rank calls it, and reads what it holds of model and optimizer.

    Raises:
        ConfigError: names or shapes differ from the model's.
        DataError: a file cannot be read.
    """
    load_model(path, model)
    _load_optimizer(path, model, optimizer)
    state = read_state(path)
    _restore_generators(path, state["generators"])
    return Progress(**{field: state[field] for field in ("step", "data", "recent_losses")})


def load_model(path: Path, model: torch.nn.Module) -> None:
    """Restore the parameters alone.

    Raises:
        ConfigError: names or shapes differ from the model's.
        DataError: a file cannot be read.
    """
    tensors = model_tensors(model)
    there = {name: shape for name, shape in shapes(path / TENSORS).items() if "/" not in name}
    check(tensors, there, path)
    with torch.no_grad():
        read(tensors, path / TENSORS)


def _load_optimizer(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    parameters = dict(model.named_parameters())
    numbers = {id(p): i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    tensors: Tensors = {
        full: empty_state(parameters[full.rsplit("/", 1)[0]], shape)
        for full, shape in shapes(path / TENSORS).items()
        if "/" in full
    }
    read(tensors, path / TENSORS)
    state: dict[int, Tensors] = {}
    for full, value in tensors.items():
        name, key = full.rsplit("/", 1)
        state.setdefault(numbers[id(parameters[name])], {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


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


def _restore_generators(path: Path, values: dict[str, Any]) -> None:
    try:
        tensors = load_file(path / RNG)
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path / RNG} cannot be read as safetensors ({error})", "name another checkpoint") from error
    torch.set_rng_state(tensors["cpu"])
    if "cuda" in tensors and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(tensors["cuda"])
    version, internal, gauss = values["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = values["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
