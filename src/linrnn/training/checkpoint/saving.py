"""Write checkpoints in the background. Training only stops for a copy into the CPU's memory."""

import shutil
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from linrnn.core.errors import StorageError
from linrnn.training.checkpoint.files import (
    CONFIG,
    PARTIAL,
    PREFIX,
    RNG,
    TENSORS,
    checksums,
    directory_of,
    found,
    sync,
    write_state,
)
from linrnn.training.checkpoint.loading import Progress, generator_tensors, generator_values
from linrnn.training.checkpoint.tensors import Tensors, model_tensors, optimizer_tensors, staged, write


class Saver:
    """Writes the checkpoints of a run, one at a time. Every rank has a Saver, and all call it at the same steps.

    Args:
        root: the run's checkpoints/, which all ranks see.
        keep: how many of the newest are kept.

    Attributes:
        begins_at: the step from which this process continues. Other checkpoints beyond it are not this run's.
    """

    def __init__(self, root: Path, keep: int) -> None:
        self._root, self._keep = root, keep
        self.begins_at = 0
        self._written: set[Path] = set()
        # A group of its own, so that neither this thread nor training waits for the other's collectives.
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._first = self._group is None or dist.get_rank() == 0
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

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
        self._together(lambda: self._begin(partial))
        write(tensors, partial / TENSORS, self._group)
        rank = 1 if self._group is None else dist.get_rank() + 1
        own = self._together(lambda: self._checksums(partial, f"{TENSORS}/shard-{rank:05d}-*"))
        self._together(lambda: self._finish(target, partial, generators, {**state, "sha256": own}, config))

    def _begin(self, partial: Path) -> dict[str, str]:
        if self._first:
            shutil.rmtree(partial, ignore_errors=True)
            (partial / TENSORS).mkdir(parents=True)
        return {}

    def _checksums(self, partial: Path, pattern: str) -> dict[str, str]:
        return checksums(partial, sorted(str(path.relative_to(partial)) for path in partial.glob(pattern)))

    def _finish(
        self, target: Path, partial: Path, generators: Tensors, state: dict[str, Any], config: str
    ) -> dict[str, str]:
        if not self._first:
            return {}
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
        self._prune()
        return {}

    def _prune(self) -> None:
        """Delete all checkpoints but the newest of this run.

        A process resumes from the newest undamaged one. Those beyond it are damaged, and would crowd out good ones.
        """
        every, begin = found(self._root), directory_of(self._root, self.begins_at)
        ours = [path for path in every if path.name <= begin.name or path in self._written]
        for path in every:
            if path not in ours[-self._keep :]:
                shutil.rmtree(path)

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
