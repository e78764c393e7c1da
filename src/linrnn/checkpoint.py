"""Checkpoints without pickle: safetensors for tensors, JSON for the rest, checksummed, written aside and renamed.

`checkpoints/step_00000200/` holds
    model.safetensors      parameters under the Hugging Face names of FLA's model
    optimizer.safetensors  AdamW's moments and step counts, by parameter name
    rng.safetensors        states of torch's generators
    state.json             step, data position, latest losses, Python's and numpy's generators, sha256 of the above
    config.yaml            the run's configuration, so that a checkpoint explains itself
"""

import hashlib
import json
import os
import random
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, distribute_tensor

from linrnn.errors import ConfigError, DataError, StorageError

MODEL, OPTIMIZER, RNG, STATE = "model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json"
_PREFIX, _PARTIAL = "step_", ".partial"


@dataclass
class Progress:
    """Where a run stands: optimizer steps done, the loader's position, the latest losses (nats per token)."""

    step: int
    data: dict[str, Any]
    recent_losses: list[float]


def save(
    root: Path,
    progress: Progress,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    config_yaml: str,
    keep: int,
    write: bool = True,
) -> Path:
    """Write `root/step_<n>` and delete all but the newest `keep` checkpoints; returns the new directory.

    `model` is the Hugging Face module whose state-dict names the file carries. Where it is cut over ranks all of
    them call this, and the one that is to `write` gathers the tensors in the CPU's memory.
    """
    target = root / f"{_PREFIX}{progress.step:08d}"
    model_tensors = _gathered(_model_tensors(model), write)
    optimizer_tensors = _gathered(_optimizer_tensors(model, optimizer), write)
    if not write:
        return target
    partial = target.with_name(target.name + _PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _save_tensors(model_tensors, partial / MODEL)
        _save_tensors(optimizer_tensors, partial / OPTIMIZER)
        _save_tensors(_rng_tensors(), partial / RNG)
        (partial / "config.yaml").write_text(config_yaml)
        checksums = {name: _sha256(partial / name) for name in (MODEL, OPTIMIZER, RNG)}
        (partial / STATE).write_text(json.dumps({**asdict(progress), "sha256": checksums, "generators": _generators()}))
        _sync(partial)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise StorageError(
            f"checkpoint of step {progress.step} was not written ({error})",
            "free space or choose another results_dir; earlier checkpoints are untouched",
        ) from error
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    for old in found(root)[:-keep]:
        shutil.rmtree(old)
    return target


def found(root: Path) -> list[Path]:
    """Complete checkpoint directories below `root`, oldest first."""
    return sorted(path for path in root.glob(f"{_PREFIX}*") if path.suffix != _PARTIAL and (path / STATE).exists())


def newest(root: Path) -> Path | None:
    """The newest checkpoint below `root` whose files match their checksums; damaged ones are named and skipped."""
    for path in reversed(found(root)):
        if (damage := damaged(path)) is None:
            return path
        print(f"skipping {path}: {damage}")
    return None


def damaged(path: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None."""
    try:
        checksums = json.loads((path / STATE).read_text())["sha256"]
    except (ValueError, KeyError, OSError):
        return f"{STATE} cannot be read"
    for name, checksum in checksums.items():
        if not (path / name).exists():
            return f"{name} is missing"
        if _sha256(path / name) != checksum:
            return f"{name} does not match its checksum"
    return None


def load(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
    """Restore model, optimizer and generators in place; returns the progress to continue from."""
    load_model(path, model)
    _restore_optimizer(_load_tensors(path / OPTIMIZER), model, optimizer)
    _restore_rng(path)
    state = json.loads((path / STATE).read_text())
    return Progress(**{field: state[field] for field in ("step", "data", "recent_losses")})


def load_model(path: Path, model: torch.nn.Module) -> None:
    """Restore the parameters alone.

    Raises:
        ConfigError: names or shapes differ from the model's.
    """
    tensors = _load_tensors(path / MODEL)
    expected = _model_tensors(model)
    for name in sorted(tensors.keys() | expected.keys()):
        ours, theirs = expected.get(name), tensors.get(name)
        if ours is None or theirs is None or ours.shape != theirs.shape:
            shapes = [tuple(t.shape) if t is not None else "absent" for t in (theirs, ours)]
            raise ConfigError(
                f"{path}: {name} is {shapes[0]} in the checkpoint and {shapes[1]} in this model",
                "use the model, size and vocabulary that the checkpoint was trained with",
            )
    with torch.no_grad():
        for name, tensor in expected.items():
            tensor.copy_(_cut_like(tensor, tensors[name]))


def resolve(source: Path) -> Path | None:
    """The checkpoint directory that a run directory, its checkpoints/ or a checkpoint itself stands for, or None.

    Raises:
        DataError: a checkpoint that was named itself is damaged.
    """
    if (source / STATE).exists():
        if damage := damaged(source):
            raise DataError(f"{source} is damaged: {damage}", "name another checkpoint of the run, or the run itself")
        return source
    for root in (source / "checkpoints", source):
        if path := newest(root):
            return path
    return None


# ------------------------------------------------------------------------------------------------- what is stored
def _model_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, a tied one once under its first name."""
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor.detach()
    return tensors


def _optimizer_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{names[id(parameter)]}/{key}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }


def _restore_optimizer(
    tensors: dict[str, torch.Tensor], model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    parameters = dict(model.named_parameters())
    numbers = {id(p): i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    state: dict[int, dict[str, torch.Tensor]] = {}
    for full, value in tensors.items():
        name, key = full.rsplit("/", 1)
        parameter = parameters[name]
        state.setdefault(numbers[id(parameter)], {})[key] = _cut_like(parameter, value) if value.ndim else value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _gathered(tensors: dict[str, torch.Tensor], keep: bool) -> dict[str, torch.Tensor]:
    """Whole tensors, those cut over ranks gathered one by one into the CPU's memory; none if not to `keep`."""
    whole = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor().cpu() if keep else tensor.full_tensor()
        if keep:
            whole[name] = tensor
    return whole


def _cut_like(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that every rank has, if `parameter` is cut; else the tensor."""
    if not isinstance(parameter, DTensor):
        return whole
    whole = whole.to(parameter.device)
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _rng_tensors() -> dict[str, torch.Tensor]:
    tensors = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        tensors["cuda"] = torch.cuda.get_rng_state()
    return tensors


def _restore_rng(path: Path) -> None:
    tensors = _load_tensors(path / RNG)
    torch.set_rng_state(tensors["cpu"])
    if "cuda" in tensors and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(tensors["cuda"])
    generators = json.loads((path / STATE).read_text())["generators"]
    version, internal, gauss = generators["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = generators["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))


def _generators() -> dict[str, Any]:
    """States of Python's and numpy's global generators, as JSON values."""
    kind, keys, *rest = np.random.get_state()
    return {"python": random.getstate(), "numpy": [kind, np.asarray(keys).tolist(), *rest]}


def _save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)


def _load_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} is no safetensors file ({error})", "name another checkpoint") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(directory: Path) -> None:
    """Flush every file, then the directory, so that the rename that follows is never ahead of the data."""
    for path in (*directory.iterdir(), directory):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
