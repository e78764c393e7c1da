"""The tables of a report: runs, results, curves over the common steps of two runs, and what filters kept."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from linrnn.core.machine import GIB
from linrnn.core.tables import Table, show
from linrnn.report.curves import SMOOTHED_STEPS, mean_of_last
from linrnn.report.plots import clock_of, varies
from linrnn.report.runs import Run, alike, backend_names, comparison, loss_time_share
from linrnn.report.targets import INCONCLUSIVE, LEAST_STEPS, NOT_MEASURED, NOT_REACHED, REACHED, Verdict
from linrnn.report.verdicts import CONTROL, baseline_of, free_loss_speed_up
from linrnn.runs.figures import on_cpu
from linrnn.runs.summary import MEAN_OF_LAST

FILTER_COLUMNS = {
    "entries kept": ("entries_kept", ".4%"),
    "mass not kept, mean": ("dropped_mass_mean", ".3f"),
    "99th percentile": ("dropped_mass_p99", ".3f"),
    "most": ("dropped_mass_max", ".3f"),
    "steps computed exactly": ("exact", ".2%"),
}
ANSWERED = (REACHED, NOT_REACHED)


@dataclass(frozen=True)
class Answer:
    """The word of a result in a cell: bold in Markdown; coloured and with a sign on the page."""

    word: str

    def __str__(self) -> str:
        return f"**{self.word}**"


# ---------------------------------------------------------------------------------------------------------- results
def of_verdicts(found: Sequence[Verdict]) -> Table:
    """One row for each result with a value: reached or not first, then by target, compiled before eager.

    Comparisons without a target lack the columns of result and target. What was not measured has no row: see
    :func:`not_measured`.
    """
    names = list(dict.fromkeys(verdict.target.name for verdict in found))
    measured = [verdict for verdict in found if verdict.verdict != NOT_MEASURED]
    judged, remarks = any(v.target.rule for v in measured), any(v.remark or v.setting for v in measured)
    answered = {v.target for v in measured if v.verdict in ANSWERED and v.backend != CONTROL}

    def place(v: Verdict) -> tuple[bool, int, bool]:
        below = v.target not in answered if v.backend == CONTROL else v.verdict == INCONCLUSIVE
        return below, names.index(v.target.name), v.against == "standard"

    rows = []
    for v in sorted(measured, key=place):
        interval = "-" if v.low is None or v.high is None else f"{v.low:{v.target.form}} to {v.high:{v.target.form}}"
        rows.append(
            (
                *([Answer(v.verdict)] if judged else []),
                *(v.target.name, _beside_target(v), interval, v.n),
                *([v.target.asked] if judged else []),
                *(v.model, v.backend, v.against or "-"),
                *(["; ".join(filter(None, [v.remark, v.setting]))] if remarks else []),
            )
        )
    columns = (
        *(["result"] if judged else []),
        *("metric", "value", "90 % interval", "n"),
        *(["target"] if judged else []),
        *("model", "loss", "against", *(["setting and remarks"] if remarks else [])),
    )
    return Table(columns, rows, words=("result", "metric", "model", "loss", "against", "setting and remarks"))


def _beside_target(verdict: Verdict) -> str:
    """The value, with more digits if rounding would make it equal to the target: 0.6003 for ≤ 0.600."""
    value, target, form = verdict.value, verdict.target.bound, verdict.target.form
    if value is None or not verdict.target.rule or abs(value) == target:
        return show(value, form)
    sign, digits, kind = form[:-3], int(form[-2]), form[-1]
    for more in range(4):
        text = f"{value:{sign}.{digits + more}{kind}}"
        if text.lstrip("+-") != f"{target:.{digits + more}{kind}}":
            return text
    return show(value, form)


def not_measured(found: Sequence[Verdict]) -> Table | None:
    """What no run answers, a row for all targets that lack the same for the same losses; None: nothing is missing."""
    missing: dict[tuple[str, str], dict[str, list[str]]] = {}
    for v in found:
        if v.verdict == NOT_MEASURED:
            of_losses = missing.setdefault((v.target.name, v.remark.removeprefix("not measured: needs ")), {})
            loss = f"{v.model} x {v.backend}" + (f", {v.setting}" if v.setting else "")
            of_losses.setdefault(loss, []).append(v.against or "")
    rows: dict[tuple[str, str], list[str]] = {}
    for (name, reason), of_losses in missing.items():
        against = {loss: " and ".join(filter(None, dict.fromkeys(some))) for loss, some in of_losses.items()}
        losses = [f"{loss}, against {some}" if some else loss for loss, some in against.items()]
        rows.setdefault((reason, "; ".join(losses)), []).append(name)
    columns = ("what is missing", "targets", "losses")
    cells = [(reason, "; ".join(names), losses) for (reason, losses), names in rows.items()]
    return Table(columns, cells, columns) if cells else None


# ------------------------------------------------------------------------------------------------------------- runs
def of_runs(runs: Sequence[Run]) -> Table:
    """One row per run. Ratios are to the baseline's run of the same setting and seed."""
    checkpointing = varies(runs, "activation_checkpointing")
    horizons = len({run.horizon for run in runs if run.horizon}) > 1
    named = list(zip(runs, backend_names([run.summary for run in runs]), strict=True))
    labels = [(*_order(run, name), checkpointed(run), run.horizon) for run, name in named]
    same = len(set(labels)) < len(labels)  # some runs differ only in what has no column: show their names
    origins = any(run.origin for run in runs)
    columns = (
        *(["run"] if same else []),
        *(["origin"] if origins else []),
        *("model", "size", "loss"),
        *(["checkpointing"] if checkpointing else []),
        *("B", "T", "V", "seed"),
        *(["steps"] if horizons else []),
        *("status", "train loss, nats", "valid loss, nats", "bits per byte", "peak memory, GiB", "ratio"),
        *(
            f"tokens/s, {clock_of(runs).split(':')[0]}",
            "ratio",
            "step, ms" if all(on_cpu(run.summary) for run in runs if run.summary.get("device")) else "step, device ms",
            "of it output layer",
            "MFU",
            "MFU by 6N",
        ),
    )
    baseline = baseline_of(runs)
    bases = {
        (run.setting, run.summary["seed"]): run.summary
        for run in runs
        if run.summary["loss"] == baseline and not run.mixture
    }
    rows = []
    for run, name in sorted(named, key=lambda entry: (*_order(*entry), entry[0].horizon or 0)):
        s = run.summary
        base = {} if run.mixture else bases.get((run.setting, s["seed"]), {})
        rows.append(
            (
                *([s["run_name"]] if same else []),
                *([run.origin] if origins else []),
                *(s["model"], s["size"], name),
                *([checkpointed(run)] if checkpointing else []),
                *(s["batch_size"], s["seq_len"], show(s["vocab_size"], ","), s["seed"]),
                *([_steps(run)] if horizons else []),
                s["status"] + (", a mixture" if run.mixture else ""),
                *_figures(s, base),
                show(loss_time_share(run), ".1%"),
                show(s["mfu"], ".1%"),
                show(s["mfu_6n"], ".1%"),
            )
        )
    return Table(columns, rows, words=("run", "origin", "model", "size", "loss", "checkpointing", "status"))


