"""Speed and memory of a run's steps, measured by the ranks."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from linrnn import costs
from linrnn.core.machine import GIB, gpu_is_shared
from linrnn.distributed import Ranks
from linrnn.models import LanguageModel
from linrnn.models.architecture import Architecture
from linrnn.profiling import MemoryByComponent, SpeedMeter, memory_snapshot, trace
from linrnn.training.plan import Plan
from linrnn.training.runtime import device_name
from linrnn.training.starting import RunState


class Measurements:
    """This process's measurements of its steps.

    Attributes:
        speed: time of the steps and of the output layer.
        memory: bytes by component.
        gpu_shared: whether other runs compute on this process's GPU. Its speed is then not recorded.
        gpu_state: clocks, power and temperature at the last steps; None on a CPU and before that.
    """

    def __init__(
        self,
        plan: Plan,
        architecture: Architecture,
        ranks: Ranks,
        model: LanguageModel,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._plan, self._architecture, self._ranks = plan, architecture, ranks
        self.speed = SpeedMeter(plan.device, plan.unmeasured_steps, plan.tokens_per_step)
        self.memory = MemoryByComponent(model, optimizer, plan.device)
        self.gpu_shared = gpu_is_shared()
        self.gpu_state: dict[str, Any] | None = None
        self._memory_recorded = False

    def began(self, state: RunState) -> bool:
        """Whether this process is past its warm-up. Memory of the warm-up (tuning of kernels) is never counted."""
        return state.steps_here > self._plan.unmeasured_steps

    def of_steps(self, state: RunState) -> dict[str, float | None]:
        """The metrics of the steps since the last call: speed and MFU; the first time also memory."""
        metrics = self.speed.record()
        if wall_ms := metrics.get("speed/wall_step_ms"):
            utilisation = {f"speed/{name}": share for name, share in self.mfu(wall_ms / 1e3).items()}
            metrics = {} if self.gpu_shared else metrics | utilisation
            if not self._memory_recorded:
                metrics |= self.of_memory(state)
        return metrics

    def of_memory(self, state: RunState) -> dict[str, float | None]:
        """The metrics of memory; empty before the end of the warm-up."""
        if not self.began(state):
            return {}
        self._memory_recorded = True
        return {f"memory/{name}_gib": size / GIB for name, size in self.memory_of_ranks().items()}

    def memory_of_ranks(self) -> dict[str, int]:
        """Bytes by component; each is the maximum over the ranks."""
        report = self.memory.report()
        sizes = self._ranks.largest(*report.values())
        return {name: int(size) for name, size in zip(report, sizes, strict=True)}

    def mfu(self, step_seconds: float | None) -> dict[str, float | None]:
        """`mfu` and `mfu_6n`; null before anything is measured."""
        plan = self._plan
        return costs.mfu(
            self._architecture,
            seq_len=plan.config.trainer.seq_len,
            tokens_per_second=step_seconds and plan.tokens_per_step / step_seconds,
            device_name=device_name(plan.device),
            precision=plan.precision,
            n_devices=plan.world_size,
        )

    @contextlib.contextmanager
    def recordings(self, directory: Path) -> Iterator[Callable[[], None]]:
        """The requested trace and memory snapshot, on the first rank. Yields a function to call after each step."""
        if not self._ranks.is_first:
            yield lambda: None
            return
        trainer = self._plan.config.trainer
        with contextlib.ExitStack() as stack:
            if trainer.memory_snapshot:
                stack.enter_context(memory_snapshot(directory / "memory_snapshot.pickle", self._plan.device))
            traced = trace(trainer.profile_steps, directory / "trace.json.gz", trainer.warmup_measurement_steps)
            yield stack.enter_context(traced)
