"""Checkpoints without pickle: how one is written, found, checked and loaded.

`checkpoints/step_00000200/` holds

    *.safetensors  parameters under the Hugging Face names of FLA's model; the optimizer's state as
                   `<parameter>/exp_avg` …; each rank's part in torch.distributed.checkpoint's Hugging Face format:
                   names, shapes and offsets in the headers, no pickled .metadata
    config.yaml    the run's configuration, so that a checkpoint explains itself
    state.json     a Progress, and the states of torch's generators
    SHA256SUMS     checksums of all files above (sha256sum -c SHA256SUMS)

Any number of ranks can read it, with any sharding: each reads its own part, alone.
"""

import contextlib
import json
import math
import os
import shlex
import shutil
import threading
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

from linrnn.config.schema import TrainerConfig
from linrnn.core.checksums import CHECKSUMS, check_checksums, write_checksums
from linrnn.core.errors import ConfigError, DataError, StorageError, first_line
from linrnn.core.files import read_object
from linrnn.core.machine import size_in_words
from linrnn.core.output import say

STATE, CONFIG = "state.json", "config.yaml"
PREFIX, PARTIAL = "step_", ".partial"
NAME = PREFIX + 8 * "[0-9]"  # a glob
FILE_BYTES = 2 << 30  # a file is assembled in memory, so its size is limited
Tensors = dict[str, torch.Tensor]
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


@dataclass
class Progress:
    """The progress of a run, and everything but tensors and configuration that its next steps depend on.

    Attributes:
        run: `<group>/<run_name>`.
        step: optimizer steps done.
        tokens: tokens trained on in these steps, over all ranks.
        data: the loader's position.
        recent_losses: nats per token.
        token_fingerprint: identifies the meaning of token ids (`linrnn.data.PreparedData`).
        continues: `run`, `step` and `tokens` of the checkpoint from which step 0 took weights and optimizer state. The
            tokens include all those behind that checkpoint. None for a run that began otherwise.
    """

    run: str
    step: int
    tokens: int
    data: dict[str, Any]
    recent_losses: list[float]
    token_fingerprint: str
    continues: dict[str, Any] | None = None