def _figures(s: dict[str, Any], base: dict[str, Any]) -> list[str]:
    """Cells from a summary, and their ratios to the baseline's."""
    return [
        show(s["train_loss_nats"], ".4f"),
        show(s["valid_loss_nats"], ".4f"),
        show(s["valid_bits_per_byte"], ".4f"),
        show(s["peak_memory_bytes"], ".2f", GIB),
        show(_ratio(s["peak_memory_bytes"], base.get("peak_memory_bytes")), ".2f"),
        show(s["tokens_per_second"], ",.0f"),
        show(_ratio(s["tokens_per_second"], base.get("tokens_per_second")), ".3f"),
        show(s["step_time_ms_median"], ".2f"),
    ]


def of_courses(runs: Sequence[Run]) -> Table | None:
    """If a run ended early: compare curves over common steps, of two losses or of two seeds of one loss."""
    if not any(run.losses and not run.finished for run in runs):
        return None
    names = dict(zip((run.name for run in runs), backend_names([r.summary for r in runs]), strict=True))
    baseline, rows = baseline_of(runs), []
    for a, b in combinations(sorted(runs, key=lambda run: run.summary["loss"] != baseline), 2):
        same_loss, same_seed = names[a.name] == names[b.name], _seed(a) == _seed(b)
        if same_loss == same_seed or not alike(a, b):
            continue
        found = comparison(b, a)
        if found.last is None or found.steps * found.every < LEAST_STEPS:
            continue
        validated = max(dict(a.validations).keys() & dict(b.validations).keys(), default=None)
        valid = [None if validated is None else dict(run.validations)[validated] for run in (b, a)]
        rows.append(
            (
                a.summary["model"],
                f"{names[b.name]}, seed {_seed(b)}",
                f"{names[a.name]}, seed {_seed(a)}",
                found.steps,
                show(found.largest, ".4f"),
                f"{found.last:+.4f}",
                show(validated, ","),
                *(show(value, ".2f") for value in valid),
            )
        )
    columns = (
        *("model", "run", "other run", "steps", f"largest difference (mean of {SMOOTHED_STEPS} steps), nats"),
        *(f"mean of the last {MEAN_OF_LAST} steps, difference", "validated at step", "perplexity", "the other's"),
    )
    return Table(columns, rows, words=("model", "run", "other run")) if rows else None


