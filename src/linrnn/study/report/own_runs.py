"""What the report of a user's own runs has: no hypothesis of the study, and every abbreviation in words."""

import re
from collections.abc import Sequence
from dataclasses import replace

from linrnn.study.criteria import Verdict
from linrnn.study.results import Run

YARDSTICK = (
    "What is asked are the criteria of linrnn's own study. For other runs they are a yardstick, and no more "
    '(docs/sweeps.md, "How a verdict is reached").'
)
_HYPOTHESIS = re.compile(r" \(H\d[^)]*\)")
_MVE = "MVE: the minimum viable experiment of the study, whose criteria are those of size=mve."
_WORDS = (
    "n: pairs of runs behind a value. B: sequences of a batch. T: tokens of a sequence. V: entries of the vocabulary.",
    "nats: the unit of a loss with the natural logarithm. Perplexity is e to the loss.",
    "MFU: model FLOPs utilisation, the share of the GPU's peak rate that the model's own FLOPs take. *By 6N* counts "
    "6 FLOPs for each of N parameters and each token, and adds attention and recurrence. A CPU run has neither.",
)


def are_of_study(runs: Sequence[Run]) -> bool:
    """Whether a report holds runs of the study: a command names one of its experiments (`experiment=mve`)."""
    words = [word for run in runs for word in run.summary["command"].split()]
    return any(word.startswith("experiment=") and word != "experiment=null" for word in words)


def without_hypotheses(found: Sequence[Verdict]) -> list[Verdict]:
    """Verdicts whose criteria name no hypothesis of the study."""
    return [replace(v, criterion=replace(v.criterion, name=_HYPOTHESIS.sub("", v.criterion.name))) for v in found]


def abbreviations(found: Sequence[Verdict]) -> list[str]:
    """The abbreviations of a report, in words."""
    return [*_WORDS, *([_MVE] if any(v.criterion.name.startswith("MVE") for v in found) else [])]
