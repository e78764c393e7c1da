"""Model lines of the benchmark of steps, compared with one of them: times of steps, and gains over a baseline.

Repetitions of two lines are not paired: each line has a model and repetitions of its own. The intervals are Welch's.
"""

import math
from collections.abc import Sequence
from statistics import fmean

from benchmarks.steps_rows import AGAIN, Row
from linrnn.core.errors import ConfigError
from linrnn.core.tables import Table
from linrnn.report.targets import BASELINES, INCONCLUSIVE, NOT_REACHED, REACHED, Verdict
from linrnn.runs.intervals import AT_LEAST, CONFIDENCE, LEAST_PAIRS, Estimate, answer
from study.step_speed import names_of, step_speeds


def line_ratios(rows: Sequence[Row], name: str) -> Table:
    """For every other line, and each loss that both lines ran: its values divided by those of the line `name`.

    A gain is the baseline's time divided by the loss's time, in one round. Its verdict asks for a gain that is at least
    that of the line `name`. A gain over compiled is inconclusive where a line's A/A test excludes 1: compiled, built
    twice, then differs from itself by more than its repetitions show.

    Args:
        name: of a line, as :func:`study.step_speed.names_of` writes it.

    Raises:
        ConfigError: no line has this name.
    """
    names = names_of(rows)
    if name not in names.values():
        known = "; ".join(dict.fromkeys(names.values()))
        raise ConfigError(
            f"compare_with={name!r}: no line has this name",
            f"use one of: {known}; what was measured is kept: add measure=false",
        )
    times = {(names[row.line], row.loss): row.wall_ms for row in rows if row.status == "ok"}
    speeds = step_speeds(rows)
    gains = {(one.verdict.setting, one.row.loss, one.verdict.against): one.ratios for one in speeds}
    drifting = {one.verdict.setting for one in speeds if one.row.loss == AGAIN and not _holds_one(one.verdict)}
    baselines = [base for base in BASELINES if any(against == base for *_, against in gains)]
    cells = [
        (
            *(line, f"`{loss}`", _ratio(own, times[name, loss])),
            *(
                _verdict(
                    gains.get((line, loss, base)),
                    gains.get((name, loss, base)),
                    decides=base != BASELINES[0] or not drifting & {line, name},
                )
                for base in baselines
            ),
        )
        for (line, loss), own in times.items()
        if line != name and (name, loss) in times
    ]
    columns = ("line", "loss", "step's time (90 %)", *(f"gain over `{base}` (90 %)" for base in baselines))
    return Table(columns, cells, words=("line", "loss"))


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


def _ratio(values: Sequence[float], others: Sequence[float]) -> str:
    one = ratio_of_means(values, others)
    return f"{one.value:.3f} ({one.low:.3f} to {one.high:.3f})"


def _holds_one(verdict: Verdict) -> bool:
    return verdict.low is not None and verdict.high is not None and verdict.low <= 1 <= verdict.high


def _verdict(gains: Sequence[float] | None, others: Sequence[float] | None, decides: bool) -> str:
    if gains is None or others is None:
        return "-"
    one = ratio_of_means(gains, others)
    assert one.low is not None
    assert one.high is not None
    met = answer(one.low, one.high, AT_LEAST, 1.0) if decides and one.n >= LEAST_PAIRS else None
    word = {True: REACHED, False: NOT_REACHED, None: INCONCLUSIVE}[met]
    return f"**{word}**: {_ratio(gains, others)}"
