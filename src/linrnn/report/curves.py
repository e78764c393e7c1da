"""Compare loss curves: means over a number of steps, whichever steps were logged."""

from bisect import bisect_right
from itertools import pairwise
from math import fsum
from statistics import fmean

from linrnn.runs.summary import MEAN_OF_LAST

SMOOTHED_STEPS = 20
Curve = list[tuple[int, float]]  # (step, value) of every logged step, oldest first


def largest_difference(curve: Curve, other: Curve) -> tuple[float | None, int]:
    """The largest difference of means over SMOOTHED_STEPS steps, and the largest distance between two common steps.

    The means need all logged points. None: no window has two of them. A common step without
    another counts as SMOOTHED_STEPS from it.
    """
    common = _difference(curve, other)
    every = max((after - before for (before, _), (after, _) in pairwise(common)), default=SMOOTHED_STEPS)
    # The first windows are shorter than SMOOTHED_STEPS: they do not count.
    full = [abs(nats) for step, nats in smoothed(common) if step >= SMOOTHED_STEPS and 2 * every <= SMOOTHED_STEPS]
    return max(full, default=None), every


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
