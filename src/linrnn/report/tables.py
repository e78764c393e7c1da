"""The tables of a report: results, runs, and what filters kept."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from linrnn.core.machine import GIB
from linrnn.core.tables import Table, show
from linrnn.report.curves import mean_of_last
from linrnn.report.plots import clock_of
from linrnn.report.runs import STATISTIC, Run, named
from linrnn.report.targets import NOT_MEASURED, NOT_REACHED, REACHED, Verdict
from linrnn.report.verdicts import baseline_of

FILTER_COLUMNS = {
    "entries kept": ("entries_kept", ".4%"),
    "mass not kept, mean": ("dropped_mass_mean", ".3f"),
    "99th percentile": ("dropped_mass_p99", ".3f"),
    "most": ("dropped_mass_max", ".3f"),
    "steps computed exactly": ("exact", ".2%"),
}
WORDS = {
    "result",
    "metric",
    "run",
    "model",
    "size",
    "loss",
    "against",
    "checkpointing",
    "status",
    "setting and remarks",
}


def _table(rows: Sequence[dict[str, object]], telling: Collection[str] = ()) -> Table:
    """A table of rows by column. The columns of `telling` are left out if all rows have one value there."""
    alike = {column for column in telling if len({str(row[column]) for row in rows}) < 2}
    columns = [column for column in (rows[0] if rows else ()) if column not in alike]
    return Table(columns, [tuple(row[column] for column in columns) for row in rows], WORDS)


# ---------------------------------------------------------------------------------------------------------- results
def of_verdicts(found: Sequence[Verdict]) -> Table:
    """One row for each result: reached or not first, what was not measured last, then by target, compiled before eager.

    Comparisons without a target lack the columns of result and target.
    """
    names = list(dict.fromkeys(v.target.name for v in found))

    def place(v: Verdict) -> tuple[bool, bool, int, bool]:
        answered = v.verdict in (REACHED, NOT_REACHED)
        return v.verdict == NOT_MEASURED, not answered, names.index(v.target.name), v.against == "standard"

    rows: list[dict[str, object]] = [
        {
            "result": f"**{v.verdict}**" if v.target.rule else "-",
            "metric": v.target.name,
            "value": _beside_target(v),
            "90 % interval": "-" if v.low is None else f"{v.low:{v.target.form}} to {v.high:{v.target.form}}",
            "n": v.n,
            "target": v.target.asked,
            "model": v.model,
            "loss": v.backend,
            "against": v.against or "-",
            "setting and remarks": "; ".join(filter(None, [v.remark, v.setting])),
        }
        for v in sorted(found, key=place)
    ]
    return _table(rows, () if any(v.target.rule for v in found) else ("result", "target", "setting and remarks"))


def _beside_target(verdict: Verdict) -> str:
    """The value, with more digits if rounding would make it equal to the target: 0.60031 for ≤ 0.600."""
    value, target = show(verdict.value, verdict.target.form), verdict.target
    looks_alike = verdict.value is not None and target.rule and value.lstrip("+-") == f"{target.bound:{target.form}}"
    return f"{verdict.value:.6g}" if looks_alike and abs(verdict.value or 0) != target.bound else value


# ------------------------------------------------------------------------------------------------------------- runs
def of_runs(runs: Sequence[Run]) -> Table:
    """One row per run. Ratios are to the baseline's run of the same setting and seed."""
    by_setting: dict[tuple[Any, ...], list[Run]] = defaultdict(list)
    for run in runs:
        by_setting[run.setting].append(run)
    several = {setting: own for setting, own in by_setting.items() if len({run.summary["loss"] for run in own}) > 1}
    bases = {
        (setting, run.summary["seed"]): run.summary
        for setting, own in several.items()
        for run in own
        if run.summary["loss"] == baseline_of(own) and run.usable
    }

    def place(entry: tuple[Run, str]) -> tuple[Any, ...]:
        s = entry[0].summary
        key = s["model"], s["size"], s["vocab_size"] or 0, s["seq_len"], s["batch_size"], entry[1], s["seed"]
        return (*key, s["activation_checkpointing"], entry[0].horizon or 0)

    entries = sorted(named(runs), key=place)
    rows = []
    for run, loss in entries:
        s, base = run.summary, bases.get((run.setting, run.summary["seed"]), {})
        late = run.horizon and run.horizon != s["steps"]
        rows.append({
            "run": run.name,
            "model": s["model"],
            "size": s["size"],
            "loss": loss,
            "checkpointing": s["activation_checkpointing"],
            "B": s["batch_size"],
            "T": s["seq_len"],
            "V": show(s["vocab_size"], ","),
            "seed": s["seed"],
            "steps": f"{s['steps']} of {run.horizon}" if late else str(s["steps"]),
            "status": s["status"],
            "train loss, nats": show(s["train_loss_nats"], ".4f"),
            "valid loss, nats": show(s["valid_loss_nats"], ".4f"),
            "bits per byte": show(s["valid_bits_per_byte"], ".4f"),
            "peak memory, GiB": show(s["peak_memory_bytes"], ".2f", GIB),
            "its ratio": _ratio(s, base, "peak_memory_bytes", ".2f"),
            f"tokens/s, {clock_of(runs)}": show(s["tokens_per_second"], ",.0f"),
            "their ratio": _ratio(s, base, "tokens_per_second", ".3f"),
            "step, ms": show(s["step_time_ms_median"], ".2f"),
            "of it output layer": show(loss_time_share(run), ".1%"),
            "MFU": show(s["mfu"], ".1%"),
        })  # fmt: skip
    table = _table(rows, ("checkpointing", "steps"))
    unique = len({place(entry) for entry in entries}) == len(runs)  # else only their names tell runs apart
    return Table(table.columns[1:], [row[1:] for row in table.rows], WORDS) if unique else table


def _ratio(summary: dict[str, Any], base: dict[str, Any], key: str, form: str) -> str:
    return show(summary[key] / base[key] if summary[key] is not None and base.get(key) else None, form)


def of_filters(runs: Sequence[Run]) -> Table:
    """What filters kept and dropped: means over the last steps of each run."""
    rows: list[dict[str, object]] = []
    for run, loss in named(runs):
        means = {key: mean_of_last(curve) for key, curve in run.curves.items() if key.startswith(STATISTIC)}
        if means:
            cells = {name: show(means.get(f"{STATISTIC}{key}"), form) for name, (key, form) in FILTER_COLUMNS.items()}
            rows.append({"model": run.summary["model"], "loss": loss, "seed": run.summary["seed"], **cells})
    return _table(rows)


def loss_time_share(run: Run) -> float | None:
    """The output layer's share of a step's time; None if it was not measured."""
    times, step = run.summary.get("loss_layer_ms"), run.summary.get("step_time_ms_median")
    return sum(times.values()) / step if times and step else None
