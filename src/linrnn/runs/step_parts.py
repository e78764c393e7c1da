"""What a training step's time divides into, from what scripts/breakdown.py wrote."""

from typing import Any

from linrnn.runs.intervals import Estimate, estimate

STEP, HOST = "step", "host"  # of a breakdown's times, those that are no part of a step
REST = "the rest"


def parts_of_step(breakdown: dict[str, Any]) -> dict[str, float]:
    """Seconds of a step by part, all passes together. The parts do not overlap, and the last is what no part holds.

    A part has its share of the median step (:func:`shares_of_step`). Where a breakdown divides the mixers, their
    projections and their scan stand in place of the mixers.
    """
    step = _all_medians(breakdown)[STEP]
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
    timed = [_all_passes(seconds) for seconds in breakdown["steps"]] or [_all_medians(breakdown)]
    return [{**seconds, REST: _parts(seconds)[REST]} for seconds in timed]


def share_of_step(steps: list[dict[str, float]], part: str) -> Estimate:
    """A part's share of :func:`seconds_of_steps`: the median, and its 90 % interval."""
    return estimate([seconds[part] / seconds[STEP] for seconds in steps], ratios=False)


def _all_medians(breakdown: dict[str, Any]) -> dict[str, float]:
    """Seconds by part, from the medians by part and pass."""
    return {name: sum(value or 0 for value in passes.values()) for name, passes in breakdown["time"].items()}


def _all_passes(seconds: dict[str, float]) -> dict[str, float]:
    """Seconds by part, from those by `part/pass`."""
    parts: dict[str, float] = {}
    for name, value in seconds.items():
        part = name.rpartition("/")[0] or name
        parts[part] = parts.get(part, 0.0) + value
    return parts


def _parts(times: dict[str, float]) -> dict[str, float]:
    divided = {name.split("/")[0] for name in times if "/" in name}
    parts = {name: seconds for name, seconds in times.items() if name not in {STEP, HOST, REST} | divided}
    return {**parts, REST: times[STEP] - sum(parts.values())}
