"""Select the runs that belong into one plot, and describe them in words."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from linrnn.models.facts import model_in_words
from linrnn.report.runs import SETTING, Run, alike, backend_names
from linrnn.runs.figures import NOT_MEASURED, WALL_CLOCK, by_wall_clock

DEVICE_TIME = "device time"  # earlier tokens/s come from the device time of a step
NO_SPEED = "not measured"  # no run came past its warm-up


def clock_of(runs: Sequence[Run]) -> str:
    """How the runs' tokens/s were measured, in words. Runs that did not finish count: tables show their speeds, too."""
    kinds = {by_wall_clock(run.summary) for run in runs if run.summary["tokens_per_second"]}
    if not kinds:
        return NOT_MEASURED if any(run.gpu_shared for run in runs) else NO_SPEED
    if kinds == {True}:
        return WALL_CLOCK
    return DEVICE_TIME if kinds == {False} else f"{WALL_CLOCK} or {DEVICE_TIME}"


def heading(runs: Sequence[Run], separator: str = " ") -> str:
    """The model of a panel's runs, with size and number of parameters if all runs share them."""
    sizes = {(run.summary["size"], run.summary["n_parameters"]) for run in runs}
    size, n_parameters = sizes.pop() if len(sizes) == 1 else ("", None)
    return model_in_words(runs[0].summary["model"], size, n_parameters).replace(" (", f"{separator}(")


def varies(runs: Sequence[Run], along: str) -> bool:
    """Whether some runs of one model and loss differ only in `along`, so that a line can join them."""
    values: dict[tuple[str, str], set[Any]] = defaultdict(set)
    for run, name in named(family(measured(runs), along)):
        values[run.summary["model"], name].add(run.summary.get(along))
    return any(len(own) > 1 for own in values.values())


def measured(runs: Sequence[Run]) -> list[Run]:
    """Finished runs of one origin whose speed was measured."""
    return [run for run in runs if run.finished and not run.mixture and run.summary["tokens_per_second"]]


def named(runs: Sequence[Run]) -> list[tuple[Run, str]]:
    return list(zip(runs, backend_names([run.summary for run in runs]), strict=True))


def family(runs: Sequence[Run], along: str) -> list[Run]:
    """For each model the runs that differ only in `along`, in what follows from it, and in checkpointing.

    A model with only one value of `along` has none.
    """
    follow = {along, "steps", "horizon", "n_parameters", "activation_checkpointing", "data_fingerprint"}
    if along == "seq_len":
        follow.add("batch_size")  # steps have equal tokens

    def family(run: Run) -> tuple[Any, ...]:
        return run.values(key for key in SETTING if key not in follow)

    kept: list[Run] = []
    for model in dict.fromkeys(run.summary["model"] for run in runs):
        own = [run for run in runs if run.summary["model"] == model]
        values: dict[tuple[Any, ...], set[Any]] = defaultdict(set)
        for run in own:
            values[family(run)].add(run.summary.get(along))
        largest = max(values, key=lambda one: len(values[one]))
        if len(values[largest]) < 2:
            continue
        kept += [run for run in own if family(run) == largest]
    return kept


def one_course(runs: Sequence[Run]) -> list[Run]:
    """For each model the largest set of runs whose curves can be compared."""
    kept: list[Run] = []
    for model in dict.fromkeys(run.summary["model"] for run in runs):
        own = [run for run in runs if run.summary["model"] == model and run.losses]
        members = [[other for other in own if alike(run, other)] for run in own]
        kept += next((group for group in members if len(group) == max(map(len, members))), [])
    return kept
