"""Measure the time of training steps without slowing them: CUDA events on a GPU, the clock on a CPU.

Inside the training loop the host never waits for the device. Events are read once the device has passed them.
"""

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

RECENT_STEPS = 20  # the console's speed is the mean over this many steps


class StepTimer:
    """Times of steps between :meth:`start` and :meth:`stop`: CUDA events on a GPU, the clock on the CPU.

    Args:
        device: where the steps run.
        skip: number of first steps that are not measured: warm-up, tuning of kernels, traced steps.
    """

    def __init__(self, device: torch.device, skip: int) -> None:
        self._cuda = device.type == "cuda"
        self._skip = skip
        self._pending: deque[tuple[Any, Any]] = deque()
        self._seconds: list[float] = []

    def start(self) -> None:
        """The step begins."""
        self._begun = moment(self._cuda)

    def stop(self) -> None:
        """The step ends. Never waits for the device."""
        marks = self._begun, moment(self._cuda)
        if self._skip > 0:
            self._skip -= 1
        else:
            self._pending.append(marks)

    @property
    def seconds(self) -> list[float]:
        """Times of the measured steps that the device has finished, in order."""
        while self._pending and (not self._cuda or self._pending[0][1].query()):
            self._seconds.append(seconds_between(*self._pending.popleft()))
        return self._seconds


class LossTimer:
    """For each step, the time between the moments when the device enters and leaves the output layer's passes.

    Gaps in which the device waits for the host count. A small model's loss therefore takes longer than its kernels.

    Args:
        device: where the steps run.
        skip: number of first steps that are not measured, as for :class:`StepTimer`.
    """

    def __init__(self, device: torch.device, skip: int) -> None:
        self._cuda = device.type == "cuda"
        self._skip = skip
        self._begun: Any = None
        self._step: dict[str, list[tuple[Any, Any]]] = {}
        self._pending: deque[dict[str, list[tuple[Any, Any]]]] = deque()
        self._seconds: list[dict[str, float]] = []

    def loss_forward_begins(self) -> None:
        """Called by :func:`watched_loss`."""
        self._begun = moment(self._cuda)

    def loss_forward_ended(self) -> None:
        """Called by :func:`watched_loss`."""
        self._passed("forward")

    def loss_backward_begins(self) -> None:
        """Called by :func:`watched_loss`."""
        self._begun = moment(self._cuda)

    def loss_backward_ended(self) -> None:
        """Called by :func:`watched_loss`."""
        self._passed("backward")

    def step_ended(self) -> None:
        """The step ends; its micro-steps count together. Never waits for the device."""
        step, self._step = self._step, {}
        if self._skip > 0:
            self._skip -= 1
        else:
            self._pending.append(step)

    def _passed(self, name: str) -> None:
        self._step.setdefault(name, []).append((self._begun, moment(self._cuda)))

    @property
    def seconds(self) -> list[dict[str, float]]:
        """Seconds of the forward and the backward passes of each measured step that the device has finished, in order.

        A pass that did not occur in a step is missing.
        """
        while self._pending and self._has_left(self._pending[0]):
            passes = self._pending.popleft()
            self._seconds.append({name: sum(seconds_between(*m) for m in moments) for name, moments in passes.items()})
        return self._seconds

    def _has_left(self, step: dict[str, list[tuple[Any, Any]]]) -> bool:
        return not self._cuda or all(passes[-1][1].query() for passes in step.values())


