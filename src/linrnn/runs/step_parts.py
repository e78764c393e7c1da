"""What a training step's time divides into, from what scripts/breakdown.py wrote."""

from collections import defaultdict
from typing import Any

from linrnn.runs.intervals import Estimate, estimate

STEP, HOST = "step", "host"  # of a breakdown's times, those that are no part of a step
REST = "the rest"


def parts_of_step(breakdown: dict[str, Any]) -> dict[str, float]:
    """Seconds of the median step by part, all passes together. The parts do not overlap; the last is what none holds.

    Where a breakdown divides the mixers, their projections and their scan stand in place of the mixers.
    """
    step = _medians(breakdown)[STEP]
    parts = {part: share.value * step for part, share in shares_of_step(breakdown).items() if part != REST}
    return {**parts, REST: step - sum(parts.values())}


def shares_of_step(breakdown: dict[str, Any]) -> dict[str, Estimate]:
    """The share of a step that each of these parts takes: the median over the timed steps, and its 90 % interval.

    All steps are of one process. A breakdown that kept the medians alone gives shares without an interval.
    """
    steps = seconds_of_steps(breakdown)
    return {part: share_of_step(steps, part) for part in _parts(steps[0])}


def seconds_of_steps(breakdown: dict[str, Any]) -> list[dict[str, float]]:
    """Seconds by part of every timed step, the divided mixers and the rest included. Without steps: the medians."""
    timed = []
    for step in breakdown["steps"]:
        seconds: dict[str, float] = defaultdict(float)
        for name, value in step.items():  # `part/pass`
            seconds[name.rpartition("/")[0] or name] += value
        timed.append({**seconds})
    return [{**seconds, REST: _parts(seconds)[REST]} for seconds in timed or [_medians(breakdown)]]


def share_of_step(steps: list[dict[str, float]], part: str) -> Estimate:
    """A part's share of :func:`seconds_of_steps`: the median, and its 90 % interval."""
    return estimate([seconds[part] / seconds[STEP] for seconds in steps], ratios=False)


def _medians(breakdown: dict[str, Any]) -> dict[str, float]:
    """Seconds by part, from the medians by part and pass."""
    return {name: sum(value or 0 for value in passes.values()) for name, passes in breakdown["time"].items()}


def _parts(times: dict[str, float]) -> dict[str, float]:
    divided = {name.split("/")[0] for name in times if "/" in name}
    parts = {name: seconds for name, seconds in times.items() if name not in {STEP, HOST, REST} | divided}
    return {**parts, REST: times[STEP] - sum(parts.values())}
