"""A benchmark's files: rows in rows.jsonl, and the commands that measured them in runs.jsonl, one line of JSON each."""

import datetime
import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from linrnn.config.schema import BenchFirstStepConfig, BenchLossConfig, BenchModelsConfig, BenchStepsConfig
from linrnn.core.errors import DataError, OutOfMemoryError, UnsupportedError, as_reason, ran_out_of_memory
from linrnn.core.files import whole_lines
from linrnn.core.machine import slug
from linrnn.runs.environment import commit_in_words, describe_environment
from linrnn.training.runtime import device_name, resolve_device

BenchConfig = BenchLossConfig | BenchModelsConfig | BenchStepsConfig | BenchFirstStepConfig
AnyRow = TypeVar("AnyRow")


def named_values(arguments: Sequence[str], defaults: dict[str, str], manual: str | None) -> dict[str, str]:
    """The defaults, and in their place what arguments of the form name=value say. An unknown name ends the program.

    `--help` prints the manual, and ends the program, too.
    """
    if {"--help", "-h"} & {*arguments}:
        print(manual)
        raise SystemExit
    given = {name: value for name, _, value in (argument.partition("=") for argument in arguments)}
    if unknown := given.keys() - defaults.keys():
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(defaults)}")
    return defaults | given


def results_directory(config: BenchConfig, benchmark: str) -> Path:
    """Where this device's rows lie: results/<benchmark>/<gpu>, or what `output_dir` names."""
    if config.output_dir is not None:
        return Path(config.output_dir)
    device = resolve_device(config.device)
    return Path(config.results_dir) / benchmark / slug(device_name(device))


def status_and_reason(error: Exception) -> tuple[str, str]:
    """What a row says of a loss that failed: its status (unsupported | out_of_memory | failed), and why."""
    if isinstance(error, UnsupportedError):
        return "unsupported", as_reason(error)
    memory = isinstance(error, OutOfMemoryError) or ran_out_of_memory(error)
    return "out_of_memory" if memory else "failed", as_reason(error)


def begin_run(directory: Path, command: str, config: BenchConfig) -> dict[str, Any]:
    """Add a new run to runs.jsonl, and return it: its id, command, configuration and environment."""
    run_id = f"{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%S.%f}"
    run = {"id": run_id, "command": command, "config": asdict(config), "environment": describe_environment()}
    _append(directory / "runs.jsonl", [run])
    return run


def read_runs(directory: Path) -> dict[str, dict[str, Any]]:
    """The runs of runs.jsonl by id."""
    path = directory / "runs.jsonl"
    try:
        return {run["id"]: run for run in map(json.loads, _lines(path))}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DataError(
            f"{path} has a line that is no run ({error})", "mend the line, or move the file away"
        ) from error


def append_rows(directory: Path, rows: Sequence[Any]) -> None:
    """Add rows to rows.jsonl."""
    _append(directory / "rows.jsonl", [asdict(row) for row in rows])


def last_rows(directory: Path, row_type: type[AnyRow], key: Callable[[AnyRow], Hashable]) -> list[AnyRow]:
    """The last row of rows.jsonl for every key, in the order of the first ones.

    Raises:
        DataError: nothing was measured, or the file is damaged.
    """
    path = directory / "rows.jsonl"
    if not path.exists():
        raise DataError(f"no rows under {directory}", "measure them first: measure=true")
    try:
        rows = [row_type(**json.loads(line)) for line in _lines(path)]
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{path} has a line that is no row ({error})", "mend the line, or move the file away"
        ) from error
    return list({key(row): row for row in rows}.values())


def grouped(rows: Sequence[AnyRow], key: Callable[[AnyRow], Hashable]) -> list[list[AnyRow]]:
    """The rows of each key, in the order of its first row."""
    groups: dict[Hashable, list[AnyRow]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.values())


def runs_section(runs: list[dict[str, Any]]) -> list[str]:
    """The commands, commits, devices and versions behind a page."""
    lines = ["## Runs", ""]
    for number, run in enumerate(runs, start=1):
        environment = run["environment"]
        gpus = ", ".join(gpu["name"] for gpu in environment["gpus"]) or environment["cpu"]
        packages = ", ".join(f"{name} {version}" for name, version in environment["packages"].items() if version)
        lines += [
            f"{number}. `{run['command']}`: commit {commit_in_words(environment['git'])}, {gpus}, "
            + (f"driver {environment['gpu_driver']}, " if environment["gpu_driver"] else "")
            + f"Python {environment['python']}, {packages}",
        ]
    return [*lines, ""]


def _lines(path: Path) -> list[str]:
    """The lines of a file; none where it does not exist. A last line that was cut off is left out."""
    return whole_lines(path.read_bytes()).decode().splitlines() if path.exists() else []


def _append(path: Path, records: list[dict[str, Any]]) -> None:
    """Add records. A last line that was cut off (by a full disk or a kill) would swallow the first, so it goes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        file.seek(0)
        before = file.read()
        whole = whole_lines(before)
        if len(whole) < len(before):
            file.truncate(len(whole))
        file.write(whole[len(before) :])  # the end that a last line lacks
        file.write("".join(json.dumps(record) + "\n" for record in records).encode())
