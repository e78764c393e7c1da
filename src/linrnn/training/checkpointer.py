"""Write checkpoints in the background. Training only stops for a copy into the CPU's memory.

A checkpoint is written aside (`.partial`), checksummed, flushed and renamed: it is whole or not there. Every rank
writes the parts that only it holds; replicas are divided among the ranks that hold them.
"""

import errno
import math
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

from linrnn.config.schema import TrainerConfig
from linrnn.core.errors import StorageError
from linrnn.core.machine import size_in_words
from linrnn.runs.directory import RunDirectory
from linrnn.training.checkpoint import (
    CONFIG,
    PARTIAL,
    PREFIX,
    RNG,
    TENSORS,
    Progress,
    Tensors,
    checksums,
    directory_of,
    found,
    generator_tensors,
    generator_values,
    model_tensors,
    optimizer_tensors,
    state_keys,
    write_state,
)

FILE_BYTES = 2 << 30  # a file is assembled in memory, so its size is limited
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class Checkpointer:
    """Writes the checkpoints of a run, one at a time. Every rank has one, and all call it at the same steps.

    Args:
        root: the run's checkpoints/, which all ranks see.
        keep: how many of the newest are kept.

    Attributes:
        saved_step: step of the newest checkpoint, if this process continues from it or has written it.
    """

    def __init__(self, root: Path, keep: int) -> None:
        self._root, self._keep = root, keep
        self.saved_step: int | None = None
        self._written: set[Path] = set()
        # A group of its own, so that neither this thread nor training waits for the other's collectives.
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._first = self._group is None or dist.get_rank() == 0
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._begins_at, self._saved_at = 0, time.monotonic()

    def begin_at(self, step: int) -> None:
        """This process trains on from `step`. The run's own checkpoints beyond it are damaged, and count no more."""
        self._begins_at = self.saved_step = step
        self._saved_at = time.monotonic()

    def is_due(self, trainer: TrainerConfig) -> bool:
        """Whether a checkpoint is due by this process's clock."""
        if trainer.checkpoint_every == 0 or trainer.checkpoint_minutes is None:
            return False
        return time.monotonic() - self._saved_at >= 60 * trainer.checkpoint_minutes

    def remove_partial(self) -> None:
        """Delete the checkpoint that an earlier, killed process of this run was writing. The first rank does it."""
        for path in self._root.glob(f"{PREFIX}*{PARTIAL}") if self._first else ():
            shutil.rmtree(path)

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
        tensors = staged({**model_tensors(model), **optimizer_tensors(model, optimizer)})
        state = {**asdict(progress), "generators": generator_values()}
        arguments = (directory_of(self._root, progress.step), tensors, generator_tensors(), state, config_yaml)
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

    # -------------------------------------------------------------------------------------------- in the background
    def _try(self, target: Path, *arguments: Any) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)  # a new thread starts on the first GPU
        partial = target.with_name(target.name + PARTIAL)
        try:
            self._write(target, partial, *arguments)
        except (OSError, SafetensorError) as error:
            if self._first:
                shutil.rmtree(partial, ignore_errors=True)
            self._error = StorageError(
                f"checkpoint of step {int(target.name.removeprefix(PREFIX))} was not written ({error})",
                "free space or choose another results_dir; earlier checkpoints are untouched",
            )
            self._error.__cause__ = error
        except BaseException as error:  # wait() raises it
            self._error = error

    def _write(
        self, target: Path, partial: Path, tensors: Tensors, generators: Tensors, state: dict[str, Any], config: str
    ) -> None:
        self._on_first(lambda: shutil.rmtree(partial, ignore_errors=True))
        self._on_first(lambda: (partial / TENSORS).mkdir(parents=True))
        write(tensors, partial / TENSORS, self._group)
        rank = 1 if self._group is None else dist.get_rank() + 1
        own = sorted(partial.glob(f"{TENSORS}/shard-{rank:05d}-*"))
        state["sha256"] = self._together(lambda: checksums(partial, [str(path.relative_to(partial)) for path in own]))
        self._on_first(lambda: self._finish(target, partial, generators, state, config))

    def _finish(self, target: Path, partial: Path, generators: Tensors, state: dict[str, Any], config: str) -> None:
        save_file(generators, partial / RNG)
        (partial / CONFIG).write_text(config, encoding="utf-8")
        shutil.copymode(partial / CONFIG, partial / RNG)  # safetensors gives its file to its owner alone
        state["sha256"] |= checksums(partial, [RNG, CONFIG])
        write_state(partial, state)
        for path in (*partial.rglob("*"), partial):
            sync(path)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        sync(target.parent)
        self._written.add(target)
        # A process resumes from the newest undamaged one. Those beyond it are damaged, and would crowd out good ones.
        every, begin = found(self._root), directory_of(self._root, self._begins_at)
        ours = [path for path in every if path.name <= begin.name or path in self._written]
        for path in every:
            if path not in ours[-self._keep :]:
                shutil.rmtree(path)

    def _on_first(self, action: Callable[[], None]) -> None:
        """Call `action` on the first rank. All ranks wait for it, and raise its error."""
        self._together(lambda: action() or {} if self._first else {})  # type: ignore[func-returns-value]

    def _together(self, action: Callable[[], dict[str, str]]) -> dict[str, str]:
        """Call `action` on all ranks. Return their merged results, or raise the first rank's error on all ranks."""
        result: dict[str, str] | OSError
        try:
            result = action()
        except (OSError, SafetensorError) as error:
            result = OSError(*error.args)
        results: list[Any] = [result]
        if self._group is not None:
            results = [None] * dist.get_world_size()
            dist.all_gather_object(results, result, group=self._group)
        merged: dict[str, str] = {}
        for each in results:
            if isinstance(each, OSError):
                raise each
            merged |= each
        return merged


