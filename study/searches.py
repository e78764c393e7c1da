"""The largest batches on an H100 of 80 GB, from the probes of several groups of runs.

The files that `scripts/find_max_batch.py` wrote are not enough: those of `largest_h100` were lost with their machine.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linrnn.core.errors import DataError
from linrnn.report.runs import Run, read_committed
from linrnn.report.targets import BASELINES
from linrnn.report.verdicts import EXACT
from study.criteria import FOLDERS

ALIKE = ("size", "seq_len", "vocab_size", "memory_budget_gib", "device", "precision", "world_size")
Key = tuple[str, str, str]  # model, kind of activation checkpointing, loss


@dataclass(frozen=True)
class Search:
    """What the probes of a model, a kind of checkpointing and a loss say.

    Attributes:
        probes: the summaries of the runs, by batch in sequences.
    """

    probes: dict[int, dict[str, Any]]

    @property
    def batch(self) -> int:
        """The largest batch that ran; 0 if none did."""
        return max((batch for batch, row in self.probes.items() if row["status"] == "finished"), default=0)

    @property
    def too_large(self) -> int | None:
        """The smallest batch that ran out of memory; None if none did."""
        return min((batch for batch, row in self.probes.items() if row["status"] == "out_of_memory"), default=None)

    @property
    def exact(self) -> bool:
        """Whether one sequence more was tried and did not fit."""
        return self.too_large == self.batch + 1


def searches(runs: Iterable[Run]) -> dict[Key, Search]:
    """The searches that the runs belong to. Of two runs of one batch, the later one is kept.

    Raises:
        DataError: the runs differ in what a largest batch depends on.
    """
    found: dict[Key, dict[int, dict[str, Any]]] = {}
    settings = set()
    for summary in (run.summary for run in runs):
        key = summary["model"], summary["activation_checkpointing"], summary["loss"]
        found.setdefault(key, {})[summary["batch_size"]] = summary
        settings.add(tuple(summary[name] for name in ALIKE))
    if len(settings) > 1:
        raise DataError(
            f"the searches differ in {', '.join(ALIKE)}: {settings}", "name groups of one setting in study/folders.yaml"
        )
    return {key: Search(probes) for key, probes in found.items()}


def searches_on_the_h100(results: Path) -> dict[Key, Search]:
    """The searches of the study's groups below `results`, by model: without checkpointing, selective, full."""
    found = searches(run for group in FOLDERS["searches"] for run in read_committed(results / "summaries" / group))
    models, kinds = list(dict.fromkeys(model for model, _, _ in found)), ("none", "selective", "full")
    return dict(sorted(found.items(), key=lambda entry: (models.index(entry[0][0]), kinds.index(entry[0][1]))))


def batch_ratios(found: dict[Key, Search]) -> dict[Key, float]:
    """How many times as many sequences fit with `EXACT` as with each baseline. Inexact searches are left out."""
    return {
        (model, kind, against): own.batch / base.batch
        for (model, kind, loss), own in found.items()
        for against in BASELINES
        if loss == EXACT and own.exact and (base := found.get((model, kind, against))) and base.exact and base.batch
    }
