"""Estimates of a sweep: the table of its dry run, and the time that its points still take."""

import os
import shlex
from collections import Counter
from collections.abc import Sequence

from linrnn.config.schema import HubDataConfig, RunSweepConfig
from linrnn.core.errors import DataError
from linrnn.core.machine import GIB, cores
from linrnn.experiments.points import Point
from linrnn.runs.summary import duration


class TimeLeft:
    """Estimates the time that points still take, from their expected times and those of finished points.

    Args:
        slots: number of points that run at a time.
        at_full_speed: points at a time that take no longer than expected; None: all. See :func:`points_at_full_speed`.
    """

    def __init__(self, slots: int, at_full_speed: int | None = None) -> None:
        self._slots = slots
        self._slowdown = slots / (at_full_speed or slots)
        self._done: list[tuple[Point, float]] = []

    def add(self, point: Point, seconds: float) -> None:
        """`point` finished after `seconds`."""
        self._done.append((point, seconds))

    def left(self, points: Sequence[Point], elapsed: float) -> float | None:
        """Seconds for `points`, which have already run for `elapsed` seconds in total; None if unknown."""
        foreseen = [point.seconds for point in points if point.seconds is not None]
        mean = sum(seconds for _, seconds in self._done) / len(self._done) if self._done else None
        if len(foreseen) == len(points) and all(point.seconds for point, _ in self._done):
            took = sum(seconds for _, seconds in self._done)
            expected = sum(point.seconds or 0 for point, _ in self._done)
            total = sum(foreseen) * (took / expected if expected else self._slowdown)
        elif mean is not None:
            total = mean * len(points)
        else:
            return None
        return (total - elapsed) / self._slots if elapsed < total else None  # a wrong forecast is no answer


def points_at_full_speed(jobs: int, gpus: Sequence[str], ranks: int = 1) -> int:
    """How many of `jobs` points at a time take no longer than expected. The expected time is that of a point alone.

    Points on one GPU share its time. Points on a CPU share its cores. A point alone uses OMP_NUM_THREADS cores for each
    rank. Without this variable one rank uses all cores, and each of several ranks uses one.
    """
    if gpus:
        return min(jobs, max(1, len(gpus) // ranks))
    threads = os.environ.get("OMP_NUM_THREADS", "")
    of_rank = int(threads) if threads.isdecimal() else cores() if ranks == 1 else 1
    used = of_rank * ranks
    return min(jobs, max(1, cores() // max(1, used)))


class Reasons:
    """Numbers for reasons, so that a table says each reason once, in a line below it."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number_of(self, reason: str) -> int:
        return self._numbers.setdefault(reason, len(self._numbers) + 1)

    def lines(self) -> list[str]:
        return ["", *(f"({number}) {reason}" for reason, number in self._numbers.items())] if self._numbers else []


def listing(points: Sequence[Point], config: RunSweepConfig, gpus: Sequence[str] = ()) -> list[str]:
    """The dry run's lines: name, memory, time and state of every point, then the sums.

    Args:
        gpus: those that the points may use; empty: the points run on the CPU.
    """
    width = max(len(point.label) for point in points)
    lines = [f"{'point':<{width}}  {'memory, GiB':>11}  {'time':>8}  state"]
    states, reasons = Counter[str](), Reasons()
    for point in points:
        state = _state(point, config.retry, reasons)
        states[state.split(" (")[0]] += 1
        budget = point.config.memory_budget_gib
        if state == "to run" and budget and (point.memory_bytes or 0) > budget * GIB:
            state += f", will hardly fit the {budget:g} GiB budget"
        memory = "unknown" if point.memory_bytes is None else f"{point.memory_bytes / GIB:.2f}"
        seconds = "unknown" if point.seconds is None else duration(point.seconds)
        lines.append(f"{point.label:<{width}}  {memory:>11}  {seconds:>8}  {state}")
    ahead = pending(points, config.retry)
    return [
        *lines,
        *reasons.lines(),
        "",
        f"{len(points)} points: {', '.join(f'{count} {state}' for state, count in states.items())}",
        *([f"each point has {config.sweep.ranks} ranks; its memory is that of one"] if config.sweep.ranks > 1 else []),
        *sorted({_hub_line(point) for point in ahead if point.hub}),
        "memory is estimated for a GPU (trainer.precision=auto: as on this machine), time without start-up and tuning"
        + _in_all(ahead, config, gpus),
        "nothing was run or written",
    ]


def pending(points: Sequence[Point], retry: bool) -> list[Point]:
    """The points that a sweep would start."""
    return [point for point in points if point.refusal is None and not point.is_answered(retry)]


def check_inputs(points: Sequence[Point]) -> list[str]:
    """Lines that name the points whose data or weights are not on this machine, and which the hub did not give.

    Raises:
        DataError: no point has its data and weights here.
    """
    lacking: dict[str, list[Point]] = {}
    for point in points:
        if point.missing is not None:
            lacking.setdefault(point.missing.cause, []).append(point)
    if points and sum(map(len, lacking.values())) == len(points):
        remedies = dict.fromkeys(point.missing.remedy for point in points if point.missing is not None)
        raise DataError(
            f"none of {len(points)} points can start: {'; '.join(lacking)}",
            f"{'; '.join(remedies)}; nothing was started",
        )
    return [
        f"{', '.join(point.label for point in those)} will fail: not on this machine: {cause}"
        for cause, those in lacking.items()
    ]


def _state(point: Point, retry: bool, reasons: Reasons) -> str:
    summary = point.summary()
    if summary is not None and point.is_answered(retry):
        return str(summary["status"])
    if point.refusal:
        return f"unsupported ({reasons.number_of(point.refusal)})"
    if point.missing:
        reason = f"not on this machine: {point.missing.cause}; {point.missing.remedy}"
        return f"no data ({reasons.number_of(reason)})"
    return "to run"


def _in_all(points: Sequence[Point], config: RunSweepConfig, gpus: Sequence[str]) -> str:
    """The time of all points, in words; empty if a time is unknown."""
    foreseen = [point.seconds for point in points if point.seconds is not None]
    if not foreseen or len(foreseen) < len(points):
        return ""
    at_a_time = points_at_full_speed(config.jobs, gpus, config.sweep.ranks)
    words = f"; in all {duration(max(sum(foreseen) / at_a_time, *foreseen))}"
    if at_a_time == config.jobs:
        return words
    return f"{words}, since {config.jobs} points at a time share {f'{len(gpus)} GPUs' if gpus else 'the CPU'}"


def _hub_line(point: Point) -> str:
    """What the point loads from the hub, and the command that fetches a data set ahead of the runs."""
    data, said = point.config.data, f"from the hub, which was not asked: {', '.join(point.hub)}"
    if not isinstance(data, HubDataConfig) or data.path not in point.hub:
        return said
    options = [override for override in point.overrides if override.startswith("data.")]
    command = shlex.join(["python", "scripts/prepare_data.py", f"data={data.name}", *options])
    return f"{said}; to fetch the data first: {command}"
