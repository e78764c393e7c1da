"""The study's criteria, from criteria.yaml, and its verdicts on a group of runs."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from linrnn.report import verdicts as of_report
from linrnn.report.runs import Run
from linrnn.report.targets import BASELINES, RULES, Target, Verdict, parse_target
from linrnn.report.verdicts import CONTROL, EXACT

__all__ = ["BASELINES", "CONTROL", "CRITERIA", "EXACT", "FOLDERS", "RULES", "Target", "Verdict", "verdicts"]

HERE = Path(__file__).parent
CRITERIA: dict[str, Target] = {
    name: parse_target(entry) for name, entry in yaml.safe_load((HERE / "criteria.yaml").read_text()).items()
}
FOLDERS: dict[str, Any] = yaml.safe_load((HERE / "folders.yaml").read_text())

MEMORY, BATCH, SPEED, SPEED_AT_LARGEST = (CRITERIA[name] for name in ("MEMORY", "BATCH", "SPEED", "SPEED_AT_LARGEST"))
PERPLEXITY, VALID_LOSS, CURVES = (CRITERIA[name] for name in ("PERPLEXITY", "VALID_LOSS", "CURVES"))
BACKWARD, SHARE, SHARE_WITHOUT = (CRITERIA[name] for name in ("BACKWARD", "SHARE", "SHARE_WITHOUT"))
MVE_LARGER, MVE_LOSS, FINAL_LOSS = (CRITERIA[name] for name in ("MVE_LARGER", "MVE_LOSS", "FINAL_LOSS"))
COMPENSATED = "accumulate=kahan"
FILTERS = BACKWARD.losses
RESTATED = (
    "The validation loss in nats restates the perplexity's criterion. ±0.1 at a perplexity of 300 is ±0.0003 nats, and "
    "rounding alone drives two equal losses further apart. The margin in nats is that of the final training loss. This "
    "row was added on 24 November 2026, when the results of `same_loss` and of all earlier runs existed. The project's "
    "plan had asked for it before `same_loss` ran."
)


def verdicts(runs: Sequence[Run], max_batches: Sequence[dict[str, Any]] = ()) -> list[Verdict]:
    """Every criterion of the study for every model and loss of `runs` (:func:`linrnn.report.verdicts.verdicts`)."""
    return of_report.verdicts(runs, list(CRITERIA.values()), max_batches, own_baselines)


def own_baselines(backend: str, backends: Iterable[str]) -> list[str]:
    """The losses of ours against which another loss is judged, too, on losses alone, if there are enough pairs.

    * A filter against the exact loss with compensated sums.
    * Another way of summing against compensated sums, with the same other options.

    Args:
        backends: those that were run.
    """
    name, *options = backend.split()
    if name in FILTERS:
        return [one for one in backends if one in (EXACT, f"{EXACT} {COMPENSATED}")]
    if name != EXACT or not any(option.startswith("accumulate=") for option in options):
        return []
    same = " ".join([name, *(COMPENSATED if option.startswith("accumulate=") else option for option in options)])
    return [one for one in backends if one == same != backend]
