"""Verdicts on speed from the rows of benchmarks: whole steps, lines of steps beside each other, filtered gradients.

A pair is an interleaved repetition: both losses have a turn in it. The interval holds the noise of these repetitions.
It does not hold what differs between processes, such as the kernels that were tuned, the clocks and the CPU.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from benchmarks import loss_rows
from benchmarks.steps_rows import AGAIN, Row, options_of, ratio_of
from linrnn.core.errors import ConfigError
from linrnn.core.tables import Table
from linrnn.models.facts import model_in_words
from linrnn.report.targets import BASELINES, INCONCLUSIVE, NOT_REACHED, REACHED, Verdict, judge
from linrnn.runs.intervals import AT_LEAST, CONFIDENCE, LEAST_PAIRS, Estimate, answer
from study.criteria import BACKWARD, SPEED, SPEED_AT_LARGEST

HOST_DECIDES = 0.97  # a step is CPU-bound if the CPU issues kernels for so large a part of it
CPU_BOUND = "CPU-bound"
CHECKPOINTING = "activation_checkpointing="


@dataclass(frozen=True)
class StepSpeed:
    """A verdict on tokens/s at the same batch, and the rows behind it.

    Attributes:
        verdict: its setting names the configuration in words.
        row, base: the judged loss, and the baseline.
    """

    verdict: Verdict
    row: Row
    base: Row

    @property
    def ratios(self) -> list[float]:
        """Of tokens/s, one per repetition."""
        return _ratios(self.row, self.base)

    @property
    def attainable(self) -> float | None:
        """The ratio of a loss layer that takes no time; None if the baseline's was not measured."""
        step, of_loss = self.base.step_ms, self.base.loss_layer_ms
        return step / (step - of_loss) if step and of_loss and of_loss < step else None


def step_speeds(rows: Sequence[Row]) -> list[StepSpeed]:
    """A verdict for every loss of every configuration against compiled and eager, where both ran in one process.

    A line whose losses have batches of their own is held to the target of the largest batches.

    It is inconclusive where either loss's steps are CPU-bound. AGAIN, the A/A test, is judged against compiled alone:
    the same loss, whose ratio shows the noise.
    """
    names, batches = names_of(rows), _batches_of(rows)
    found = []
    for row, base in _pairs(rows):
        doubts = [CPU_BOUND] if max(host_share(row), host_share(base)) >= HOST_DECIDES else []
        verdict = judge(
            SPEED_AT_LARGEST if len(set(batches[row.line])) > 1 else SPEED,
            row.model,
            row.loss,
            base.loss,
            _ratios(row, base),
            setting=names[row.line],
            doubts=doubts,
        )
        found.append(StepSpeed(verdict, row, base))
    return found


def _batches_of(rows: Iterable[Row]) -> dict[str, list[int]]:
    """The sequences of each model line's losses, in the order of the rows, without the A/A test."""
    found: dict[str, list[int]] = defaultdict(list)
    for row in rows:
        if row.loss != AGAIN:
            found[row.line].append(row.batch)
    return found


def _ratios(row: Row, base: Row) -> list[float]:
    more = row.batch / base.batch
    return [of_base / own * more for own, of_base in zip(row.wall_ms, base.wall_ms, strict=True)]


