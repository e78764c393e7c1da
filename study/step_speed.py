"""Results on the speed of whole steps, from the benchmark that runs every loss in one process.

A pair is an interleaved repetition: both losses have a turn in it. The interval holds the noise of these repetitions.
It does not hold what differs between processes, such as the kernels that were tuned, the clocks and the CPU.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.steps_rows import AGAIN, Row, ratio_of, titles_of
from linrnn.models.facts import model_in_words
from linrnn.report.targets import BASELINES, Verdict, judge
from study.criteria import SPEED, SPEED_AT_LARGEST

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
    titles, batches = titles_of(rows), _batches_of(rows)
    for row in sorted(rows, key=lambda row: row.loss != BASELINES[0]):
        if row.line in names:
            continue
        own = batches[row.line]
        shown = " / ".join(map(str, own if len(set(own)) > 1 else own[:1]))
        several = [f"{shown} x {row.seq:,}"] if len(tokens[row.size]) > 1 or len(set(own)) > 1 else []
        several += [f"V = {row.v:,}"] if len(vocabularies[row.size]) > 1 else []
        _, _, rest = titles[row.line].partition(f"V = {row.v:,}")
        options = [word for word in rest.split(", ") if word]
        told = [
            f"{value} checkpointing"
            for word in options
            if word.startswith(CHECKPOINTING) and (value := word.removeprefix(CHECKPOINTING)) != "none"
        ]
        others = [word for word in options if not word.startswith(CHECKPOINTING)]
        names[row.line] = ", ".join([model_in_words(row.model, row.size), *told, *several, *others])
    return names
