"""Load a checkpoint into an existing model, optimizer and generators."""

import random
import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from linrnn.core.errors import ConfigError, DataError
from linrnn.training.checkpoint.files import RNG, TENSORS, read_state
from linrnn.training.checkpoint.tensors import Tensors, check, empty_state, model_tensors, read, shapes, state_keys


@dataclass
class Progress:
    """The progress of a run, and everything but tensors and configuration that its next steps depend on.

    Attributes:
        run: `<group>/<run_name>`.
        step: optimizer steps done.
        tokens: tokens trained on in these steps, over all ranks.
        data: the loader's position.
        recent_losses: nats per token.
        schedule: everything that decides the learning rate of every step
            (`linrnn.training.optimizer.Schedule.describe`).
        token_fingerprint: identifies the meaning of token ids (`linrnn.data.PreparedData`).
        continues: `run`, `step` and `tokens` of the checkpoint from which step 0 took weights and optimizer state. The
            tokens include all those behind that checkpoint. None for a run that began otherwise.
    """

    run: str
    step: int
    tokens: int
    data: dict[str, Any]
    recent_losses: list[float]
    schedule: dict[str, Any]
    token_fingerprint: str
    continues: dict[str, Any] | None = None


def load(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Restore model, optimizer and generators in place. :func:`read_progress` reads the rest.

    Every rank calls it, and reads its own part of model and optimizer.

    Raises:
        ConfigError: names or shapes differ from the model's.
        DataError: a file cannot be read.
    """
    load_model(path, model)
    load_optimizer(path, model, optimizer)
    _restore_generators(path, read_state(path)["generators"])


def read_progress(path: Path) -> Progress:
    """The progress of a checkpoint.

    Raises:
        DataError: the checkpoint cannot be read, or an earlier version wrote it.
    """
    state = read_state(path)
    names = [field.name for field in fields(Progress)]
    if missing := [name for name in names if name not in state]:
        raise DataError(
            f"{path} was written by an earlier version (no {missing[0]})",
            "train the run again with this version",
        )
    return Progress(**{name: state[name] for name in names})


def load_model(path: Path, model: torch.nn.Module) -> None:
    """Restore the parameters only.

    Raises:
        ConfigError: names or shapes differ from the model's.
        DataError: a file cannot be read.
    """
    tensors = model_tensors(model)
    there = {name: shape for name, shape in shapes(path / TENSORS).items() if "/" not in name}
    check(tensors, there, path)
    with torch.no_grad():
        read(tensors, path / TENSORS)


def load_optimizer(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Restore the optimizer's state (moments and step counts). Learning rates and weight decay stay as they are.

    Raises:
        ConfigError: another optimizer wrote the state.
        DataError: a file cannot be read.
    """
    parameters = dict(model.named_parameters())
    numbers = {id(p): i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    keys = {id(p): state_keys(group) for group in optimizer.param_groups for p in group["params"]}
    for full in shapes(path / TENSORS):
        name, _, key = full.partition("/")
        if key and key not in keys[id(parameters[name])]:
            its_own, weights = "muon" if key == "momentum_buffer" else "adamw", shlex.quote(f"init_from={path}")
            raise ConfigError(
                f"{path} holds {key} of {name}, which belongs to another optimizer",
                f"use optimizer={its_own}, or {weights} continue_from=null for its weights alone",
            )
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