class WallClock:
    """Wall-clock time from the end of each step to the end of the next, without time that was :meth:`paused`.

    A lap is one step and what the host does before it. On a GPU a CUDA event marks the end of a step, because the host
    may be behind or ahead of the device.

    Args:
        device: where the steps run.
        skip: number of first laps that are not measured, as for :class:`StepTimer`.
    """

    def __init__(self, device: torch.device, skip: int) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self._skip = skip
        self._begun: Any = None
        self._stretches: list[tuple[Any, Any]] = []  # parts of the current lap before its last pause
        self._pending: deque[list[tuple[Any, Any]]] = deque()
        self._seconds: list[float] = []

    def start(self) -> None:
        """The first lap begins once the device has finished its work so far."""
        self._begun = self._mark_when_idle()

    def lap(self) -> None:
        """A step ends. Never waits for the device."""
        now = moment(self._cuda)
        stretches = [*self._stretches, (self._begun, now)]
        self._begun, self._stretches = now, []
        if self._skip > 0:
            self._skip -= 1
        else:
            self._pending.append(stretches)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The block counts for no lap. The host waits for the device at the block's start and end.

        A pause inside a pause, or before :meth:`start`, changes nothing.
        """
        if self._begun is None:
            yield
            return
        self._stretches.append((self._begun, self._mark_when_idle()))
        self._begun = None
        try:
            yield
        finally:
            self.start()

    @property
    def seconds(self) -> list[float]:
        """Times of the measured laps that the device has finished, in order."""
        while self._pending and (not self._cuda or self._pending[0][-1][1].query()):
            self._seconds.append(sum(seconds_between(*stretch) for stretch in self._pending.popleft()))
        return self._seconds

    def _mark_when_idle(self) -> Any:
        if self._cuda:
            torch.cuda.synchronize(self._device)
        return moment(self._cuda)


@dataclass(frozen=True)
class _Lap:
    """Seconds of one measured step."""

    wall: float
    device: float
    loss: dict[str, float]


class SpeedMeter:
    """Speed of the measured steps of one process.

    Args:
        device: where the steps run.
        skip: number of first steps that are not measured: warm-up, tuning of kernels, traced steps.
        tokens_per_step: tokens of an optimizer step, over all ranks.
    """

    def __init__(self, device: torch.device, skip: int, tokens_per_step: int) -> None:
        self._skip, self._tokens_per_step = skip, tokens_per_step
        self.steps, self.loss = StepTimer(device, skip), LossTimer(device, skip)
        self.clock = WallClock(device, skip)
        self._measured = 0
        self._since_record: list[_Lap] = []
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)

    def step_begins(self) -> None:
        """Call before the step's first work."""
        self.steps.start()

    def step_ended(self) -> None:
        """Call when the device has been given the step's last work. Never waits for the device."""
        self.steps.stop()
        self.loss.step_ended()
        self.clock.lap()

    def arrived(self, step_of_process: int) -> None:
        """The device has finished step `step_of_process` (from 1). Call it once for each step."""
        if step_of_process <= self._skip:
            return
        wall = self.clock.seconds[self._measured]
        self._recent.append(wall)
        self._since_record.append(_Lap(wall, self.steps.seconds[self._measured], self.loss.seconds[self._measured]))
        self._measured += 1

    def recent_step_seconds(self) -> float | None:
        """Mean wall-clock seconds of the latest measured steps; None before the first."""
        return statistics.fmean(self._recent) if self._recent else None

    def record(self) -> dict[str, float | None]:
        """The metrics of the measured steps since the last call; empty if there were none."""
        laps, self._since_record = self._since_record, []
        if not laps:
            return {}
        wall = statistics.fmean(lap.wall for lap in laps)
        metrics: dict[str, float | None] = {
            "speed/tokens_per_second": self._tokens_per_step / wall,
            "speed/wall_step_ms": 1e3 * wall,
            "speed/step_ms": 1e3 * statistics.fmean(lap.device for lap in laps),
        }
        for name in laps[0].loss:
            metrics[f"speed/loss_{name}_ms"] = 1e3 * statistics.fmean(lap.loss[name] for lap in laps)
        return {**metrics, "speed/measured_steps": len(laps)}


def moment(cuda: bool) -> Any:
    """Now: on a GPU an event in its queue, else the clock."""
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begun: Any, ended: Any) -> float:
    """Seconds between two past moments."""
    return begun.elapsed_time(ended) / 1e3 if isinstance(begun, torch.cuda.Event) else ended - begun


def matmul_rate(dtype: torch.dtype, size: int = 512, bursts: int = 5, seconds: float = 0.02) -> float:
    """FLOP/s of a square matrix product on this CPU: the best of several short bursts, about 0.1 s in all."""
    square = torch.randn(size, size, dtype=dtype)
    rates = []
    for _ in range(bursts):
        began, products, elapsed = time.perf_counter(), 0, 0.0
        while elapsed < seconds:
            square @ square
            products += 1
            elapsed = time.perf_counter() - began
        rates.append(2 * size**3 * products / elapsed)
    return max(rates)
