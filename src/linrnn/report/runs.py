"""Read back what was measured: runs, the rows of reports, and largest batches."""

import json
import lzma
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import numpy as np

from linrnn.core.errors import DataError
from linrnn.core.files import read_json, read_object, write_bytes
from linrnn.report.curves import Curve
from linrnn.runs.directory import ENVIRONMENT, METRICS, SUMMARY
from linrnn.runs.metrics import read_jsonl
from linrnn.runs.origins import commit_in_words, differing, origins_of, read_processes

COMMITTED = "runs.json.xz"  # a report's file with its runs' environments, summaries and logged steps
REPORTS = "summaries"  # the folder of the results directory that holds the reports
MAX_BATCHES = "max_batches.json.xz"  # beside it: the answers of searches for the largest batch
# The keys that tables need from every summary, and the remedy if a run's file is broken.
REQUIRED = (
    *("status", "run_name", "model", "size", "loss", "seed", "batch_size", "seq_len", "vocab_size", "steps"),
    *("train_loss_nats", "valid_loss_nats", "valid_bits_per_byte", "peak_memory_bytes", "tokens_per_second"),
    *("step_time_ms_median", "mfu"),
)
AGAIN = "run that run's command again (trainer.resume=never), or move its directory out of the group"
NAMED = 3  # runs that a warning names of each origin
_HORIZON = re.compile(r"schedule\.steps=(\d+) ?")
# Runs that share all keys of a SETTING differ only in loss and seed. Runs whose curves can be compared share those of
# COURSE, whether or not they reached their last step.
COURSE = (
    *("model", "size", "batch_size", "accumulation_steps", "seq_len", "precision", "activation_checkpointing"),
    *("chunk_size", "vocab_size", "parallel", "world_size", "training", "horizon"),
)
SETTING = (*COURSE, "data_fingerprint", "n_parameters", "memory_budget_gib", "steps")
# Names in metrics.jsonl and in the rows. Times are means over `measured_steps` steps in milliseconds. Rows have them
# without their prefix `speed/`, rounded to TIME_DIGITS decimals.
LOSS, STATISTIC, VALIDATION = "loss_nats", "loss/", "valid/perplexity"
TIMES = ("wall_step_ms", "step_ms", "loss_forward_ms", "loss_backward_ms", "measured_steps")
TIME_DIGITS = 4


@dataclass(frozen=True)
class Run:
    """One run, as read from its files.

    `curves` holds (step, value) of every logged step: LOSS, nats per token; TIMES; VALIDATION, perplexities; and the
    loss's own statistics, whose names begin with STATISTIC.
    """

    summary: dict[str, Any]  # summary.json
    environments: Sequence[dict[str, Any]] = ()  # of its processes, one for each origin; empty if it could not start
    curves: dict[str, Curve] = field(default_factory=dict)

    @property
    def losses(self) -> Curve:
        """Nats per token of every logged step."""
        return self.curves.get(LOSS, [])

    @property
    def name(self) -> str:
        return str(self.summary["run_name"])

    @property
    def finished(self) -> bool:
        return self.summary["status"] == "finished"

    @property
    def usable(self) -> bool:
        """Whether its figures may be compared with others. Those of a run of two origins may not."""
        return self.finished and len(self.environments) < 2

    @property
    def environment(self) -> dict[str, Any]:
        """The first of its environments; empty for a run that could not start."""
        return next(iter(self.environments), {})

    @property
    def on_gpu(self) -> bool:
        """Whether it trained on a GPU. Only there the peak of allocated memory is known."""
        return "peak" in (self.summary.get("memory_bytes") or {})

    @property
    def gpu_shared(self) -> bool:
        """Whether other runs computed on its GPU. Its times are then no measurements."""
        return bool(self.summary.get("gpu_shared"))

    @property
    def horizon(self) -> int | None:
        """The step at which its schedule ends; None if it did not record it."""
        found = _HORIZON.search(self.summary["training"])
        return int(found[1]) if found else None

    def values(self, keys: Iterable[str]) -> tuple[Any, ...]:
        """The values of keys of a setting."""
        own = {**self.summary, "horizon": self.horizon, "training": without_horizon(self.summary["training"])}
        return tuple(own.get(key) for key in keys)

    @property
    def execution(self) -> str:
        """How its blocks are executed, where that is not as usual: `compile=blocks, float8=blocks`, say."""
        told = [word.removeprefix("trainer.") for word in self.summary["training"].split()]
        return ", ".join(word for word in told if word.startswith(("compile=", "float8=")) and word[-5:] != "=none")

    @property
    def setting(self) -> tuple[Any, ...]:
        """The values that it shares with the runs that it can be compared with."""
        return self.values(SETTING)

    @property
    def course(self) -> tuple[Any, ...]:
        """The values that it shares with the runs whose curves can be compared with its own."""
        return self.values(COURSE)


