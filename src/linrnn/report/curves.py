"""Compare loss curves: means over a number of steps, whichever steps were logged."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import fsum
from statistics import fmean

from linrnn.runs.summary import MEAN_OF_LAST

SMOOTHED_STEPS = 20
Curve = Sequence[tuple[int, float]]  # (step, value) of every logged step, oldest first


@dataclass(frozen=True)
class Comparison:
    """Two curves compared over their common steps.

    Attributes:
        steps: number of logged steps that both have.
        every: largest distance between two such steps.
        largest: the largest difference of means over SMOOTHED_STEPS steps, nats; None if there is no such mean.
        last: mean difference over the MEAN_OF_LAST common steps, nats.
    """

    steps: int
    every: int
    largest: float | None
    last: float | None


def compare(curve: Curve, other: Curve) -> Comparison:
    """Compare two curves. The means need all logged points."""
    common = _difference(curve, other)
    if not common:
        return Comparison(0, 0, None, None)
    steps = [step for step, _ in common]
    every = max((after - before for before, after in pairwise(steps)), default=steps[0])
    # Windows with a single logged step do not count, nor do the first windows, which are shorter than SMOOTHED_STEPS.
    full = [nats for step, nats in smoothed(common) if step >= SMOOTHED_STEPS] if 2 * every <= SMOOTHED_STEPS else []
    largest = max((abs(nats) for nats in full), default=None)
    return Comparison(len(common), every, largest, mean_of_last(common))


def difference(curve: Curve, other: Curve) -> list[tuple[int, float]]:
    """(step, nats above `other`), as a mean over SMOOTHED_STEPS steps."""
    return smoothed(_difference(curve, other))


def smoothed(curve: Curve) -> list[tuple[int, float]]:
    """For each logged step s, the mean of the values logged in steps s - SMOOTHED_STEPS + 1 to s."""
    steps, values = [step for step, _ in curve], [value for _, value in curve]
    starts = (bisect_right(steps, step - SMOOTHED_STEPS) for step in steps)
    return [
        (step, fsum(values[start:end]) / (end - start))
        for end, (step, start) in enumerate(zip(steps, starts, strict=True), start=1)
    ]


def mean_of_last(curve: Curve) -> float | None:
    """Mean of the values logged in the last MEAN_OF_LAST steps."""
    return fmean(value for step, value in curve if step > curve[-1][0] - MEAN_OF_LAST) if curve else None


def _difference(curve: Curve, other: Curve) -> list[tuple[int, float]]:
    values = dict(other)
    return [(step, value - values[step]) for step, value in curve if step in values]
