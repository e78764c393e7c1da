"""Time and memory of training steps, measured without slowing them: CUDA events, allocator marks, ranges.

Nothing here makes the host wait for the device inside the training loop: events are read once the device has
passed them, and allocator statistics are the host's own.
"""

import contextlib
import resource
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from linrnn.errors import StorageError, UnsupportedError

LOSS_FORWARD, LOSS_BACKWARD = "loss forward", "loss backward"
RECENT_STEPS = 20  # that the speed on the console averages over


# -------------------------------------------------------------------------------------------------- ranges
@contextlib.contextmanager
def nvtx_range(name: str) -> Iterator[None]:
    """A named range in Nsight Systems (with CUDA) and torch.profiler; microseconds otherwise."""
    nvtx = torch.cuda.nvtx.range(name) if torch.cuda.is_available() else contextlib.nullcontext()
    with torch.profiler.record_function(name), nvtx:
        yield


class BackwardMark(torch.autograd.Function):
    """Identity on a tensor; calls `reached` when the backward pass has its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, reached: Callable[[], None]) -> Tensor:
        ctx.reached = reached
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.reached()
        return grad, None


class _BackwardEnds(torch.autograd.Function):
    """Identity on the loss layer's inputs; its backward runs once the gradients of both are there."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, end: Callable[[], None]) -> tuple[Tensor, Tensor]:
        ctx.end = end
        views = hidden.view_as(hidden), weight.view_as(weight)
        frozen = (view for view, needs_grad in zip(views, ctx.needs_input_grad, strict=False) if not needs_grad)
        ctx.mark_non_differentiable(*frozen)
        return views

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        ctx.end()
        return *grads, None  # type: ignore[return-value]


class LossObserver(Protocol):
    """Told when the loss layer's passes begin and end: :class:`MemoryByComponent`, :class:`LossTimer`, or a clock."""

    def loss_forward_begins(self) -> None: ...
    def loss_forward_ended(self) -> None: ...
    def loss_backward_begins(self) -> None: ...
    def loss_backward_ended(self) -> None: ...


def watched_loss(
    loss: Callable[[Tensor, Tensor, Tensor], Any],
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    *observers: LossObserver,
) -> Any:
    """Call a loss backend with NVTX ranges round its forward and its backward pass, and measure its memory and time.

    Args:
        loss: returns a dataclass with a scalar `sum_nats`.
        observers: are told when the passes begin and end.

    Returns:
        What `loss` returned. Values and gradients are unchanged; the gradients are passed on, not copied.
    """
    backward = contextlib.ExitStack()

    def begin_backward() -> None:
        backward.enter_context(nvtx_range(LOSS_BACKWARD))
        for observer in observers:
            observer.loss_backward_begins()

    def end_backward() -> None:
        for observer in observers:
            observer.loss_backward_ended()
        backward.close()

    hidden_ND, weight_VD = _BackwardEnds.apply(hidden_ND, weight_VD, end_backward)
    for observer in observers:
        observer.loss_forward_begins()
    with nvtx_range(LOSS_FORWARD):
        output = loss(hidden_ND, weight_VD, labels_N)
    for observer in observers:
        observer.loss_forward_ended()
    return replace(output, sum_nats=BackwardMark.apply(output.sum_nats, begin_backward))


# ---------------------------------------------------------------------------------------------------- time
class StepTimer:
    """Times of steps between :meth:`start` and :meth:`stop`: CUDA events on a GPU, the clock on the CPU.

    Args:
        device: where the steps run.
        skip: first steps of this process that no figure counts: warm-up, tuning of kernels, traced steps.
    """

    def __init__(self, device: torch.device, skip: int) -> None:
        self._cuda = device.type == "cuda"
        self._skip = skip
        self._pending: deque[tuple[Any, Any]] = deque()
        self._seconds: list[float] = []

    def start(self) -> None:
        """The step begins."""
        self._begun = self._mark()

    def stop(self) -> None:
        """The step ends; never waits for the device."""
        marks = self._begun, self._mark()
        if self._skip > 0:
            self._skip -= 1
        else:
            self._pending.append(marks)

    @property
    def seconds(self) -> list[float]:
        """Times of the measured steps that the device has finished, in order."""
        while self._pending and (not self._cuda or self._pending[0][1].query()):
            self._seconds.append(_seconds_between(*self._pending.popleft()))
        return self._seconds

    def _mark(self) -> Any:
        return _moment(self._cuda)


