"""Compare two sets of ratios that are not paired. Only the documents' figures need this."""

import math
from collections.abc import Sequence
from statistics import fmean

from scipy import stats

from linrnn.runs.intervals import CONFIDENCE, Estimate


def ratio_of_means(values: Sequence[float], others: Sequence[float]) -> Estimate:
    """Ratio of the geometric means of two sets of ratios that are not paired, with Welch's 90 % interval.

    Two intervals that overlap do not show that two means are equal. This interval says whether they differ.

    Args:
        values, others: at least two of each.
    """
    logs, other_logs = ([math.log(value) for value in some] for some in (values, others))
    found = stats.ttest_ind(logs, other_logs, equal_var=False).confidence_interval(CONFIDENCE)
    ratio = math.exp(fmean(logs) - fmean(other_logs))
    return Estimate(min(len(logs), len(other_logs)), ratio, math.exp(found.low), math.exp(found.high))
