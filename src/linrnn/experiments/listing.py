"""The table of a sweep's dry run, and the points whose data or weights are not on this machine."""

import os
from collections import Counter
from collections.abc import Sequence

from linrnn.config.schema import RunSweepConfig
from linrnn.core.errors import DataError
from linrnn.core.machine import GIB, cores
from linrnn.experiments.points import START_SECONDS, Point
from linrnn.runs.summary import duration


def listing(points: Sequence[Point], config: RunSweepConfig, gpus: Sequence[str] = ()) -> list[str]:
    """The dry run's lines: name, memory, time and state of every point, then reasons and sums.

    Args:
        gpus: those that the points may use; empty: the points run on the CPU.
    """
    width = max(len(point.label) for point in points)
    lines = [f"{'point':<{width}}  {'memory, GiB':>11}  {'time':>8}  state"]
    states, reasons = Counter[str](), dict[str, int]()  # each reason is said once, below the table
    for point in points:
        state, reason = _state(point, config.retry)
        states[state] += 1
        budget = point.config.memory_budget_gib
        if reason:
            state += f" ({reasons.setdefault(reason, len(reasons) + 1)})"
        elif state == "to run" and budget and (point.memory_bytes or 0) > budget * GIB:
            state += f", will hardly fit the {budget:g} GiB budget"
        memory = "unknown" if point.memory_bytes is None else f"{point.memory_bytes / GIB:.2f}"
        seconds = "unknown" if point.seconds is None else duration(point.seconds)
        lines.append(f"{point.label:<{width}}  {memory:>11}  {seconds:>8}  {state}")
    return [
        *lines,
        "",
        *(f"({number}) {reason}" for reason, number in reasons.items()),
        f"{len(points)} points: {', '.join(f'{count} {state}' for state, count in states.items())}",
        *([f"each point has {config.sweep.ranks} ranks; its memory is that of one"] if config.sweep.ranks > 1 else []),
        "memory is estimated for a GPU (trainer.precision=auto: as on this machine), time with "
        f"{START_SECONDS:.0f} s a point to start, without tuning"
        + _in_all(pending(points, config.retry), config, gpus),
        "nothing was run or written",
    ]


def pending(points: Sequence[Point], retry: bool) -> list[Point]:
    """The points that a sweep would start."""
    return [point for point in points if point.refusal is None and not point.is_answered(retry)]


def check_inputs(points: Sequence[Point]) -> list[str]:
    """Lines that name the points whose data or weights are not on this machine.

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


def _state(point: Point, retry: bool) -> tuple[str, str | None]:
    """What a sweep would do with the point, and why it cannot run."""
    summary = point.summary()
    if summary is not None and point.is_answered(retry):
        return str(summary["status"]), None
    if point.refusal:
        return "unsupported", point.refusal
    if point.missing:
        return "no data", f"not on this machine: {point.missing.cause}; {point.missing.remedy}"
    return "to run", None


def _in_all(points: Sequence[Point], config: RunSweepConfig, gpus: Sequence[str]) -> str:
    """The time of all points, in words; empty if a time is unknown. Points that share a GPU or cores share its time."""
    foreseen = [point.seconds for point in points if point.seconds is not None]
    if not foreseen or len(foreseen) < len(points):
        return ""
    threads = os.environ.get("OMP_NUM_THREADS", "")  # of one rank; without it one uses all cores, each of several one
    of_rank = int(threads) if threads.isdecimal() else cores() if config.sweep.ranks == 1 else 1
    room = (len(gpus) or cores() // of_rank) // config.sweep.ranks
    at_a_time = min(config.jobs, max(1, room))
    words = f"; in all {duration(max(sum(foreseen) / at_a_time, *foreseen))}"
    if at_a_time == config.jobs:
        return words
    return f"{words}, since {config.jobs} points at a time share {f'{len(gpus)} GPUs' if gpus else 'the CPU'}"
