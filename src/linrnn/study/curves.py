"""Loss curves laid over each other: means over a number of steps, whatever steps were logged."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import fsum
from statistics import fmean

SMOOTHED_STEPS = 20
LAST = 50  # steps at the end of a curve that are averaged, as train_loss_nats does
Curve = Sequence[tuple[int, float]]  # (step, value) of every logged step, oldest first


@dataclass(frozen=True)
class Comparison:
    """Two curves over the steps that both have.

    Attributes:
        steps: logged steps that both have.
        every: steps from one of these to the next, at most.
        largest: the most that means over SMOOTHED_STEPS steps differ, nats; None where there is no such mean.
        last: mean difference over the LAST steps that both have, nats.
    """

    steps: int
    every: int
    largest: float | None
    last: float | None


def compare(curve: Curve, other: Curve) -> Comparison:
    """To be called with the raw curves of metrics.jsonl: a thinned curve has lost some of what the means hold."""
    common = _difference(curve, other)
    if not common:
        return Comparison(0, 0, None, None)
    steps = [step for step, _ in common]
    every = max((after - before for before, after in pairwise(steps)), default=steps[0])
    # A window with a single logged step is no mean; the first windows are shorter than SMOOTHED_STEPS.
    full = [nats for step, nats in smoothed(common) if step >= SMOOTHED_STEPS] if 2 * every <= SMOOTHED_STEPS else []
    largest = max((abs(nats) for nats in full), default=None)
    return Comparison(len(common), every, largest, mean_of_last(common))


def difference(curve: Curve, other: Curve) -> list[tuple[int, float]]:
    """(step, nats above the other's), as a mean over SMOOTHED_STEPS steps."""
    return smoothed(_difference(curve, other))


def smoothed(curve: Curve) -> list[tuple[int, float]]:
    """At each logged step s the mean of what was logged in the steps s - SMOOTHED_STEPS + 1 to s."""
    steps, values = [step for step, _ in curve], [value for _, value in curve]
    starts = (bisect_right(steps, step - SMOOTHED_STEPS) for step in steps)
    return [
        (step, fsum(values[start:end]) / (end - start))
        for end, (step, start) in enumerate(zip(steps, starts, strict=True), start=1)
    ]


def mean_of_last(curve: Curve) -> float | None:
    """Mean of what was logged in the last LAST steps."""
    return fmean(value for step, value in curve if step > curve[-1][0] - LAST) if curve else None


def thinned(curve: Curve, every: int) -> list[tuple[int, float]]:
    """Every n-th point from the first on, so that runs which ended at different steps keep the same ones; and all of
    the last LAST steps, so that their mean stays what it was. Six digits."""
    end = curve[-1][0] if curve else 0
    kept = [(step, value) for n, (step, value) in enumerate(curve) if n % every == 0 or step > end - LAST]
    return [(step, float(f"{value:.6g}")) for step, value in kept]


def _difference(curve: Curve, other: Curve) -> list[tuple[int, float]]:
    values = dict(other)
    return [(step, value - values[step]) for step, value in curve if step in values]
