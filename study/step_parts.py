"""What a training step's time divides into, from what scripts/breakdown.py wrote."""

from typing import Any

from linrnn.experiments.breakdown import REST, STEP, parts_of, seconds_of_steps, share_of_step
from linrnn.runs.intervals import Estimate


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
    medians = _medians(breakdown)
    steps = seconds_of_steps(breakdown["steps"]) or [{**medians, **parts_of(medians)}]
    return {part: share_of_step(steps, part) for part in parts_of(steps[0])}


def _medians(breakdown: dict[str, Any]) -> dict[str, float]:
    """Seconds by part, from the medians by part and pass."""
    return {name: sum(value or 0 for value in passes.values()) for name, passes in breakdown["time"].items()}