def _pairs(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Every row with each of its baselines, if they share their process."""
    by_line: dict[str, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        by_line[row.line][row.loss] = row
    for losses in by_line.values():
        for row in losses.values():
            for against in BASELINES[:1] if row.loss == AGAIN else BASELINES:
                base = losses.get(against)
                if base is not None and base is not row and ratio_of(row, base) is not None:
                    yield row, base


def host_share(row: Row) -> float:
    """The part of a step in which the CPU issues kernels; 0 if nothing was measured."""
    return median(row.host_ms) / row.step_ms if row.host_ms and row.step_ms else 0.0


def names_of(rows: Sequence[Row]) -> dict[str, str]:
    """The model lines in words. Vocabulary, and batch x length, stand in them if a size was measured with several.

    Losses with batches of their own have them all in the name, in the order of the rows: 12 / 7 / 13 x 2,048.
    """
    vocabularies: dict[str, set[int]] = defaultdict(set)
    tokens: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for row in rows:
        vocabularies[row.size].add(row.v)
        if row.loss == BASELINES[0]:  # the other losses may have batches of their own
            tokens[row.size].add((row.batch, row.seq))
    names: dict[str, str] = {}
    batches = _batches_of(rows)
    for row in sorted(rows, key=lambda row: row.loss != BASELINES[0]):
        if row.line in names:
            continue
        own = batches[row.line]
        shown = " / ".join(map(str, own if len(set(own)) > 1 else own[:1]))
        several = [f"{shown} x {row.seq:,}"] if len(tokens[row.size]) > 1 or len(set(own)) > 1 else []
        several += [f"V = {row.v:,}"] if len(vocabularies[row.size]) > 1 else []
        options = options_of(row.line)
        told = [
            f"{value} checkpointing"
            for word in options
            if word.startswith(CHECKPOINTING) and (value := word.removeprefix(CHECKPOINTING)) != "none"
        ]
        others = [word for word in options if not word.startswith(CHECKPOINTING)]
        names[row.line] = ", ".join([model_in_words(row.model, row.size), *told, *several, *others])
    return names


# ------------------------------------------------------------------------------------------- a line beside another
def line_ratios(rows: Sequence[Row], name: str) -> Table:
    """For every other line, and each loss that both lines ran: its values divided by those of the line `name`.

    Repetitions of two lines are not paired: each line has a model of its own. The intervals are Welch's.

    A gain is the baseline's time divided by the loss's time, in one round. Its verdict asks for a gain that is at least
    that of the line `name`. A gain over compiled is inconclusive where a line's A/A test excludes 1: compiled, built
    twice, then differs from itself by more than its repetitions show.

    Args:
        name: of a line, as :func:`names_of` writes it.

    Raises:
        ConfigError: no line has this name.
    """
    names = names_of(rows)
    if name not in names.values():
        known = "; ".join(dict.fromkeys(names.values()))
        raise ConfigError(f"{name!r}: no line has this name", f"name in study/folders.yaml one of: {known}")
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


# ------------------------------------------------------------------------------------- the backward pass of a filter
FILTER = "cce_filter"
FILTERED = 1.5  # a filtered dE errs more than this multiple of fp32 logits' error; an exact one does not


@dataclass(frozen=True)
class FilterSpeed:
    """A verdict on one shape and kind of logits, and the filter's row."""

    verdict: Verdict
    row: loss_rows.Row

    @property
    def shape(self) -> str:
        return f"{self.row.n:,} x {self.row.d:,} x {self.row.v:,}"


def filter_speeds(directory: Path, *, filtered: bool = True) -> Iterator[FilterSpeed]:
    """A verdict for every row of the grid that the filter filters, by N, D and V.

    Args:
        directory: of one GPU's rows.
        filtered: False for the other rows, in which the planner made the loss exact.
    """
    rows = [row for path in directory.glob("*.json") for row in loss_rows.read_rows(path) if row.set == "grid"]
    bases = {row.problem: row for row in rows if row.backend == BASELINES[0]}
    for row in sorted(rows, key=lambda row: (row.n, row.d, row.v, row.logits)):
        if row.backend == FILTER and ((row.de_err_ratio or 0) > FILTERED) == filtered:
            values = [base / own for base, own in zip(_added(bases[row.problem]), _added(row), strict=True)]
            yield FilterSpeed(judge(BACKWARD, "-", FILTER, BASELINES[0], values, setting=row.logits), row)


def _added(row: loss_rows.Row) -> list[float]:
    """What gradients add to the time of a forward pass, ms by round."""
    return [both - forward for both, forward in zip(row.rounds_ms, row.forward_rounds_ms, strict=True)]