# --------------------------------------------------------------------------------------------------------- tensors
def staged(tensors: Tensors) -> Tensors:
    """Copies in the CPU's memory, which training does not change."""
    stager = DefaultStager(StagingOptions(*[False] * 4))  # neither pinned nor shared memory, and at once
    copies = stager.stage(tensors)
    stager.close()
    assert isinstance(copies, dict)
    return copies


def write(tensors: Tensors, directory: Path, group: dist.ProcessGroup | None) -> None:
    """Write this rank's share. Called by all ranks of `group` (CPU), or by a single process (None).

    Raises:
        OSError, SafetensorError: one rank cannot write. All ranks raise.
    """
    numbers, number, filled = {}, 1, 0  # of each tensor's file, the same on all ranks
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        size = math.ceil(size / (tensor.device_mesh.size() if isinstance(tensor, DTensor) else 1))
        if filled and filled + size > FILE_BYTES:
            number, filled = number + 1, 0
        numbers[name], filled = number, filled + size
    writer = dcp.HuggingFaceStorageWriter(str(directory), fqn_to_index_mapping=numbers, save_distributed=True)
    try:
        dcp.save(tensors, storage_writer=writer, process_group=group, no_dist=group is None)
    except CheckpointException as failure:
        error = next(iter(failure.failures.values()))[0]  # of the first rank that failed
        raise (error if isinstance(error, Exception) else RuntimeError(str(error))) from failure


def sync(path: Path) -> None:
    """Flush a file or a directory, so that the next rename never precedes the data on disk.

    Some file systems cannot flush a directory (EINVAL, as FUSE and SMB may say) and order renames themselves.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------------------------------------------------ room
def foreseen_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of a whole checkpoint, before the optimizer has a state: parameters, buffers and moments."""
    tensors = list(model_tensors(model).values())
    for group in optimizer.param_groups:
        tensors += group["params"] * len(state_keys(group) - {"step"})
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def check_room(trainer: TrainerConfig, directory: RunDirectory, size: int, *, steps: int) -> str | None:
    """Say when a run writes checkpoints, and compare their size with the free space. None for a run without them.

    Args:
        size: bytes of one checkpoint.
        steps: number of steps that the run has left.

    Raises:
        StorageError: the disk has no room for the checkpoints that the run will certainly write.
    """
    every, minutes, keep = trainer.checkpoint_every, trainer.checkpoint_minutes, trainer.keep_checkpoints
    if every == 0:
        return None
    free = shutil.disk_usage(directory.path).free
    there = 0 if directory.begins_anew else len(found(directory.checkpoints))
    most = keep + 1 - min(there, keep)  # new ones that exist at once: one is complete before the oldest is deleted
    certain = min(most, math.ceil(steps / (every or max(steps, 1))))
    facts = f"a checkpoint takes {size_in_words(size)}, and {size_in_words(free)} are free in {directory.path}"
    if certain * size > free:
        raise StorageError(
            f"the disk has no room for {certain} checkpoint(s): {facts}",
            "free space, choose another results_dir, lower trainer.keep_checkpoints, or trainer.checkpoint_every=0 "
            "for a run without checkpoints",
        )
    if minutes is not None and most * size > free:
        facts += f"; warning: too little for the {most} that a long run has at once (trainer.keep_checkpoints={keep})"
    times = [f"every {every} steps"] if every else []
    times += [f"every {minutes:g} minutes"] if minutes is not None else []
    return f"checkpoints {', '.join([*times, 'and at the end'])}: {facts}"