# ----------------------------------------------------------------------------------------------------------- write
class Checkpointer:
    """Writes the checkpoints of a run, one at a time. Every rank has one, and all call it at the same steps.

    Training only stops for a copy into the CPU's memory. A thread writes the copy aside (`.partial`), checksums,
    flushes and renames it: a checkpoint is whole or not there. Every rank writes the parts that only it holds; replicas
    are divided among the ranks that hold them.

    Args:
        root: the run's checkpoints/, which all ranks see.
        keep: how many of the newest are kept.

    Attributes:
        saved_step: step of the newest checkpoint, or the one at which this process began.
    """

    def __init__(self, root: Path, keep: int) -> None:
        self._root, self._keep = root, keep
        self.saved_step, self._saved_at = 0, time.monotonic()
        # A group of its own, so that neither this thread nor training waits for the other's collectives.
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._rank = dist.get_rank() if self._group else 0
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def begin(self, step: int) -> None:
        """This process trains on from `step`. The first rank deletes what an earlier one was writing or deleting when
        it was killed, and the run's checkpoints beyond `step`: they are damaged, or the run would go on from there.
        """
        self.saved_step, self._saved_at = step, time.monotonic()
        if self._rank == 0:
            whole = [path for path in found(self._root) if path <= directory_of(self._root, step)]
            for path in (*self._root.glob(NAME), *self._root.glob(NAME + PARTIAL)):
                if path not in whole:
                    shutil.rmtree(path)

    def is_due(self, trainer: TrainerConfig) -> bool:
        """Whether a checkpoint is due by this process's clock."""
        if trainer.checkpoint_every == 0 or trainer.checkpoint_minutes is None:
            return False
        return time.monotonic() - self._saved_at >= 60 * trainer.checkpoint_minutes

    def save(
        self, progress: Progress, model: torch.nn.Module, optimizer: torch.optim.Optimizer, config_yaml: str
    ) -> None:
        """Copy the state now. Write it in the background, after the previous checkpoint is written.

        Args:
            model: the Hugging Face module; the files use the names of its state dict.

        Raises:
            StorageError: the previous checkpoint could not be written.
        """
        self.wait()
        stager = DefaultStager(StagingOptions(*[False] * 4))  # neither pinned nor shared memory, and at once
        tensors = stager.stage({**model_tensors(model), **optimizer_tensors(model, optimizer)})
        stager.close()
        state = {**asdict(progress), "generators": generators()}
        texts = {CONFIG: config_yaml, STATE: json.dumps(state)}
        arguments = (directory_of(self._root, progress.step), tensors, texts)
        self._thread = threading.Thread(target=self._try, args=arguments, name="linrnn-checkpoint", daemon=True)
        self._thread.start()
        self.saved_step, self._saved_at = progress.step, time.monotonic()

    @property
    def failed(self) -> bool:
        """Whether :meth:`wait` would raise at once. Never waits."""
        return self._error is not None

    def wait(self) -> None:
        """Wait for the checkpoint that is being written, if there is one.

        Raises:
            StorageError: one rank could not write it. All ranks raise.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise error

    def _try(self, target: Path, tensors: Tensors, texts: dict[str, str]) -> None:
        """In the background: write a checkpoint, and keep the error for :meth:`wait`."""
        if self._device is not None:
            torch.cuda.set_device(self._device)  # a new thread starts on the first GPU
        try:
            write(tensors, texts, target, self._keep, self._group)
        except (OSError, SafetensorError) as problem:
            if self._rank == 0:
                shutil.rmtree(_partial(target), ignore_errors=True)
            self._error = StorageError(
                f"checkpoint of step {int(target.name.removeprefix(PREFIX))} was not written ({problem})",
                "free space or choose another results_dir; earlier checkpoints are untouched",
            )
            self._error.__cause__ = problem
        except BaseException as problem:
            self._error = problem


def write(tensors: Tensors, texts: dict[str, str], target: Path, keep: int, group: dist.ProcessGroup | None) -> None:
    """Write a checkpoint. Called by all ranks of `group` (CPU), each with its part, or by a single process (None).

    Args:
        texts: the other files.
        keep: how many of the newest checkpoints are kept.

    Raises:
        OSError, SafetensorError: one rank cannot write. All ranks raise.
    """
    numbers, number, filled = {}, 1, 0  # of each tensor's file, the same on all ranks
    for name, tensor in tensors.items():
        size = math.ceil(tensor.nbytes / (tensor.device_mesh.size() if isinstance(tensor, DTensor) else 1))
        if filled and filled + size > FILE_BYTES:
            number, filled = number + 1, 0
        numbers[name], filled = number, filled + size
    try:
        dcp.save(
            tensors, storage_writer=Writer(target, numbers, texts, keep), process_group=group, no_dist=group is None
        )
    except CheckpointException as failure:
        error = next(iter(failure.failures.values()))[0]  # of the first rank that failed
        raise (error if isinstance(error, Exception) else RuntimeError(str(error))) from failure


class Writer(dcp.HuggingFaceStorageWriter):
    """Every rank writes its tensors aside. Then the first one writes all else, and gives the directory its name."""

    def __init__(self, target: Path, numbers: dict[str, int], texts: dict[str, str], keep: int) -> None:
        super().__init__(str(_partial(target)), fqn_to_index_mapping=numbers, save_distributed=True)
        self._target, self._texts, self._keep = target, texts, keep

    def finish(self, metadata: Any, results: list[list[Any]]) -> None:
        """Called on the first rank once all have written. If it raises, all ranks do."""
        partial = _partial(self._target)
        for name in {result.storage_data.relative_path for of_rank in results for result in of_rank}:
            if not (partial / name).is_file():  # it lies on a disk of another machine
                raise OSError(f"{name} of another rank is not in {partial}: all ranks need one results_dir")
        for name, text in self._texts.items():
            (partial / name).write_text(text, encoding="utf-8")
        write_checksums(partial)
        for path in (*partial.iterdir(), partial):
            sync(path)
        partial.rename(self._target)
        sync(self._target.parent)
        for path in found(self._target.parent)[: -self._keep]:
            shutil.rmtree(path)


def _partial(target: Path) -> Path:
    return target.with_name(target.name + PARTIAL)


def sync(path: Path) -> None:
    """Flush a file or a directory, so that the next rename never precedes the data on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:  # some file systems cannot flush a directory, and order renames themselves
        with contextlib.suppress(OSError) if path.is_dir() else contextlib.nullcontext():
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def estimated_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of a whole checkpoint, before the optimizer has a state: parameters, buffers and moments."""
    tensors = list(model_tensors(model).values())
    for group in optimizer.param_groups:
        tensors += group["params"] * len(state_keys(group) - {"step"})
    return sum(tensor.nbytes for tensor in tensors)


def check_room(trainer: TrainerConfig, directory: Path, size: int, *, there: int, steps: int) -> str | None:
    """Say when a run writes checkpoints, and compare their size with the free space. None for a run without them.

    Args:
        directory: the run's.
        size: bytes of one checkpoint.
        there: number of checkpoints that the run has already.
        steps: number of steps that the run has left.

    Raises:
        StorageError: the disk has no room for the checkpoints that the run will certainly write.
    """
    every, minutes = trainer.checkpoint_every, trainer.checkpoint_minutes
    if every == 0:
        return None
    free = shutil.disk_usage(directory).free
    most = max(trainer.keep_checkpoints - there, 0) + 1  # at once: one is complete before the oldest is deleted
    certain = min(most, math.ceil(steps / (every or max(steps, 1))))
    facts = f"a checkpoint takes {size_in_words(size)}, and {size_in_words(free)} are free in {directory}"
    if certain * size > free:
        remedy = "free space, choose another results_dir, or lower trainer.keep_checkpoints; "
        remedy += "trainer.checkpoint_every=0 writes none"
        raise StorageError(f"the disk has no room for {certain} checkpoint(s): {facts}", remedy)
    times = [f"every {every} steps"] * bool(every) + [f"every {minutes:g} minutes"] * (minutes is not None)
    return f"checkpoints {', '.join([*times, 'and at the end'])}: {facts}"


# ------------------------------------------------------------------------------------------------------------ find
def directory_of(root: Path, step: int) -> Path:
    return root / f"{PREFIX}{step:08d}"


def found(root: Path) -> list[Path]:
    """Complete checkpoint directories below `root`, oldest first."""
    return sorted(path for path in root.glob(NAME) if (path / STATE).exists())


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
        remedy: what else to name.

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
    raise ConfigError(f"{key}={source} {wrong}", remedy)


def damaged(path: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None. A file that nobody reads, as of an editor, does no harm."""
    try:
        unlisted = {STATE, CONFIG, *(file.name for file in path.glob("*.safetensors"))} - check_checksums(path)
    except DataError as error:
        return error.cause
    return f"{min(unlisted)} is not in its {CHECKSUMS}" if unlisted else None


