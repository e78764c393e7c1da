"""Read back what was measured: runs, committed summaries, largest batches, breakdowns; also as a pandas frame."""

import json
import lzma
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linrnn.core.errors import ConfigError, DataError
from linrnn.core.files import read_json, read_object, write_bytes
from linrnn.core.machine import GIB
from linrnn.runs.directory import ENVIRONMENT, METRICS, SUMMARY
from linrnn.runs.metrics import read_jsonl
from linrnn.runs.mixtures import differing, read_origin
from linrnn.study import curves
from linrnn.study.curves import Comparison
from linrnn.study.steps import LOSS, STATISTIC, TIMES, VALIDATION, packed, times_of, unpacked

if TYPE_CHECKING:
    import pandas

COMMITTED = "runs.json.xz"  # a report's file with its runs' environment, summaries and logged steps
REPORTS = ("summaries",)  # the folders of the results directory that hold committed reports
MAX_BATCHES, BREAKDOWNS = "max_batches.json.xz", "breakdowns.json.xz"  # files beside it, with the report's other inputs
# The keys that tables need from every summary, and the remedy if a run's file is broken.
FIGURES = (
    *("status", "run_name", "model", "size", "loss", "seed", "batch_size", "seq_len", "vocab_size", "steps"),
    *("train_loss_nats", "valid_loss_nats", "valid_bits_per_byte", "peak_memory_bytes", "tokens_per_second"),
    *("step_time_ms_median", "mfu"),
)
_HORIZON = re.compile(r"schedule\.steps=(\d+) ?")
AGAIN = "run that run's command again (trainer.resume=never), or move its directory out of the group"
# The keys of a setting. Runs that share all of them differ only in loss and seed.
SETTING = (
    "model",
    "size",
    "data_fingerprint",
    "batch_size",
    "accumulation_steps",
    "seq_len",
    "precision",
    "activation_checkpointing",
    "chunk_size",
    "vocab_size",
    "n_parameters",
    "memory_budget_gib",
    "parallel",
    "world_size",
    "steps",
    "horizon",
    "training",
)
# Runs whose curves can be compared share the keys of COURSE, whether or not they reached their last step.
_NOT_OF_A_COURSE = ("data_fingerprint", "n_parameters", "memory_budget_gib", "steps", "horizon")
COURSE = tuple(key for key in SETTING if key not in _NOT_OF_A_COURSE)


@dataclass(frozen=True)
class Run:
    """One run, as read from its files.

    Attributes:
        summary: summary.json.
        environment: software, hardware and commit; empty for a run that could not start.
        losses: (step, nats per token) of every logged step.
        times: (step, milliseconds) of every logged step, by the names of :data:`linrnn.study.steps.TIMES`.
        statistics: (step, value) of the loss's own statistics, such as a filter's `dropped_mass_mean`, by name.
        validations: (step, perplexity) of every validation.
        mixture: keys in which the run's processes differ. If there are any, its figures decide nothing.
    """

    summary: dict[str, Any]
    environment: dict[str, Any]
    losses: list[tuple[int, float]] = field(default_factory=list)
    statistics: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    validations: list[tuple[int, float]] = field(default_factory=list)
    mixture: tuple[str, ...] = ()
    times: dict[str, list[tuple[int, float]]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.summary["run_name"])

    @property
    def finished(self) -> bool:
        return self.summary["status"] == "finished"

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
        own = {
            **self.summary,
            "horizon": self.horizon,
            "training": without_horizon(self.summary["training"]),
        }
        return tuple(own.get(key) for key in keys)

    @property
    def execution(self) -> str:
        """How its blocks are executed, where that is not as usual: `compile=blocks, float8=blocks`, say."""
        told = dict(word.split("=", 1) for word in self.summary["training"].split() if "=" in word)
        chosen = {key: told.get(f"trainer.{key}", "none") for key in ("compile", "float8")}
        return ", ".join(f"{key}={value}" for key, value in chosen.items() if value != "none")

    @property
    def setting(self) -> tuple[Any, ...]:
        """The values that it shares with the runs that it can be compared with."""
        return self.values(SETTING)

    @property
    def course(self) -> tuple[Any, ...]:
        """The values, except for the horizon, that it shares with runs whose curves can be compared with its own."""
        return self.values(COURSE)


def environment_of(runs: Sequence[Run]) -> dict[str, Any]:
    """Of the first run that started and mixes no origins; empty if there is none. Runs of one report share it."""
    return next((run.environment for run in runs if run.environment and not run.mixture), {})


