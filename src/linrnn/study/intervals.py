"""The study's statistics, in one place: paired values, their median, a 90 % interval, and what it says of a bound.

A value is one pair's: a run and the baseline's run of the same seed. Ratios are averaged as logarithms, so that the
verdict is the same whichever of the two losses stands below the line.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

CONFIDENCE = 0.90  # two-sided; so each of the two one-sided tests of an equivalence is one at 5 %
LEAST_PAIRS = 5  # of speeds and losses: fewer decide nothing
AT_MOST, AT_LEAST, WITHIN = "≤", "≥", "within ±"


@dataclass(frozen=True)
class Estimate:
    """What n values say.

    Attributes:
        n: number of values.
        value: their median.
        low, high: the 90 % interval of their mean (of ratios: the geometric mean); None for a single value.
    """

    n: int
    value: float
    low: float | None
    high: float | None


def estimate(values: Sequence[float], *, ratios: bool) -> Estimate:
    """Median and Student's 90 % interval of one value a pair.

    Student's t and no bootstrap: a bootstrap cannot leave the range of the values, and with five of them its interval
    holds the truth far less often than it says.

    Args:
        values: one a pair, at least one.
        ratios: whether they are ratios, all positive, whose logarithms are averaged.
    """
    scaled = [math.log(value) for value in values] if ratios else list(values)
    if len(scaled) < 2:
        return Estimate(len(scaled), median(values), None, None)
    low, high = _student(scaled)
    if ratios:
        low, high = math.exp(low), math.exp(high)
    return Estimate(len(scaled), median(values), low, high)


def extent(values: Sequence[float]) -> Estimate:
    """Median and range of values that are not subject to chance, such as bytes."""
    several = len(values) > 1
    return Estimate(len(values), median(values), min(values) if several else None, max(values) if several else None)


def answer(low: float, high: float, rule: str, target: float) -> bool | None:
    """Whether everything from `low` to `high` keeps to a bound (True) or breaks it (False); None where it does both.

    With `rule` WITHIN and a 90 % interval these are the two one-sided tests of equivalence (Schuirmann 1987): True says
    that the losses are equal within `target`.
    """
    if rule == WITHIN:
        if -target <= low and high <= target:
            return True
        return False if low > target or high < -target else None
    keeps = (lambda value: value <= target) if rule == AT_MOST else (lambda value: value >= target)
    return keeps(low) if keeps(low) == keeps(high) else None


def _student(values: Sequence[float]) -> tuple[float, float]:
    from scipy import stats

    error = float(stats.sem(values))
    if error == 0:
        return values[0], values[0]
    low, high = stats.t.interval(CONFIDENCE, len(values) - 1, loc=fmean(values), scale=error)
    return float(low), float(high)