# ------------------------------------------------------------------------------------------------------------ load
def load(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Restore model, optimizer and generators in place. :func:`read_progress` reads the rest.

    Raises:
        ConfigError: names or shapes differ from the model's.
        DataError: a file cannot be read.
    """
    load_model(path, model)
    load_optimizer(path, model, optimizer)
    for device, state in _read_state(path)["generators"].items():
        there = torch if device == "cpu" else torch.cuda
        if device == "cpu" or torch.cuda.is_initialized():
            there.set_rng_state(torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8))


def read_progress(path: Path) -> Progress:
    """The progress of a checkpoint.

    Raises:
        DataError: the checkpoint cannot be read.
    """
    return Progress(**{key: value for key, value in _read_state(path).items() if key != "generators"})


def _read_state(path: Path) -> Any:
    return read_object(path / STATE, remedy="name another checkpoint")


@torch.no_grad()
def load_model(path: Path, model: torch.nn.Module) -> None:
    """Restore the parameters only.

    Raises:
        ConfigError: names or shapes differ from the model's.
        DataError: a file cannot be read.
    """
    tensors = model_tensors(model)
    there = {name: shape for name, shape in shapes(path).items() if "/" not in name}
    for name in sorted(there.keys() | tensors.keys()):
        ours = tuple(tensors[name].shape) if name in tensors else "absent"
        theirs = there.get(name, "absent")
        if ours != theirs:
            raise ConfigError(
                f"{path}: {name} is {theirs} in the checkpoint and {ours} in this model",
                "use the model, size and vocabulary that the checkpoint was trained with",
            )
    _read(tensors, path)


def load_optimizer(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Restore the optimizer's state (moments and step counts). Learning rates and weight decay stay as they are.

    Raises:
        ConfigError: another optimizer wrote the state.
        DataError: a file cannot be read.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    places = {
        f"{names[parameter]}/{key}": (parameter, key, group.get("fused"))
        for group in optimizer.param_groups
        for parameter in group["params"]
        for key in state_keys(group)
    }
    tensors: Tensors = {}
    for name in (name for name in shapes(path) if "/" in name):
        if name not in places:
            of, _, key = name.partition("/")
            its_own, weights = "muon" if key == "momentum_buffer" else "adamw", shlex.quote(f"init_from={path}")
            raise ConfigError(
                f"{path} holds {key} of {of}, which belongs to another optimizer",
                f"use optimizer={its_own}, or {weights} continue_from=null for its weights alone",
            )
        parameter, key, fused = places[name]
        if key == "step":
            tensors[name] = torch.zeros((), device=parameter.device if fused else "cpu")
        else:  # sharded like its parameter
            tensors[name] = torch.zeros_like(parameter, requires_grad=False)
    _read(tensors, path)
    for name, tensor in tensors.items():
        parameter, key, _ = places[name]
        optimizer.state[parameter][key] = tensor


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The unsharded shape of every tensor of a checkpoint, by name.

    Raises:
        DataError: a file is missing or is not safetensors.
    """
    try:
        metadata = dcp.HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise _unreadable(path, error) from error
    return {name: tuple(entry.size) for name, entry in metadata.items()}  # type: ignore[union-attr]


def _read(into: Tensors, path: Path) -> None:
    """Fill tensors, or this rank's parts of them, with the values stored under their names in a checkpoint."""
    try:
        dcp.load(into, storage_reader=dcp.HuggingFaceStorageReader(str(path)), no_dist=True)
    except CheckpointException as failure:
        raise _unreadable(path, next(iter(failure.failures.values()))[0]) from failure  # type: ignore[arg-type]
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> DataError:
    cause = f"{path} cannot be read as safetensors ({first_line(error)})"
    return DataError(cause, "name another checkpoint")


# --------------------------------------------------------------------------------------------------------- tensors
def model_tensors(model: torch.nn.Module) -> Tensors:
    """Parameters and buffers by name. A tied one comes once, under its first name."""
    first_names: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        first_names.setdefault(id(tensor), (name, tensor.detach()))
    return dict(first_names.values())


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


def generators() -> dict[str, str]:
    """States of torch's generators by device, as hex digits."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return {device: state.numpy().tobytes().hex() for device, state in states.items()}