BATCH_NOISE = "Two seeds see different batches. Their curves differ by the noise of the batches as well."


def of_filters(runs: Sequence[Run]) -> Table | None:
    """What filters kept and dropped: means over the last steps of each run."""
    rows = []
    for run, name in zip(runs, backend_names([run.summary for run in runs]), strict=True):
        if run.statistics:
            last = {key: mean_of_last(curve) for key, curve in run.statistics.items()}
            cells = [show(last.get(key), form) for key, form in FILTER_COLUMNS.values()]
            rows.append((run.summary["model"], name, run.summary["seed"], *cells))
    return Table(("model", "loss", "seed", *FILTER_COLUMNS), rows, words=("model", "loss")) if rows else None


# ------------------------------------------------------------------------------------------------------------ cells
def checkpointed(run: Run) -> str:
    """A run's kind of activation checkpointing."""
    return run.summary["activation_checkpointing"]


def _steps(run: Run) -> str:
    """The steps of a run, and its schedule's end if that is later."""
    steps, horizon = run.summary["steps"], run.horizon
    return f"{steps} of {horizon}" if horizon and horizon != steps else str(steps)


def _seed(run: Run) -> int:
    return int(run.summary["seed"])


def _order(run: Run, name: str) -> tuple[Any, ...]:
    s = run.summary
    return s["model"], s["size"], s["vocab_size"] or 0, s["seq_len"], s["batch_size"], name, s["seed"]


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base


def of_free_losses(runs: Sequence[Run]) -> Table | None:
    """A row a model and loss, with and without checkpointing: how fast a step would be if the loss took no time."""
    firsts: dict[tuple[str, str, str], tuple[Run, float, float]] = {}
    for run, name in zip(runs, backend_names([run.summary for run in runs]), strict=True):
        share, bound = loss_time_share(run), free_loss_speed_up(run)
        counts = run.finished and not run.mixture
        if counts and share is not None and bound is not None:
            firsts.setdefault((run.summary["model"], name, checkpointed(run)), (run, share, bound))
    columns = (
        *("model", "loss", "checkpointing", "B", "T", "V", "output layer, of the step"),
        "speed of a step without it",
    )
    rows = [
        (
            *(model, name, checkpointing, run.summary["batch_size"], run.summary["seq_len"]),
            *(f"{run.summary['vocab_size']:,}", f"{share:.1%}", f"{bound:.3f} x"),
        )
        for (model, name, checkpointing), (run, share, bound) in firsts.items()
    ]
    return Table(columns, rows, words=("model", "loss", "checkpointing")) if rows else None