def without_horizon(training: str) -> str:
    """What a run's `training` says beside its horizon, which follows from its batch and tokens."""
    return _HORIZON.sub("", training)


def environment_of(runs: Sequence[Run]) -> dict[str, Any]:
    """The first of the runs' environments; empty if no run started."""
    return next((run.environment for run in runs if run.environments), {})


def origin_warning(runs: Sequence[Run]) -> str:
    """One line that names the runs of each code and device, if there are several; a continued run may be of two."""
    origins: list[tuple[dict[str, Any], list[str]]] = []
    for run in runs:
        for environment in run.environments:
            same = [names for own, names in origins if not differing([own, environment])]
            same[0].append(run.name) if same else origins.append((environment, [run.name]))
    if len(origins) < 2:
        return ""
    told = []
    for letter, (environment, own) in zip(ascii_uppercase, origins, strict=False):
        names = ", ".join(own[:NAMED]) + (f" and {len(own) - NAMED} more" if own[NAMED:] else "")
        told.append(f"{letter} (commit {commit_in_words(environment.get('git'), digits=9)}): {names}")
    several = "; a run of two origins decides nothing" if any(len(run.environments) > 1 for run in runs) else ""
    return f"the runs differ in {', '.join(differing(own for own, _ in origins))}. {'; '.join(told)}{several}"


# --------------------------------------------------------------------------------------------------- reading, writing
def find_group(results: Path, name: str) -> tuple[list[Run], Path]:
    """The runs of a group that was run here, or else those of its committed report; and their directory.

    Raises:
        DataError: there is neither. The error names the existing groups.
    """
    directory, report = results / name, results / REPORTS / name
    if any(directory.glob(f"*/{SUMMARY}")):
        return read_runs(directory), directory
    if (report / COMMITTED).exists():
        return read_committed(report), report
    here = sorted({path.parent.parent.name for path in results.glob(f"*/*/{SUMMARY}")})
    reports = list(results.glob(f"{REPORTS}/*/{COMMITTED}"))
    there = f"With runs: {', '.join(here) or 'none'}; {len(reports)} committed in {results / REPORTS}"
    raise DataError(f"{results} holds no run and no committed report of group={name}", f"name another group. {there}")


def read_runs(group: Path) -> list[Run]:
    """Every run below `group` with a summary, by name. Runs that were moved aside (`<run_name>.1`) are left out.

    Raises:
        DataError: there is none.
    """
    directories = [path.parent for path in sorted(group.glob(f"*/{SUMMARY}"))]
    runs = [run for path in directories if (run := _read(path)).summary["run_name"] == path.name]
    if not runs:
        raise DataError(f"{group} holds no run with a summary", "name a group that was run here")
    return runs


def _read(directory: Path) -> Run:
    records = read_jsonl(directory / METRICS) if (directory / METRICS).exists() else []
    curves: dict[str, Curve] = {}
    kept = {"train/loss_nats": LOSS, VALIDATION: VALIDATION, **{f"speed/{name}": name for name in TIMES}}
    for record in records:
        for name, value in record.items():
            if value is not None and (name in kept or (name.startswith(STATISTIC) and math.isfinite(value))):
                curves.setdefault(kept.get(name, name), []).append((record["step"], value))
    environments = origins_of(read_processes(directory / ENVIRONMENT))
    return Run(read_object(directory / SUMMARY, REQUIRED, AGAIN), environments, curves)


