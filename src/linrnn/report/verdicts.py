"""Compare runs paired by seed, and judge targets: reached, not reached, inconclusive or not measured."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from linrnn.report.metrics import Pair
from linrnn.report.runs import SETTING, Run, backend_names, environment_of
from linrnn.report.targets import BASELINES, COMPARISONS, Target, Verdict, judge

EXACT = "cce_kahan"
Kind = tuple[str, str, str]  # model, checkpointing, execution


def verdicts(
    runs: Sequence[Run], targets: Sequence[Target] = (), max_batches: Sequence[dict[str, Any]] = ()
) -> list[Verdict]:
    """Every target for every model and loss of `runs`, for each kind of activation checkpointing and execution.

    Each result is about the setting that most losses share. Runs of two origins are left out.

    Args:
        targets: empty: what every report compares, with the baseline that ran in the same setting.
        max_batches: as :mod:`linrnn.report.runs` reads them. Those of another origin are left out, and the result
            says so.
    """
    kinds: dict[Kind, dict[tuple[Any, ...], dict[str, list[Run]]]] = defaultdict(lambda: defaultdict(dict))
    for run, name in zip(runs, backend_names([run.summary for run in runs]), strict=True):
        if run.usable:
            kind = run.summary["model"], run.summary["activation_checkpointing"], run.execution
            kinds[kind][run.setting].setdefault(name, []).append(run)
    found: list[Verdict] = []
    for kind, by_setting in kinds.items():
        setting = max(by_setting, key=lambda one: (len(by_setting[one]), sum(map(len, by_setting[one].values()))))
        where, losses = _where(kind, kinds, _telling(setting, by_setting)), by_setting[setting]
        baseline = baseline_of([run for own in losses.values() for run in own])
        every = targets or [replace(one, of=(baseline,)) for one in COMPARISONS if baseline in losses]
        for backend, own in losses.items():
            about = [one for one in every if one.is_about(own[0].summary["loss"], own[0].summary["size"])]
            for against in [*dict.fromkeys(name for one in about for name in one.of if name != backend), None]:
                asked = [one for one in about if (against is None if one.metric.alone else against in one.of)]
                base = losses.get(against or "", [])
                pair = Pair(own, base, backend, against or "", by_setting, max_batches, environment_of(runs))
                for target, sample in ((one, sample) for one in asked for sample in one.metric.measure(pair)):
                    placed = replace(sample, setting=sample.setting or where)
                    found.append(judge(target, kind[0], backend, against, placed))
    return found


def baseline_of(runs: Sequence[Run]) -> str:
    """The loss that ratios refer to: compiled if it was run, else eager, else our exact loss."""
    losses = {run.summary["loss"] for run in runs if run.usable}
    return next((name for name in (*BASELINES, EXACT) if name in losses), BASELINES[0])


def _where(kind: Kind, kinds: Iterable[Kind], telling: str) -> str:
    """What tells a kind of runs from others of its model, in words."""
    _, checkpointing, execution = kind
    checkpointings, executions = (len({other[i] for other in kinds if other[0] == kind[0]}) for i in (1, 2))
    words = [
        telling,
        f"checkpointing {checkpointing}" if checkpointings > 1 and "checkpointing=" not in telling else "",
        execution if executions > 1 else "",
    ]
    return ", ".join(filter(None, words))


def _telling(setting: tuple[Any, ...], others: Iterable[tuple[Any, ...]]) -> str:
    """The part of a setting in which it differs from others, as `vocab_size=32000`, without implied keys.

    The horizon has the name of its configuration key. It is implied where it follows from the batch.
    """
    every, own = [dict(zip(SETTING, other, strict=True)) for other in others], dict(zip(SETTING, setting, strict=True))

    def varying(*keys: str) -> int:
        return len({tuple(one[key] for key in keys) for one in every})

    implied = {"n_parameters", "data_fingerprint", "steps", "training"}
    if varying("batch_size", "seq_len", "horizon") == varying("batch_size", "seq_len"):
        implied.add("horizon")
    told = [key for key in SETTING if key not in implied and varying(key) > 1]
    return ", ".join(f"{'schedule.steps' if key == 'horizon' else key}={own[key]}" for key in told)
