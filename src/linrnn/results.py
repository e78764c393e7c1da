"""What was measured, read back: runs, committed summaries, largest batches, breakdowns; also as a pandas frame."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linrnn.errors import ConfigError, DataError
from linrnn.metrics import read_jsonl
from linrnn.run_directory import ENVIRONMENT, METRICS, SUMMARY

if TYPE_CHECKING:
    import pandas

COMMITTED = "runs.json"  # of a report: summaries, environment and thinned loss curves of its runs
MAX_BATCHES, BREAKDOWNS = "max_batches.json", "breakdowns.json"  # beside it: the answers and breakdowns that counted
STATISTIC = "loss/"  # begins the names of a loss's statistics in metrics.jsonl
CURVE_POINTS = 1000  # of a committed curve, at most
# What two runs must share for their figures to stand in one table.
SAME_ORIGIN = ("packages", "gpus", "cuda", "cuda_allocator", "gpu_driver", "cpu", "git")
# What tells settings apart: runs that share all of it differ in loss and seed alone.
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
    "training",
)
# What runs share whose curves can be laid over each other, whether or not they reached their last step.
COURSE = tuple(key for key in SETTING if key not in ("data_fingerprint", "n_parameters", "memory_budget_gib", "steps"))


@dataclass(frozen=True)
class Run:
    """One run, read.

    Attributes:
        summary, environment: summary.json and environment.json; a run that could not start has no environment.
        losses: (step, nats per token) of every logged step.
        statistics: what the loss reports beside it (a filter's `dropped_mass_mean`, say), by name, in the same way.
        validations: (step, perplexity) of every validation.
    """

    summary: dict[str, Any]
    environment: dict[str, Any]
    losses: list[tuple[int, float]] = field(default_factory=list)
    statistics: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    validations: list[tuple[int, float]] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return self.summary["status"] == "finished"

    @property
    def setting(self) -> tuple[Any, ...]:
        """What it shares with the runs that it can be compared with."""
        return tuple(self.summary.get(key) for key in SETTING)

    @property
    def course(self) -> tuple[Any, ...]:
        """What it shares with the runs whose curves can be laid over its own."""
        return tuple(self.summary.get(key) for key in COURSE)


def read_runs(group: Path) -> list[Run]:
    """Every run below `group` that left a summary, by name; not those that were moved aside (`<run_name>.1`).

    Raises:
        DataError: there is none.
    """
    directories = [path.parent for path in sorted(group.glob(f"*/{SUMMARY}"))]
    runs = [run for path in directories if (run := _read(path)).summary["run_name"] == path.name]
    if not runs:
        raise DataError(
            f"{group} holds no run with a summary", "name a group that was run: results/<group>/<run_name>/"
        )
    return runs


def read_committed(directory: Path) -> list[Run]:
    """The runs of a report that was written to `directory`.

    Raises:
        DataError: it holds no report.
    """
    path = directory / COMMITTED
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error})", "name a directory that scripts/report.py wrote") from error
    curves, statistics = content.get("losses", {}), content.get("statistics", {})
    validations = content.get("validations", {})
    return [
        Run(
            summary,
            content["environment"],
            [(step, nats) for step, nats in curves.get(summary["run_name"], [])],
            {
                name: [(step, value) for step, value in curve]
                for name, curve in statistics.get(summary["run_name"], {}).items()
            },
            [(step, perplexity) for step, perplexity in validations.get(summary["run_name"], [])],
        )
        for summary in content["runs"]
    ]


def write_committed(runs: Sequence[Run], path: Path) -> None:
    """Summaries, the environment that all share, and curves of at most `CURVE_POINTS` points."""
    content = {
        "environment": next((run.environment for run in runs if run.environment), {}),
        "runs": [run.summary for run in runs],
    }
    every = -(-max((len(run.losses) for run in runs), default=0) // (CURVE_POINTS - 1)) or 1
    curves = {
        "losses": {run.summary["run_name"]: _thinned(run.losses, every) for run in runs if run.losses},
        "statistics": {
            run.summary["run_name"]: {name: _thinned(curve, every) for name, curve in run.statistics.items()}
            for run in runs
            if run.statistics
        },
        "validations": {run.summary["run_name"]: run.validations for run in runs if run.validations},
    }
    lines = "".join(f',\n "{name}": {json.dumps(curve)}' for name, curve in curves.items() if curve)
    path.write_text(f"{json.dumps(content, indent=1)[:-2]}{lines}\n}}\n", encoding="utf-8")


def check_origin(runs: Iterable[Run], title: str) -> None:
    """Refuse to mix.

    Raises:
        ConfigError: the runs were made on different GPUs, with different versions or at different commits.
    """
    environments = [run.environment for run in runs if run.environment]
    for key in SAME_ORIGIN:
        if len({json.dumps(environment.get(key), sort_keys=True) for environment in environments}) > 1:
            raise ConfigError(
                f"the runs of {title} differ in {key}: their figures do not belong in one table",
                "give each origin a group of its own",
            )


def same_origin(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """The keys of the origin in which two environments differ."""
    return [key for key in SAME_ORIGIN if a.get(key) != b.get(key)]


def read_max_batches(group: Path) -> list[dict[str, Any]]:
    """The answers of scripts/find_max_batch.py below a group."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(group.glob("answers/*/max_batch.json"))]


def read_breakdowns(directory: Path) -> list[dict[str, Any]]:
    """What scripts/breakdown.py wrote to a directory."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(directory.glob("*.json"))]


def read_committed_lists(summaries: Path, name: str) -> list[dict[str, Any]]:
    """The answers or breakdowns (`name`: MAX_BATCHES or BREAKDOWNS) of every report below `summaries`."""
    return [
        entry for path in sorted(summaries.glob(f"*/{name}")) for entry in json.loads(path.read_text(encoding="utf-8"))
    ]


