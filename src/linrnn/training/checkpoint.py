"""Checkpoints without pickle: what one holds, how to find a sound one, and how to load it.

:mod:`linrnn.training.checkpointer` writes them.

`checkpoints/step_00000200/` holds

    tensors/*.safetensors  parameters under the Hugging Face names of FLA's model; the optimizer's state as
                           `<parameter>/exp_avg` …; each rank's part in torch.distributed.checkpoint's Hugging Face
                           format: names, shapes and offsets in the headers, no pickled .metadata
    rng.safetensors        states of torch's generators
    state.json             a Progress, Python's and numpy's generators, sha256 of all files above
    config.yaml            the run's configuration, so that a checkpoint explains itself

Any number of ranks can read it, with any sharding: each reads its own part, alone.
"""

import hashlib
import json
import random
import shlex
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException

from linrnn.config import nearest
from linrnn.core.checksums import sha256
from linrnn.core.errors import ConfigError, DataError, first_line
from linrnn.core.output import say

TENSORS, RNG, STATE, CONFIG = "tensors", "rng.safetensors", "state.json", "config.yaml"
PREFIX, PARTIAL = "step_", ".partial"
HASHING_THREADS = 4
Tensors = dict[str, torch.Tensor]


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


def read_progress(path: Path) -> Progress:
    """The progress of a checkpoint.

    Raises:
        DataError: the checkpoint cannot be read.
    """
    state = read_state(path)
    return Progress(**{field.name: state[field.name] for field in fields(Progress)})


# ---------------------------------------------------------------------------------------------------- directories
def directory_of(root: Path, step: int) -> Path:
    return root / f"{PREFIX}{step:08d}"


def found(root: Path) -> list[Path]:
    """Complete checkpoint directories below `root`, oldest first."""
    return sorted(path for path in root.glob(f"{PREFIX}*") if path.suffix != PARTIAL and (path / STATE).exists())


def newest(root: Path) -> Path | None:
    """The newest checkpoint below `root` whose files match their checksums. Damaged ones are reported and skipped."""
    for path in reversed(found(root)):
        if (damage := damaged(path)) is None:
            return path
        say(f"skipping {path}: {damage}")
    return None


def resolve(source: Path) -> Path | None:
    """The checkpoint that `source` means: itself, or the newest of a run directory or its checkpoints/; else None.

    Raises:
        DataError: `source` itself is a checkpoint and is damaged, or all checkpoints there are.
    """
    if (source / STATE).exists():
        if damage := damaged(source):
            raise DataError(f"{source} is damaged: {damage}", "name another checkpoint of the run, or the run itself")
        return source
    roots = (source / "checkpoints", source)
    for root in roots:
        if path := newest(root):
            return path
    if names := [path.name for root in roots for path in found(root)]:
        raise DataError(
            f"{source} has only damaged checkpoints ({', '.join(names)})",
            "copy the run again, or name another one; its own command trains it again from step 0",
        )
    return None


def required(key: str, source: str, remedy: str = "name a run's directory or one of its checkpoints/step_*") -> Path:
    """:func:`resolve`, where there must be a checkpoint.

    Args:
        key: the configuration key that names `source`, for messages.
        remedy: what else to name. The run nearby whose name is most like `source` is added.

    Raises:
        ConfigError: there is none.
        DataError: as for `resolve`.
    """
    path = Path(source)
    if directory := resolve(path):
        return directory
    wrong = "holds no complete checkpoint" if path.is_dir() else "is no directory"
    if (path / "config.json").is_file():
        wrong = "is a Hugging Face directory, and no run"
    roots = [*path.parent.glob("*/checkpoints"), *path.glob("*/checkpoints"), *path.glob("*/*/checkpoints")]
    if runs := nearest(source, sorted(str(root.parent) for root in roots if found(root)), 1):
        remedy = f"{remedy}, as {runs[0]}"
    raise ConfigError(f"{key}={source} {wrong}", remedy)


# ------------------------------------------------------------------------------------------------------- checksums
def damaged(path: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None."""
    try:
        recorded = read_state(path)["sha256"]
    except DataError as error:
        return error.cause
    for name in recorded:
        if not (path / name).is_file():
            return f"{name} is missing"
    there = checksums(path, recorded)
    different = [name for name, checksum in recorded.items() if there[name] != checksum]
    if surplus := {str(file.relative_to(path)) for file in (path / TENSORS).glob("*")} - recorded.keys():
        return f"{min(surplus)} is not one of its files"
    return f"{different[0]} does not match its checksum" if different else None


def checksums(directory: Path, names: Iterable[str]) -> dict[str, str]:
    """sha256 of files below `directory`, by name."""
    names = list(names)
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        return dict(zip(names, pool.map(sha256, (directory / name for name in names)), strict=True))


def write_state(directory: Path, state: dict[str, Any]) -> None:
    """Write `state` with a checksum of itself. `state["sha256"]` has the checksums of all other files."""
    text = json.dumps(state)
    (directory / STATE).write_text(json.dumps([hashlib.sha256(text.encode()).hexdigest(), text]), encoding="utf-8")


def read_state(directory: Path) -> dict[str, Any]:
    """The state that :func:`write_state` wrote.

    Raises:
        DataError: the file is missing or has changed.
    """
    try:
        checksum, text = json.loads((directory / STATE).read_text(encoding="utf-8"))
        if hashlib.sha256(text.encode()).hexdigest() != checksum:
            raise ValueError
        return json.loads(text)
    except (ValueError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise DataError(f"{STATE} does not match its checksum", f"name another checkpoint than {directory}") from error


# --------------------------------------------------------------------------------------------------------- tensors
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


def shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """The unsharded shape of every tensor below `directory`, by name.

    Raises:
        DataError: a file is missing or is not safetensors.
    """
    try:
        metadata = dcp.HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise unreadable(directory, error) from error
    return {name: tuple(entry.size) for name, entry in metadata.items()}  # type: ignore[union-attr]


def unreadable(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} cannot be read as safetensors ({first_line(error)})", "name another checkpoint")


# ------------------------------------------------------------------------------------------------------------ load
def load(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Restore model, optimizer and generators in place. :func:`read_progress` reads the rest.

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