def read_committed(directory: Path) -> list[Run]:
    """The runs of a committed report in `directory`, with every logged step.

    Raises:
        DataError: it holds no report, or a damaged one.
    """
    remedy = "scripts/report.py writes it from the runs of its group"
    content = read_object(directory / COMMITTED, ("runs", "environment", "steps"), remedy)
    runs = []
    for summary in content["runs"]:
        name = summary["run_name"]
        environments = content.get("environments", {}).get(name) or [content["environment"]]
        curves = {key: _read_columns(one) for key, one in content["steps"].get(name, {}).items()}
        runs.append(Run(summary, environments, curves))
    return runs


def write_committed(runs: Sequence[Run], directory: Path) -> Path:
    """Write environments, summaries and all logged steps to COMMITTED, without times of runs that shared their GPU.

        {"environment": {…}, "runs": [SUMMARY, …], "steps": {"RUN_NAME": {"loss_nats": {"digits": "float32", "steps":
        [1, 2, …], "values": […]}, "wall_step_ms": {…}, …}, …}}

    Values are exact: most are numbers of 32 bits, whose shortest decimals stand here. The summaries come first, one
    value a line, for `xz -dc`.
    """
    shared = environment_of(runs)
    content = {
        "environment": shared,
        "environments": {run.name: run.environments for run in runs if differing([shared, *run.environments])},
        "runs": [run.summary for run in runs],
    }
    steps = {
        run.name: {
            key: _columns(key, curve) for key, curve in run.curves.items() if not (run.gpu_shared and key in TIMES)
        }
        for run in runs
        if run.losses
    }
    text = f'{json.dumps(content, indent=1)[:-2]},\n "steps": {json.dumps(steps, separators=(",", ":"))}\n}}\n'
    path = directory / COMMITTED
    write_bytes(path, lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    return path


def _columns(name: str, curve: Curve) -> dict[str, Any]:
    """A curve as columns: times rounded, other values in the fewest digits that give them back."""
    steps, values = [step for step, _ in curve], [value for _, value in curve]
    if name in TIMES:
        return {"steps": steps, "values": [round(value, TIME_DIGITS) for value in values]}
    short = np.asarray(values, dtype=np.float32)
    if short.astype(np.float64).tolist() != values:
        return {"digits": "float64", "steps": steps, "values": values}
    return {"digits": "float32", "steps": steps, "values": [float(str(value)) for value in short]}


def _read_columns(columns: Mapping[str, Any]) -> Curve:
    values = columns["values"]
    if columns.get("digits") == "float32":
        values = np.asarray(values, dtype=np.float32).astype(np.float64).tolist()
    return list(zip(columns["steps"], values, strict=True))


def read_max_batches(group: Path) -> list[dict[str, Any]]:
    """The answers of scripts/find_max_batch.py below a group, or those of a report beside its rows."""
    answers = [read_object(path, ("model", "size")) for path in sorted(group.glob("answers/*/max_batch.json"))]
    return answers + (read_json(group / MAX_BATCHES) if (group / MAX_BATCHES).exists() else [])


def backend_names(summaries: Sequence[dict[str, Any]]) -> list[str]:
    """A name for the loss of each summary. It includes the options in which summaries of the same loss differ."""
    options: dict[str, list[dict[str, Any]]] = {}
    for summary in summaries:
        options.setdefault(summary["loss"], []).append(summary.get("loss_options") or {})
    names = []
    for summary in summaries:
        own, others = summary.get("loss_options") or {}, options[summary["loss"]]
        telling = [key for key in own if any(other.get(key) != own[key] for other in others)]
        names.append(" ".join([summary["loss"], *(f"{key}={own[key]}" for key in telling)]))
    return names


def named(runs: Sequence[Run]) -> list[tuple[Run, str]]:
    """Each run with the name of its loss."""
    return list(zip(runs, backend_names([run.summary for run in runs]), strict=True))
