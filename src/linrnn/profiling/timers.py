"""Measure the time of training steps without slowing them: CUDA events on a GPU, the clock on a CPU.

Inside the training loop the host never waits for the device. Events are read once the device has passed them.
"""

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

RECENT_STEPS = 20  # the console's speed is the mean over this many steps
LAP, STEP = "lap", "step"  # names of a stopwatch's times


class Stopwatch:
    """Times of laps, and of what lies between :meth:`begin` and :meth:`end` in a lap, by name.

    A lap goes from the end of a step to the end of the next, so it includes what the host does between steps. Times of
    one name in one lap add up. On a GPU, gaps in which the device waits for the host count: a small model's loss takes
    longer than its kernels. It is an observer of :func:`linrnn.profiling.watched_loss`.

    Args:
        device: where the steps run.
        skip: number of first laps that are not measured: warm-up, tuning of kernels, traced steps.
    """

    def __init__(self, device: torch.device, skip: int = 0) -> None:
        self._device, self._cuda, self._skip = device, device.type == "cuda", skip
        self._open: dict[str, Any] = {}
        self._lap: list[tuple[str, Any, Any]] = []  # name, begun, ended
        self._pending: deque[list[tuple[str, Any, Any]]] = deque()
        self._seconds: list[dict[str, float]] = []

    def begin(self, name: str) -> None:
        """A time begins once the device comes here."""
        self._open[name] = moment(self._cuda)

    def end(self, name: str) -> None:
        """The time that began last under this name ends."""
        self._lap.append((name, self._open.pop(name), moment(self._cuda)))

    def start(self) -> None:
        """The first lap begins once the device has finished its work so far."""
        self._wait()
        self.begin(LAP)

    def lap(self) -> None:
        """A step ends. Never waits for the device."""
        if LAP in self._open:
            self.end(LAP)
            self._open[LAP] = self._lap[-1][2]
        if self._skip > 0:
            self._skip -= 1
        else:
            self._pending.append(self._lap)
        self._lap = []

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The block counts for no lap. The host waits for the device at the block's start and end.

        A pause inside a pause, or before :meth:`start`, changes nothing.
        """
        if LAP not in self._open:
            yield
            return
        self._wait()
        self.end(LAP)
        try:
            yield
        finally:
            self.start()

    @property
    def seconds(self) -> list[dict[str, float]]:
        """Seconds by name of each measured lap that the device has finished, in order."""
        while self._pending and all(not self._cuda or ended.query() for _, _, ended in self._pending[0][-1:]):
            total: dict[str, float] = {}
            for name, begun, ended in self._pending.popleft():
                total[name] = total.get(name, 0.0) + seconds_between(begun, ended)
            self._seconds.append(total)
        return self._seconds

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize(self._device)


class SpeedMeter(Stopwatch):
    """Speed of the measured steps of one process.

    Args:
        device: where the steps run.
        skip: number of first steps that are not measured, as for :class:`Stopwatch`.
        tokens_per_step: tokens of an optimizer step, over all ranks.
    """

    def __init__(self, device: torch.device, skip: int, tokens_per_step: int) -> None:
        super().__init__(device, skip)
        self._unmeasured, self._tokens_per_step = skip, tokens_per_step
        self._arrived = self._recorded = 0  # measured steps

    def step_begins(self) -> None:
        """Call before the step's first work."""
        self.begin(STEP)

    def step_ended(self) -> None:
        """Call when the device has been given the step's last work. Never waits for the device."""
        self.end(STEP)
        self.lap()

    def arrived(self, step_of_process: int) -> None:
        """The device has finished step `step_of_process` (from 1). Call it once for each step."""
        self._arrived = max(0, step_of_process - self._unmeasured)

    def recent_step_seconds(self) -> float | None:
        """Mean wall-clock seconds of the latest measured steps; None before the first."""
        laps = self.seconds[max(0, self._arrived - RECENT_STEPS) : self._arrived]
        return _mean(laps, LAP) if laps else None

    def record(self) -> dict[str, float | None]:
        """The metrics of the measured steps since the last call; empty if there were none."""
        laps, self._recorded = self.seconds[self._recorded : self._arrived], self._arrived
        if not laps:
            return {}
        wall = _mean(laps, LAP)
        metrics: dict[str, float | None] = {
            "speed/tokens_per_second": self._tokens_per_step / wall,
            "speed/wall_step_ms": 1e3 * wall,
            "speed/step_ms": 1e3 * _mean(laps, STEP),
        }
        of_loss = [name for name in laps[0] if name.startswith("loss/")]
        metrics |= {f"speed/{name.replace('/', '_')}_ms": 1e3 * _mean(laps, name) for name in of_loss}
        return {**metrics, "speed/measured_steps": len(laps)}


def _mean(laps: Sequence[dict[str, float]], name: str) -> float:
    return statistics.fmean(seconds[name] for seconds in laps)


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
