"""The tables of a report: runs, results, and what filters kept."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from linrnn.core.machine import GIB
from linrnn.core.tables import Table, show
from linrnn.report.curves import mean_of_last
from linrnn.report.metrics import free_loss_speed_up
from linrnn.report.plots import clock_of, varies
from linrnn.report.runs import STATISTIC, Run, backend_names
from linrnn.report.targets import INCONCLUSIVE, NOT_MEASURED, NOT_REACHED, REACHED, Verdict
from linrnn.report.verdicts import CONTROL, baseline_of
from linrnn.runs.figures import on_cpu

FILTER_COLUMNS = {
    "entries kept": ("entries_kept", ".4%"),
    "mass not kept, mean": ("dropped_mass_mean", ".3f"),
    "99th percentile": ("dropped_mass_p99", ".3f"),
    "most": ("dropped_mass_max", ".3f"),
    "steps computed exactly": ("exact", ".2%"),
}
ANSWERED = (REACHED, NOT_REACHED)
Column = Callable[[Any], object] | None  # of a row's entry; None: the table lacks the column
CHECKPOINTING = "activation_checkpointing"


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
    names = list(dict.fromkeys(v.target.name for v in found))
    measured = [v for v in found if v.verdict != NOT_MEASURED]
    answered = {v.target for v in measured if v.verdict in ANSWERED and v.backend != CONTROL}

    def place(v: Verdict) -> tuple[bool, int, bool]:
        below = v.target not in answered if v.backend == CONTROL else v.verdict == INCONCLUSIVE
        return below, names.index(v.target.name), v.against == "standard"

    def interval(v: Verdict) -> str:
        return "-" if v.low is None or v.high is None else f"{v.low:{v.target.form}} to {v.high:{v.target.form}}"

    judged, remarks = any(v.target.rule for v in measured), any(v.remark or v.setting for v in measured)
    columns: list[tuple[str, Column]] = [
        ("result", (lambda v: Answer(v.verdict)) if judged else None),
        ("metric", lambda v: v.target.name),
        ("value", _beside_target),
        ("90 % interval", interval),
        ("n", lambda v: v.n),
        ("target", (lambda v: v.target.asked) if judged else None),
        ("model", lambda v: v.model),
        ("loss", lambda v: v.backend),
        ("against", lambda v: v.against or "-"),
        ("setting and remarks", (lambda v: "; ".join(filter(None, [v.remark, v.setting]))) if remarks else None),
    ]
    words = ("result", "metric", "model", "loss", "against", "setting and remarks")
    return _table(columns, sorted(measured, key=place), words)


def _table(columns: Iterable[tuple[str, Column]], entries: Iterable[Any], words: Collection[str]) -> Table:
    """A table of those columns that there are, with a row for each entry."""
    shown = [(name, cell) for name, cell in columns if cell is not None]
    return Table([name for name, _ in shown], [tuple(cell(one) for _, cell in shown) for one in entries], words)


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
    named = list(zip(runs, backend_names([run.summary for run in runs]), strict=True))
    labels = [(*_order(run, name), run.summary[CHECKPOINTING], run.horizon) for run, name in named]
    horizons, baseline = len({run.horizon for run in runs if run.horizon}) > 1, baseline_of(runs)
    bases = {
        (run.setting, run.summary["seed"]): run.summary
        for run in runs
        if run.summary["loss"] == baseline and not run.mixture
    }
    on_cpus = all(on_cpu(run.summary) for run in runs if run.summary.get("device"))

    def figure(key: str, form: str, unit: float = 1.0) -> Column:
        return lambda entry: show(entry[0].summary[key], form, unit)

    def ratio(key: str, form: str) -> Column:
        def cell(entry: tuple[Run, str]) -> str:
            run, _ = entry
            base = {} if run.mixture else bases.get((run.setting, run.summary["seed"]), {})
            value, other = run.summary[key], base.get(key)
            return show(None if value is None or not other else value / other, form)

        return cell

    # Runs that differ only in what has no column are told apart by their names.
    columns: list[tuple[str, Column]] = [
        ("run", (lambda entry: entry[0].name) if len(set(labels)) < len(labels) else None),
        ("origin", (lambda entry: entry[0].origin) if any(run.origin for run in runs) else None),
        ("model", lambda entry: entry[0].summary["model"]),
        ("size", lambda entry: entry[0].summary["size"]),
        ("loss", lambda entry: entry[1]),
        ("checkpointing", (lambda entry: entry[0].summary[CHECKPOINTING]) if varies(runs, CHECKPOINTING) else None),
        ("B", lambda entry: entry[0].summary["batch_size"]),
        ("T", lambda entry: entry[0].summary["seq_len"]),
        ("V", figure("vocab_size", ",")),
        ("seed", lambda entry: entry[0].summary["seed"]),
        ("steps", (lambda entry: _steps(entry[0])) if horizons else None),
        ("status", lambda entry: entry[0].summary["status"] + (", a mixture" if entry[0].mixture else "")),
        ("train loss, nats", figure("train_loss_nats", ".4f")),
        ("valid loss, nats", figure("valid_loss_nats", ".4f")),
        ("bits per byte", figure("valid_bits_per_byte", ".4f")),
        ("peak memory, GiB", figure("peak_memory_bytes", ".2f", GIB)),
        ("ratio", ratio("peak_memory_bytes", ".2f")),
        (f"tokens/s, {clock_of(runs).split(':')[0]}", figure("tokens_per_second", ",.0f")),
        ("ratio", ratio("tokens_per_second", ".3f")),
        ("step, ms" if on_cpus else "step, device ms", figure("step_time_ms_median", ".2f")),
        ("of it output layer", lambda entry: show(loss_time_share(entry[0]), ".1%")),
        ("MFU", figure("mfu", ".1%")),
        ("MFU by 6N", figure("mfu_6n", ".1%")),
    ]
    rows = sorted(named, key=lambda entry: (*_order(*entry), entry[0].horizon or 0))
    return _table(columns, rows, words=("run", "origin", "model", "size", "loss", "checkpointing", "status"))


def of_filters(runs: Sequence[Run]) -> Table | None:
    """What filters kept and dropped: means over the last steps of each run."""
    rows = []
    for run, name in zip(runs, backend_names([run.summary for run in runs]), strict=True):
        statistics = {key: mean_of_last(curve) for key, curve in run.curves.items() if key.startswith(STATISTIC)}
        if statistics:
            cells = [show(statistics.get(f"{STATISTIC}{key}"), form) for key, form in FILTER_COLUMNS.values()]
            rows.append((run.summary["model"], name, run.summary["seed"], *cells))
    return Table(("model", "loss", "seed", *FILTER_COLUMNS), rows, words=("model", "loss")) if rows else None


def of_free_losses(runs: Sequence[Run]) -> Table | None:
    """A row a model and loss, with and without checkpointing: how fast a step would be if the loss took no time."""
    rows: dict[tuple[str, str, str], tuple[object, ...]] = {}
    for run, name in zip(runs, backend_names([run.summary for run in runs]), strict=True):
        share, bound, s = loss_time_share(run), free_loss_speed_up(run), run.summary
        if run.finished and not run.mixture and share is not None and bound is not None:
            kind = s["model"], name, run.summary[CHECKPOINTING]
            figures = s["batch_size"], s["seq_len"], f"{s['vocab_size']:,}", f"{share:.1%}", f"{bound:.3f} x"
            rows.setdefault(kind, (*kind, *figures))
    columns = ("model", "loss", "checkpointing", "B", "T", "V", "output layer, of the step")
    words = ("model", "loss", "checkpointing")
    return Table((*columns, "speed of a step without it"), [*rows.values()], words) if rows else None


def _steps(run: Run) -> str:
    """The steps of a run, and its schedule's end if that is later."""
    steps, horizon = run.summary["steps"], run.horizon
    return f"{steps} of {horizon}" if horizon and horizon != steps else str(steps)


def _order(run: Run, name: str) -> tuple[Any, ...]:
    s = run.summary
    return s["model"], s["size"], s["vocab_size"] or 0, s["seq_len"], s["batch_size"], name, s["seed"]


def loss_time_share(run: Run) -> float | None:
    """The output layer's share of a step's time; None if it was not measured."""
    times, step = run.summary.get("loss_layer_ms"), run.summary.get("step_time_ms_median")
    return sum(times.values()) / step if times and step else None