class LossTimer:
    """Time between the moments when the device enters and leaves the loss layer's passes, of each step.

    Gaps in which the device waits for the host count, so that a small model's loss takes longer than its kernels.

    Args:
        device: where the steps run.
        skip: steps left out, as of :class:`StepTimer`.
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
        self._begun = _moment(self._cuda)

    def loss_forward_ended(self) -> None:
        """Called by :func:`watched_loss`."""
        self._passed("forward")

    def loss_backward_begins(self) -> None:
        """Called by :func:`watched_loss`."""
        self._begun = _moment(self._cuda)

    def loss_backward_ended(self) -> None:
        """Called by :func:`watched_loss`."""
        self._passed("backward")

    def step_ended(self) -> None:
        """The step's micro-steps count together; never waits for the device."""
        step, self._step = self._step, {}
        if self._skip > 0:
            self._skip -= 1
        else:
            self._pending.append(step)

    def _passed(self, name: str) -> None:
        self._step.setdefault(name, []).append((self._begun, _moment(self._cuda)))

    @property
    def seconds(self) -> list[dict[str, float]]:
        """Seconds of the forward and of the backward passes of the measured steps that the device has finished, in
        order; a pass that a step did not have is missing."""
        while self._pending and self._has_left(self._pending[0]):
            passes = self._pending.popleft()
            self._seconds.append({name: sum(_seconds_between(*m) for m in moments) for name, moments in passes.items()})
        return self._seconds

    def _has_left(self, step: dict[str, list[tuple[Any, Any]]]) -> bool:
        return not self._cuda or all(passes[-1][1].query() for passes in step.values())


class WallClock:
    """Wall-clock time from the end of each step to the end of the next, without what was :meth:`paused`.

    A lap holds the step and what the host does before it. The device says when a step ended, on a GPU by a CUDA event:
    the host learns that later, by as much as it is behind or ahead of the device.

    Args:
        device: where the steps run.
        skip: laps left out, as of :class:`StepTimer`.
    """

    def __init__(self, device: torch.device, skip: int) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self._skip = skip
        self._begun: Any = None
        self._stretches: list[tuple[Any, Any]] = []  # of the lap that runs, before its last pause
        self._pending: deque[list[tuple[Any, Any]]] = deque()
        self._seconds: list[float] = []

    def start(self) -> None:
        """The first lap begins once the device has done what it was given."""
        self._begun = self._mark_when_idle()

    def lap(self) -> None:
        """A step ends; never waits for the device."""
        now = _moment(self._cuda)
        stretches = [*self._stretches, (self._begun, now)]
        self._begun, self._stretches = now, []
        if self._skip > 0:
            self._skip -= 1
        else:
            self._pending.append(stretches)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The block counts for no lap. At its beginning and its end the host waits for the device."""
        if self._begun is not None:
            self._stretches.append((self._begun, self._mark_when_idle()))
        yield
        self.start()

    @property
    def seconds(self) -> list[float]:
        """Times of the measured laps that the device has finished, in order."""
        while self._pending and (not self._cuda or self._pending[0][-1][1].query()):
            self._seconds.append(sum(_seconds_between(*stretch) for stretch in self._pending.popleft()))
        return self._seconds

    def _mark_when_idle(self) -> Any:
        if self._cuda:
            torch.cuda.synchronize(self._device)
        return _moment(self._cuda)


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
        skip: first steps of this process that no figure counts: warm-up, tuning of kernels, traced steps.
        tokens_per_step: of an optimizer step, all ranks.
    """

    def __init__(self, device: torch.device, skip: int, tokens_per_step: int) -> None:
        self._skip, self._tokens_per_step = skip, tokens_per_step
        self.steps, self.loss = StepTimer(device, skip), LossTimer(device, skip)
        self.clock = WallClock(device, skip)
        self._measured = 0
        self._since_record: list[_Lap] = []
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)

    def step_begins(self) -> None:
        """Before the step's first work."""
        self.steps.start()

    def step_ended(self) -> None:
        """The step's last work is given to the device; never waits for it."""
        self.steps.stop()
        self.loss.step_ended()
        self.clock.lap()

    def arrived(self, step_of_process: int) -> None:
        """Step `step_of_process` (from 1) is done on the device; once for each step."""
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


def _moment(cuda: bool) -> Any:
    """Now: on a GPU an event that it will pass, else the clock."""
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds_between(begun: Any, ended: Any) -> float:
    """Seconds between two moments that are past."""
    return begun.elapsed_time(ended) / 1e3 if isinstance(begun, torch.cuda.Event) else ended - begun


def matmul_rate(dtype: torch.dtype, size: int = 512, bursts: int = 5, seconds: float = 0.02) -> float:
    """FLOP/s of a square matrix product on this CPU: the best of some short bursts, about 0.1 s in all."""
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


