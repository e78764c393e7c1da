"""Speeds from the rows of benchmarks: whole steps, and the backward pass of a filter.

A pair is an interleaved repetition: both losses have a turn in it. The interval holds the noise of these repetitions.
It does not hold what differs between processes, such as the kernels that were tuned, the clocks and the CPU.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median

from benchmarks import loss_rows
from benchmarks.common import grouped
from benchmarks.steps_rows import AGAIN, Row, options_of, ratio_of
from linrnn.models.facts import model_in_words
from linrnn.report.metrics import Sample
from linrnn.report.targets import BASELINES, Verdict, judge
from linrnn.runs.intervals import Estimate, estimate
from study.criteria import BACKWARD

CPU_BOUND_SHARE = 0.97  # a step is CPU-bound if the CPU issues kernels for so large a part of it
CPU_BOUND = "CPU-bound"
CHECKPOINTING = "activation_checkpointing="
FILTER = "cce_filter"
FILTERED = 1.5  # a filtered dE errs more than this multiple of fp32 logits' error; an exact one does not


def speeds(row: Row, base: Row) -> list[float]:
    """Ratios of tokens/s, one a repetition."""
    more = row.batch / base.batch
    return [of_base / own * more for own, of_base in zip(row.wall_ms, base.wall_ms, strict=True)]


def speed_of(row: Row | None, base: Row | None) -> Estimate | None:
    """Tokens/s as a multiple of another loss's; None unless both ran in one process."""
    if row is None or base is None or ratio_of(row, base) is None:
        return None
    return estimate(speeds(row, base), ratios=True)


def host_share(row: Row) -> float:
    """The part of a step in which the CPU issues kernels; 0 if nothing was measured."""
    return median(row.host_ms) / row.step_ms if row.host_ms and row.step_ms else 0.0


def names_of(rows: Sequence[Row]) -> dict[str, str]:
    """The model lines in words. Vocabulary, and batch x length, stand in them if a size was measured with several.

    Losses with batches of their own have them all in the name, in the order of the rows: 12 / 7 / 13 x 2,048.
    """
    vocabularies = {(row.size, row.v) for row in rows}
    tokens = {(row.size, row.batch, row.seq) for row in rows if row.loss == BASELINES[0]}  # others may have their own
    names: dict[str, str] = {}
    for own in _lines(rows):
        row = next((row for row in own if row.loss == BASELINES[0]), own[0])
        batches, options = _batches(own), options_of(row.line)
        differ = len(set(batches)) > 1
        kinds = [word.removeprefix(CHECKPOINTING) for word in options if word.startswith(CHECKPOINTING)]
        words = [f"{kind} checkpointing" for kind in kinds if kind != "none"]
        if differ or len([one for one in tokens if one[0] == row.size]) > 1:
            words.append(f"{' / '.join(map(str, batches if differ else batches[:1]))} x {row.seq:,}")
        if len([one for one in vocabularies if one[0] == row.size]) > 1:
            words.append(f"V = {row.v:,}")
        words += [word for word in options if not word.startswith(CHECKPOINTING)]
        names[row.line] = ", ".join([model_in_words(row.model, row.size), *words])
    return names


def _lines(rows: Iterable[Row]) -> list[list[Row]]:
    return grouped(list(rows), key=lambda row: row.line)


def _batches(rows: Sequence[Row]) -> list[int]:
    """The sequences of a line's losses, in the order of the rows, without the A/A test."""
    return [row.batch for row in rows if row.loss != AGAIN]


def filter_speeds(directory: Path) -> Iterator[tuple[Verdict, loss_rows.Row]]:
    """A verdict beside every row of a GPU's grid that the filter filters, by N, D and V."""
    rows = [row for row in loss_rows.read_rows(directory) if row.set == "grid"]
    bases = {row.problem: row for row in rows if row.backend == BASELINES[0]}
    for row in sorted(rows, key=lambda row: (row.n, row.d, row.v, row.logits)):
        if row.backend == FILTER and (row.de_err_ratio or 0) > FILTERED:
            values = [base / own for base, own in zip(_added(bases[row.problem]), _added(row), strict=True)]
            yield judge(BACKWARD, "-", FILTER, BASELINES[0], Sample(values, setting=row.logits)), row


def _added(row: loss_rows.Row) -> list[float]:
    """What gradients add to the time of a forward pass, ms by round."""
    return [both - forward for both, forward in zip(row.rounds_ms, row.forward_rounds_ms, strict=True)]
