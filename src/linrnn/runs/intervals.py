"""The project's intervals: median and 90 % interval of paired values, and what they say about a bound.

The tables of the output layer alone and of Hugging Face models have another interval, :func:`interval_of_median`. It
decides no verdict.

A value compares a run with the baseline's run of the same seed. Ratios are averaged as logarithms. The verdict is then
the same whichever of the two losses is the denominator.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist, fmean, median, stdev
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

CONFIDENCE = 0.90  # two-sided; each of the two one-sided tests of an equivalence is then at 5 %
LEAST_PAIRS = 5  # fewer pairs of speeds or losses decide nothing
RESAMPLES = 2000  # of interval_of_median
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
    scaled = [math.log(value) for value in values] if ratios else list(values)
    if len(scaled) < 2:
        return Estimate(len(scaled), median(values), None, None)
    low, high = _student(scaled)
    if ratios:
        low, high = math.exp(low), math.exp(high)
    return Estimate(len(scaled), median(values), low, high)


def ratio_of_means(values: Sequence[float], others: Sequence[float]) -> Estimate:
    """Ratio of the geometric means of two sets of ratios that are not paired, with Welch's 90 % interval.

    Two intervals that overlap do not show that two means are equal. This interval says whether they differ.

    Args:
        values, others: at least two positive numbers each.
    """
    from scipy import stats

    logs, other_logs = ([math.log(value) for value in some] for some in (values, others))
    found = stats.ttest_ind(logs, other_logs, equal_var=False).confidence_interval(CONFIDENCE)
    ratio = math.exp(fmean(logs) - fmean(other_logs))
    return Estimate(min(len(logs), len(other_logs)), ratio, math.exp(found.low), math.exp(found.high))


def extent(values: Sequence[float]) -> Estimate:
    """Median and range of values that do not vary by chance, such as bytes."""
    several = len(values) > 1
    return Estimate(len(values), median(values), min(values) if several else None, max(values) if several else None)


def interval_of_median(values: "np.ndarray", seed: int) -> tuple[float, float]:
    """The 95 % bootstrap interval of the median of a process's rounds. Ten rounds hold the truth 94 times in 100.

    Args:
        values: one per round.
        seed: of the resampling.
    """
    import numpy as np

    samples = np.random.default_rng(seed).choice(values, size=(RESAMPLES, len(values)))
    low, high = np.quantile(np.median(samples, axis=1), (0.025, 0.975))
    return float(low), float(high)


def pairs_for(differences: Sequence[float], half_width: float) -> int:
    """About how many pairs give an interval of that half width, if they scatter as these differences do.

    Args:
        differences: one per pair, at least two.
        half_width: in their unit, of the 90 % interval.
    """
    critical = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    return max(2, math.ceil((critical * stdev(differences) / half_width) ** 2))


@dataclass(frozen=True)
class Crossover:
    """Where a backend and the baseline take the same time.

    Attributes:
        size: along the axis, interpolated between two sizes measured (logarithms of size and ratio).
        faster_above: whether the backend is the faster one above that size.
    """

    size: float
    faster_above: bool


def crossovers(sizes: Sequence[int], ratios: Sequence[float]) -> list[Crossover]:
    """Sizes at which the ratio of times to the baseline's passes 1, from the smallest to the largest.

    Args:
        sizes: distinct and ascending.
        ratios: one per size. A ratio of exactly 1 counts as faster.
    """
    logs, found = [math.log(ratio) for ratio in ratios], []
    for (size, log), (next_size, next_log) in pairwise(zip(sizes, logs, strict=True)):
        if (log <= 0) != (next_log <= 0):
            found.append(Crossover(size * (next_size / size) ** (log / (log - next_log)), next_log <= 0))
    return found


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


def _student(values: Sequence[float]) -> tuple[float, float]:
    from scipy import stats

    error = float(stats.sem(values))
    if error == 0:
        return values[0], values[0]
    low, high = _critical_values(len(values) - 1)
    return fmean(values) + error * low, fmean(values) + error * high


@functools.cache
def _critical_values(degrees_of_freedom: int) -> tuple[float, float]:
    """Of Student's t, at CONFIDENCE."""
    from scipy import stats

    low, high = stats.t.interval(CONFIDENCE, degrees_of_freedom)
    return float(low), float(high)
