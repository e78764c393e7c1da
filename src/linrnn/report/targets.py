"""What a target demands of a metric, and how values become a result.

A sweep's file may name targets:

    targets:
      - {metric: peak_memory_bytes, at_most: 0.6, of: compiled}    # a ratio of two runs of one seed
      - {metric: valid_loss_nats, within: 0.01, of: compiled}      # a difference, in both directions

The sweep stores them beside its runs (TARGETS). A report without targets compares, and judges nothing.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linrnn.core.errors import ConfigError
from linrnn.core.files import read_json, write_json
from linrnn.losses import loss_names
from linrnn.report.metrics import METRICS, Metric, Sample
from linrnn.runs.intervals import AT_LEAST, AT_MOST, LEAST_PAIRS, WITHIN, answer, estimate, extent

REACHED, NOT_REACHED, INCONCLUSIVE, NOT_MEASURED = "reached", "not reached", "inconclusive", "not measured"
COMPARED = "compared"  # the word of a comparison without a target
BASELINES = ("compiled", "standard")  # what losses are compared with, unless a target says otherwise
TARGETS = "targets.json"  # beside the runs of a group
_RULES = {"at_most": AT_MOST, "at_least": AT_LEAST, "within": WITHIN}
# How results are reached.
RULES = (
    "A target is reached, or not reached, if the whole 90 % interval lies on that side of it; otherwise the result is "
    "inconclusive. A pair is a run and the baseline's run of the same seed. The value is the median over the pairs. "
    "The interval is Student's of the mean; for ratios, of the geometric mean. *Within* means two one-sided tests of "
    f"equivalence. Speeds and losses of fewer than {LEAST_PAIRS} pairs are inconclusive. Memory is the same in every "
    "run: one pair is enough, and the interval is a range."
)


@dataclass(frozen=True)
class Target:
    """A bound for a metric; without a rule, only what is compared."""

    metric: Metric
    rule: str = ""  # AT_MOST, AT_LEAST, or WITHIN (equal up to the bound, in both directions)
    bound: float = 0.0
    of: tuple[str, ...] = BASELINES  # the losses that others are compared with
    words: str = ""  # for a reader, where those of the metric would not do
    losses: tuple[str, ...] = ()  # that it is about; empty: all. `-NAME` leaves one out
    sizes: tuple[str, ...] = ()  # likewise
    pairs: int = LEAST_PAIRS  # fewer pairs of a value that varies by chance decide nothing

    @property
    def name(self) -> str:
        return self.words or self.metric.words

    @property
    def form(self) -> str:
        return self.metric.form

    @property
    def asked(self) -> str:
        """The rule and the bound, as in `≤ 0.600`."""
        space = "" if self.rule == WITHIN else " "
        return f"{self.rule}{space}{self.bound:{self.form.removeprefix('+')}}" if self.rule else "-"

    def is_about(self, loss: str, size: str) -> bool:
        return _chosen(loss, self.losses) and _chosen(size, self.sizes)


def _chosen(name: str, names: Sequence[str]) -> bool:
    wanted = [one for one in names if not one.startswith("-")]
    return f"-{name}" not in names and (not wanted or name in wanted)


COMPARISONS = tuple(Target(metric) for metric in METRICS.values() if metric.always)  # of a report without targets


def parse_target(entry: Mapping[str, Any]) -> Target:
    """A target from a mapping: `metric`, one of at_most, at_least and within, and the other attributes of Target.

    Raises:
        ConfigError: a key, a metric or a loss is unknown, or not exactly one rule is named.
    """
    said = f"the target {dict(entry)}"
    known = ("metric", *_RULES, "of", "words", "losses", "sizes", "pairs")
    if unknown := [key for key in entry if key not in known]:
        raise ConfigError(f"{said} has an unknown key {unknown[0]}", f"a target has {', '.join(known)}")
    rules = [rule for rule in _RULES if rule in entry]
    if len(rules) != 1 or not isinstance(bound := entry[rules[0]], int | float):
        raise ConfigError(f"{said} names no bound, or several", "give a number to one of at_most, at_least and within")
    lists = {key: _names(entry[key]) for key in ("of", "losses", "sizes") if key in entry}
    _known(said, "metric", str(entry.get("metric")), METRICS)
    for loss in (*lists.get("of", ()), *lists.get("losses", ())):
        _known(said, "loss", loss.lstrip("-").split()[0], loss_names())
    if not isinstance(pairs := entry.get("pairs", LEAST_PAIRS), int) or pairs < 2:
        raise ConfigError(f"{said}: pairs={pairs} gives no interval", f"use 2 or more; {LEAST_PAIRS} is the default")
    metric, words = METRICS[entry["metric"]], str(entry.get("words", ""))
    return Target(metric, _RULES[rules[0]], bound, words=words, pairs=pairs, **lists)


def _known(said: str, what: str, name: str, names: Sequence[str] | Mapping[str, Any]) -> None:
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1, cutoff=0)[0]
        raise ConfigError(f"{said}: there is no {what} {name}", f"nearest: {near}; all: {', '.join(names)}")


def _names(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def store_targets(entries: Sequence[Mapping[str, Any]], group: Path) -> None:
    """Write the targets of a sweep beside the runs of its group."""
    group.mkdir(parents=True, exist_ok=True)
    write_json(group / TARGETS, [dict(entry) for entry in entries])


def read_targets(directory: Path) -> list[Target]:
    """The targets that stand in a directory; empty if none do."""
    path = directory / TARGETS
    return [parse_target(entry) for entry in read_json(path)] if path.exists() else []


@dataclass(frozen=True)
class Verdict:
    """One row: a target, or a comparison without one, for a model and a loss, against a baseline.

    The verdict is REACHED or NOT_REACHED if the whole interval is on one side of the bound. It is INCONCLUSIVE if it is
    not, or if there are too few pairs; NOT_MEASURED without a value; COMPARED without a target.
    """

    target: Target
    model: str
    backend: str  # the loss, with the options that tell it from others of the group
    against: str | None  # the baseline, likewise
    value: float | None  # median over the pairs; None if nothing was measured
    low: float | None  # with `high` the 90 % interval, or the range of values that do not vary by chance
    high: float | None
    n: int  # pairs; for an output layer's share, runs
    verdict: str
    setting: str = ""  # that it is about, if there are several
    remark: str = ""  # why it is inconclusive or not measured, or what else a reader must know


def judge(target: Target, model: str, backend: str, against: str | None, sample: Sample) -> Verdict:
    """The result of a sample, with the count of pairs, if they are too few, the doubts and the remarks in words."""
    names, metric, setting = (target, model, backend, against), target.metric, sample.setting
    if not sample.values:
        reason = _in_words(sample.remarks) or f"needs {metric.needs}"
        return Verdict(*names, None, None, None, 0, NOT_MEASURED, setting, reason)
    found = estimate(sample.values, ratios=metric.ratio) if metric.by_chance else extent(sample.values)
    few = metric.by_chance and found.n < target.pairs
    low, high = (found.value if bound is None else bound for bound in (found.low, found.high))
    holds = None if few or sample.doubts or not target.rule else answer(low, high, target.rule, target.bound)
    word = {True: REACHED, False: NOT_REACHED, None: INCONCLUSIVE if target.rule else COMPARED}[holds]
    count = f"n = {found.n}, needs {target.pairs}" if few and target.rule else ""
    words = _in_words([count, *sample.doubts, *sample.remarks])
    return Verdict(*names, found.value, found.low, found.high, found.n, word, setting, words)


def _in_words(said: Iterable[str]) -> str:
    """Each remark once, in their order."""
    return "; ".join(dict.fromkeys(filter(None, said)))
