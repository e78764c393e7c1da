"""What a training step's time divides into, from what scripts/breakdown.py wrote."""

from typing import Any

STEP, HOST = "step", "host"  # of a breakdown's times, those that are no part of a step
REST = "the rest"


def parts_of_step(breakdown: dict[str, Any]) -> dict[str, float]:
    """Seconds of a step by part, all passes together. The parts do not overlap, and the last is what no part holds.

    Where a breakdown divides the mixers, their projections and their scan stand in place of the mixers.
    """
    times = {name: sum(value or 0 for value in passes.values()) for name, passes in breakdown["time"].items()}
    divided = {name.split("/")[0] for name in times if "/" in name}
    parts = {name: seconds for name, seconds in times.items() if name not in {STEP, HOST} | divided}
    return {**parts, REST: times[STEP] - sum(parts.values())}