def backend_names(summaries: Sequence[dict[str, Any]]) -> list[str]:
    """A name for the loss of each summary: with its options where the same loss stands there with others."""
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
    """The loss layer's part of the time of a step; None where it was not measured."""
    times, step = run.summary.get("loss_layer_ms"), run.summary.get("step_time_ms_median")
    return sum(times.values()) / step if times and step else None


def frame(runs: Sequence[Run]) -> "pandas.DataFrame":
    """One row a run: its summary, `backend`, GPU and commit, memory in GiB, the loss layer's share of peak and step."""
    import pandas

    gib, nested = 2**30, ("memory_bytes", "loss_options", "loss_layer_ms")
    rows = []
    for run, backend in zip(runs, backend_names([run.summary for run in runs]), strict=True):
        memory = run.summary.get("memory_bytes") or {}
        peak = run.summary["peak_memory_bytes"]
        loss = max((memory[key] for key in ("loss_forward", "loss_backward") if key in memory), default=None)
        gpus = run.environment.get("gpus") or []
        rows.append(
            {
                **{key: value for key, value in run.summary.items() if key not in nested},
                "backend": backend,
                "gpu": gpus[0]["name"] if gpus else None,
                "commit": (run.environment.get("git") or {}).get("commit"),
                "peak_memory_gib": None if peak is None else peak / gib,
                **{f"{name}_gib": size / gib for name, size in memory.items()},
                "loss_layer_share": loss / peak if loss is not None and peak else None,
                **{f"loss_{name}_ms": time for name, time in (run.summary.get("loss_layer_ms") or {}).items()},
                "loss_layer_time_share": loss_time_share(run),
            }
        )
    return pandas.DataFrame(rows)


def _read(directory: Path) -> Run:
    records = read_jsonl(directory / METRICS) if (directory / METRICS).exists() else []
    environment = directory / ENVIRONMENT
    statistics: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for name, value in record.items():
            if name.startswith(STATISTIC) and value is not None and math.isfinite(value):
                statistics.setdefault(name.removeprefix(STATISTIC), []).append((record["step"], value))
    return Run(
        summary=json.loads((directory / SUMMARY).read_text(encoding="utf-8")),
        environment=json.loads(environment.read_text(encoding="utf-8")) if environment.exists() else {},
        losses=[(r["step"], r["train/loss_nats"]) for r in records if r.get("train/loss_nats") is not None],
        statistics=statistics,
        validations=[(r["step"], r["valid/perplexity"]) for r in records if r.get("valid/perplexity") is not None],
    )


def _thinned(curve: list[tuple[int, float]], every: int) -> list[tuple[int, float]]:
    """Every n-th point from the first on, so that runs which ended at different steps keep the same ones; the last."""
    kept = [point for n, point in enumerate(curve) if n % every == 0 or n == len(curve) - 1]
    return [(step, float(f"{value:.6g}")) for step, value in kept]