def without_horizon(training: str) -> str:
    """What a run's `training` says beside its horizon, which follows from its batch and tokens."""
    return _HORIZON.sub("", training)


@dataclass(frozen=True)
class Group:
    """The runs of a group, and where they were read.

    Attributes:
        committed: whether they come from a committed report and not from the runs themselves.
    """

    runs: list[Run]
    directory: Path
    committed: bool


def find_group(results: Path, name: str) -> Group:
    """The runs of a group that was run here, or else of its committed report.

    Raises:
        DataError: there is neither. The error names the existing groups.
    """
    if any((results / name).glob(f"*/{SUMMARY}")):
        return Group(read_runs(results / name), results / name, committed=False)
    if directory := committed_report(results, name):
        return Group(read_committed(directory), directory, committed=True)
    here = sorted({path.parent.parent.name for path in results.glob(f"*/*/{SUMMARY}")})
    reports = sorted(path.parent.name for folder in REPORTS for path in results.glob(f"{folder}/*/{COMMITTED}"))
    raise DataError(
        f"{results} holds no run and no committed report of group={name}",
        f"name another group. With runs: {', '.join(here) or 'none'}. Committed: {', '.join(reports) or 'none'}",
    )


def committed_report(results: Path, name: str) -> Path | None:
    """The directory of a group's committed report; None if there is none."""
    directories = (results / folder / name for folder in REPORTS)
    return next((directory for directory in directories if (directory / COMMITTED).exists()), None)


def read_runs(group: Path) -> list[Run]:
    """Every run below `group` with a summary, by name. Runs that were moved aside (`<run_name>.1`) are left out.

    Raises:
        DataError: there is none.
    """
    directories = [path.parent for path in sorted(group.glob(f"*/{SUMMARY}"))]
    runs = [run for path in directories if (run := _read(path)).summary["run_name"] == path.name]
    if not runs:
        raise DataError(
            f"{group} holds no run with a summary",
            "name a group that was run here (results/<group>/<run_name>/), or a committed report as "
            "summary=results/summaries/<name>",
        )
    return runs


def read_committed(directory: Path) -> list[Run]:
    """The runs of a committed report in `directory`, with every logged step.

    Raises:
        DataError: it holds no report, or a damaged one.
    """
    path = directory / COMMITTED
    if not path.exists() and any(directory.glob(f"*/{SUMMARY}")):
        raise DataError(
            f"summary={directory} holds runs, and no report",
            f"use results_dir={directory.parent} group={directory.name} for a report on the runs",
        )
    content = read_object(path, ("runs", "environment", "steps"), "name a directory that scripts/report.py wrote")
    origin, mixtures = read_origin(content["environment"]), content.get("mixtures", {})
    runs = []
    for summary in content["runs"]:
        name = summary["run_name"]
        series = unpacked(content["steps"].get(name, {}))
        runs.append(
            Run(
                summary,
                origin.environment,
                series.get(LOSS, []),
                {key.removeprefix(STATISTIC): one for key, one in series.items() if key.startswith(STATISTIC)},
                series.get(VALIDATION, []),
                mixture=tuple(mixtures.get(name, ())),
                times={key: one for key, one in series.items() if key in TIMES},
            )
        )
    return runs


