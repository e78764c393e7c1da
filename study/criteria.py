"""The study's criteria, from criteria.yaml, and its verdicts on a group of runs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from linrnn.report import verdicts as of_report
from linrnn.report.runs import Run
from linrnn.report.targets import BASELINES, Target, Verdict, parse_target
from linrnn.report.verdicts import EXACT
from linrnn.runs.intervals import LEAST_PAIRS

CONTROL = "compiled_nudged"  # the noise-floor run: judged against compiled, on losses alone
HERE = Path(__file__).parent
CRITERIA: dict[str, Target] = {
    name: parse_target(entry) for name, entry in yaml.safe_load((HERE / "criteria.yaml").read_text()).items()
}
FOLDERS: dict[str, Any] = yaml.safe_load((HERE / "folders.yaml").read_text())

BACKWARD, PERPLEXITY, VALID_LOSS, CURVES, MVE_LOSS, FINAL_LOSS = (
    CRITERIA[name] for name in ("BACKWARD", "PERPLEXITY", "VALID_LOSS", "CURVES", "MVE_LOSS", "FINAL_LOSS")
)
COMPENSATED = "accumulate=kahan"
FILTERS = BACKWARD.losses


def verdicts(runs: Sequence[Run], max_batches: Sequence[dict[str, Any]] = ()) -> list[Verdict]:
    """Every criterion of the study for every model and loss of `runs` (:func:`linrnn.report.verdicts.verdicts`).

    With enough pairs some losses of ours are also judged, on losses alone, against another of ours.

    * A filter against the exact loss with compensated sums.
    * Another way of summing against compensated sums, with the same other options.
    """
    of_losses = [target for target in CRITERIA.values() if target.metric.of_losses]
    ours = {replace(target, of=(EXACT, f"{EXACT} {COMPENSATED}")): target for target in of_losses}
    found = [
        one
        for one in of_report.verdicts(runs, list(CRITERIA.values()), max_batches)
        if one.backend != CONTROL or (one.against == BASELINES[0] and one.target in of_losses)
    ]
    among_ours = [
        replace(one, target=ours[one.target])
        for one in of_report.verdicts(runs, list(ours))
        if one.n >= LEAST_PAIRS and (one.backend.split()[0] in FILTERS or one.backend.startswith(f"{EXACT} accumulate"))
    ]
    order = [one.backend for one in found]
    return sorted([*among_ours, *found], key=lambda one: order.index(one.backend))
