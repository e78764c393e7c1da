"""The project's intervals: median and 90 % interval of paired values, and what they say about a bound.

A value compares a run with the baseline's run of the same seed. Ratios are averaged as logarithms. The verdict is then
the same whichever of the two losses is the denominator.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

CONFIDENCE = 0.90  # two-sided; each of the two one-sided tests of an equivalence is then at 5 %
LEAST_PAIRS = 5  # fewer pairs of speeds or losses decide nothing
AT_MOST, AT_LEAST, WITHIN = "≤", "≥", "within ±"


@dataclass(frozen=True)
class Estimate:
    """The estimate from n values.

    Attributes:
        n: number of values.
        value: their median.
        low, high: the 90 % interval of their mean (for ratios: the geometric mean); None for a single value.
    """

    n: int
    value: float
    low: float | None
    high: float | None


def estimate(values: Sequence[float], *, ratios: bool) -> Estimate:
    """Median and Student's 90 % interval of values, one per pair.

    A bootstrap would be wrong here. It cannot leave the range of the values, and with five values its interval contains
    the truth far less often than it claims.

    Args:
        values: one per pair, at least one.
        ratios: whether the values are positive ratios, whose logarithms are averaged.
    """
    from scipy.special import stdtrit  # Student's t; takes a while to import

    n, middle = len(values), median(values)
    if n < 2:
        return Estimate(n, middle, None, None)
    scaled = [math.log(value) for value in values] if ratios else list(values)
    half = stdev(scaled) / math.sqrt(n) * float(stdtrit(n - 1, (1 + CONFIDENCE) / 2))
    low, high = fmean(scaled) - half, fmean(scaled) + half
    return Estimate(n, middle, *((math.exp(low), math.exp(high)) if ratios else (low, high)))


def extent(values: Sequence[float]) -> Estimate:
    """Median and range of values that do not vary by chance, such as bytes."""
    several = len(values) > 1
    return Estimate(len(values), median(values), min(values) if several else None, max(values) if several else None)


def answer(low: float, high: float, rule: str, target: float) -> bool | None:
    """Whether the interval from `low` to `high` meets a bound (True) or breaks it (False); None if it does both.

    With `rule` WITHIN and a 90 % interval these are the two one-sided tests of equivalence (Schuirmann 1987). True then
    means that the losses are equal within `target`.
    """
    if rule == WITHIN:
        if -target <= low and high <= target:
            return True
        return False if low > target or high < -target else None
    keeps = (lambda value: value <= target) if rule == AT_MOST else (lambda value: value >= target)
    return keeps(low) if keeps(low) == keeps(high) else None