def write_committed(runs: Sequence[Run], directory: Path) -> Path:
    """Write environment, summaries and all logged steps to COMMITTED. Times of runs that shared their GPU are left out.

    The summaries come first, one value a line, for `xz -dc`.
    """
    content = {
        "environment": environment_of(runs),
        **({"mixtures": mixtures} if (mixtures := {run.name: run.mixture for run in runs if run.mixture}) else {}),
        "runs": [run.summary for run in runs],
    }
    steps = {
        run.name: packed(
            {LOSS: run.losses}
            | ({} if run.gpu_shared else run.times)
            | {f"{STATISTIC}{name}": curve for name, curve in run.statistics.items()}
            | ({VALIDATION: run.validations} if run.validations else {})
        )
        for run in runs
        if run.losses
    }
    text = f'{json.dumps(content, indent=1)[:-2]},\n "steps": {json.dumps(steps, separators=(",", ":"))}\n}}\n'
    path = directory / COMMITTED
    write_bytes(path, lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    return path


def comparison(run: Run, base: Run) -> Comparison:
    """Two runs' loss curves compared over their common steps."""
    return curves.compare(run.losses, base.losses)


def alike(a: Run, b: Run) -> bool:
    """Whether two runs' curves can be compared: they differ only in loss, seed and the last step that they reached.

    An unfinished run without a recorded horizon is assumed to have the other's.
    """
    horizons = {a.horizon, b.horizon} - {None}
    return a.course == b.course and len(horizons) < 2


def check_origin(runs: Iterable[Run], title: str) -> None:
    """Reject runs of different origins. A run that mixes origins itself is ignored, and reports name it.

    Raises:
        ConfigError: the runs were made on different GPUs, with different versions or at different commits.
    """
    environments = [run.environment for run in runs if run.environment and not run.mixture]
    for key in differing(environments):
        raise ConfigError(
            f"the runs of {title} differ in {key}: their figures do not belong in one table",
            "give each origin a group of its own",
        )


def read_max_batches(group: Path) -> list[dict[str, Any]]:
    """The answers of scripts/find_max_batch.py below a group."""
    return [read_object(path, ("model", "size")) for path in sorted(group.glob("answers/*/max_batch.json"))]


def read_breakdowns(directory: Path) -> list[dict[str, Any]]:
    """What scripts/breakdown.py wrote to a directory."""
    return [read_object(path, ("run", "time", "environment")) for path in sorted(directory.glob("*.json"))]


def read_list(path: Path) -> list[dict[str, Any]]:
    """The answers or breakdowns of a report (MAX_BATCHES or BREAKDOWNS in its directory); empty if it has none."""
    return read_json(path) if path.exists() else []


def read_committed_lists(summaries: Path, name: str) -> list[dict[str, Any]]:
    """The answers or breakdowns (`name`: MAX_BATCHES or BREAKDOWNS) of every report below `summaries`."""
    return [entry for path in sorted(summaries.glob(f"*/{name}")) for entry in read_list(path)]


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


def loss_time_share(run: Run) -> float | None:
    """The loss layer's share of a step's time; None if it was not measured."""
    times, step = run.summary.get("loss_layer_ms"), run.summary.get("step_time_ms_median")
    return sum(times.values()) / step if times and step else None


def loss_layer_share(run: Run) -> float | None:
    """The most that the loss layer's passes add, including gradients, as a share of the peak; None on a CPU."""
    memory, peak = run.summary.get("memory_bytes") or {}, run.summary["peak_memory_bytes"]
    sizes = [memory[key] for key in ("loss_forward", "loss_backward") if key in memory]
    return max(sizes) / peak if sizes and peak else None


def frame(runs: Sequence[Run]) -> "pandas.DataFrame":
    """One row per run: summary, `backend`, GPU, commit, memory in GiB, and the loss layer's shares of peak and step."""
    import pandas

    nested = ("memory_bytes", "loss_options", "loss_layer_ms")
    rows = []
    for run, backend in zip(runs, backend_names([run.summary for run in runs]), strict=True):
        memory = run.summary.get("memory_bytes") or {}
        peak = run.summary["peak_memory_bytes"]
        gpus = run.environment.get("gpus") or []
        rows.append(
            {
                **{key: value for key, value in run.summary.items() if key not in nested},
                "backend": backend,
                "mixture": ", ".join(run.mixture),
                "gpu": gpus[0]["name"] if gpus else None,
                "commit": (run.environment.get("git") or {}).get("commit"),
                "peak_memory_gib": None if peak is None else peak / GIB,
                **{f"{name}_gib": size / GIB for name, size in memory.items()},
                "loss_layer_share": loss_layer_share(run),
                **{f"loss_{name}_ms": time for name, time in (run.summary.get("loss_layer_ms") or {}).items()},
                "loss_layer_time_share": loss_time_share(run),
            }
        )
    return pandas.DataFrame(rows)


def _read(directory: Path) -> Run:
    records = read_jsonl(directory / METRICS) if (directory / METRICS).exists() else []
    environment = directory / ENVIRONMENT
    origin = read_origin(read_object(environment, remedy=AGAIN) if environment.exists() else {})
    statistics: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for name, value in record.items():
            if name.startswith(STATISTIC) and value is not None and math.isfinite(value):
                statistics.setdefault(name.removeprefix(STATISTIC), []).append((record["step"], value))
    return Run(
        summary=read_object(directory / SUMMARY, FIGURES, AGAIN),
        environment=origin.environment,
        losses=[(r["step"], r["train/loss_nats"]) for r in records if r.get("train/loss_nats") is not None],
        statistics=statistics,
        validations=[(r["step"], r["valid/perplexity"]) for r in records if r.get("valid/perplexity") is not None],
        mixture=origin.mixture,
        times=times_of(records),
    )