# -------------------------------------------------------------------------------------------------- memory
def tensor_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of `tensors`, which share no memory, on this rank; None counts nothing."""
    here = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors if tensor is not None)
    return sum(tensor.nbytes for tensor in here)


class MemoryByComponent:
    """Bytes of parameters, gradients, optimizer state, activations and the loss layer, and the peak.

    After :meth:`start`, the first call of :func:`watched_loss` and the first optimizer update are taken
    apart. The marks are host-side reads of the allocator's counters: that step takes as long as any other.

    On CPU the tensors are counted, and the peak is that of the whole process's resident set since it began,
    imports and data included (`resident_peak`); activations and loss layer cannot be told apart there.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._parameters = list(model.parameters())
        self._cuda = device.type == "cuda"
        self._device = device
        self._before_loss = 0
        self._earlier_peak = 0  # of the time before the last reset of the allocator's own peak
        self._due: set[str] = set()
        self._bytes: dict[str, int] = {"parameters": tensor_bytes(self._parameters)}
        self._optimizer = optimizer
        optimizer.register_step_pre_hook(self._count_gradients)

    def start(self) -> None:
        """Begin measuring: forget the peak so far, and take the next step apart."""
        self._due = {"gradients", "loss_forward", "loss_backward"}
        if self._cuda:
            self._earlier_peak = 0
            torch.cuda.reset_peak_memory_stats(self._device)

    def report(self) -> dict[str, int]:
        """Bytes by component, of those measured so far.

        On CUDA `peak` is the most that was allocated at once since :meth:`start`. `activations` is what was
        allocated when the loss layer began, less parameters, gradients and optimizer state: saved
        activations, compute-dtype copies of weights, the batch. `loss_forward` and `loss_backward` are the
        most that its two passes had allocated beyond that, gradients of hidden states and weight included.
        """
        state = (value for entry in self._optimizer.state.values() for value in entry.values())
        report = {
            **self._bytes,
            "optimizer": tensor_bytes(value for value in state if torch.is_tensor(value)),
        }
        if self._cuda:
            report["peak"] = self._peak()
        else:
            report["resident_peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return report

    def loss_forward_begins(self) -> None:
        """Called by :func:`watched_loss`."""
        if self._cuda and "loss_forward" in self._due:
            self._reset_peak()
            self._before_loss = torch.cuda.memory_allocated(self._device)
            fixed = self.report()["optimizer"] + self._bytes["parameters"] + self._gradient_bytes()
            self._bytes["activations"] = self._before_loss - fixed

    def loss_forward_ended(self) -> None:
        """Called by :func:`watched_loss`."""
        self._take("loss_forward")

    def loss_backward_begins(self) -> None:
        """Called by :func:`watched_loss`."""
        if self._cuda and "loss_backward" in self._due:
            self._reset_peak()

    def loss_backward_ended(self) -> None:
        """Called by :func:`watched_loss`."""
        self._take("loss_backward")

    def _take(self, component: str) -> None:
        if self._cuda and component in self._due:
            self._due.discard(component)
            self._bytes[component] = torch.cuda.max_memory_allocated(self._device) - self._before_loss

    def _count_gradients(self, *_: object) -> None:
        if "gradients" in self._due:
            self._due.discard("gradients")
            self._bytes["gradients"] = self._gradient_bytes()

    def _gradient_bytes(self) -> int:
        return tensor_bytes(parameter.grad for parameter in self._parameters)

    def _peak(self) -> int:
        return max(self._earlier_peak, torch.cuda.max_memory_allocated(self._device))

    def _reset_peak(self) -> None:
        self._earlier_peak = self._peak()
        torch.cuda.reset_peak_memory_stats(self._device)


# -------------------------------------------------------------------------------------------------- traces
@contextlib.contextmanager
def trace(profile_steps: int, path: Path, skip: int) -> Iterator[Callable[[], None]]:
    """Trace `profile_steps` steps with torch.profiler into `path` (.json or .json.gz; for Perfetto).

    Yields a function to call at the end of every step. `skip` steps pass first, the last of them under the
    profiler but unrecorded (it takes time to start). With `profile_steps=0` nothing happens. If the run ends
    earlier, the steps recorded so far are written.

    Raises:
        StorageError: the trace cannot be written.
    """
    if profile_steps == 0:
        yield lambda: None
        return

    def export(profiler: torch.profiler.profile) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            raise StorageError(f"the trace {path} cannot be written ({error})", "free disk space") from error

    warmup = min(1, skip)
    schedule = torch.profiler.schedule(wait=skip - warmup, warmup=warmup, active=profile_steps, repeat=1)
    with torch.profiler.profile(schedule=schedule, on_trace_ready=export, record_shapes=True) as profiler:
        yield profiler.step


@contextlib.contextmanager
def memory_snapshot(path: Path, device: torch.device, max_entries: int = 200_000) -> Iterator[None]:
    """Record the block's allocations, with stack traces, into `path` (open at pytorch.org/memory_viz).

    The snapshot is written however the block ends: it explains an out-of-memory error best.

    Raises:
        UnsupportedError: `device` is no GPU.
        StorageError: the snapshot cannot be written.
    """
    if device.type != "cuda":
        cause = "a memory snapshot records CUDA allocations, and this run is on the CPU"
        raise UnsupportedError(cause, "use trainer.memory_snapshot=false or device=cuda")
    torch.cuda.memory._record_memory_history(max_entries=max_entries)
    try:
        yield
    except BaseException:
        with contextlib.suppress(StorageError):  # what went wrong in the block matters more
            _write_snapshot(path)
        raise
    else:
        _write_snapshot(path)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def _write_snapshot(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))
    except OSError as error:
        raise StorageError(f"the snapshot {path} cannot be written ({error})", "free disk space") from error
