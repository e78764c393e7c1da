"""What all benchmarks share: their keys, their files, their tables and one kind of picture.

A benchmark is a script. It owns its configuration and its Row, both dataclasses. Rows are appended to rows.jsonl, and
the command with its environment to runs.jsonl beside it, one line of JSON each. Page and picture are made from these
two files, so `measure=false` makes them again.
"""

import datetime
import gc
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any, TypeVar

import torch

from benchmarks.other_losses import OTHER_LOSSES
from linrnn.config import load_config, nearest
from linrnn.config.schema import LossConfig, option
from linrnn.core.errors import ConfigError, DataError, OutOfMemoryError, UnsupportedError, as_reason, ran_out_of_memory
from linrnn.core.files import whole_lines, write_text
from linrnn.core.machine import slug
from linrnn.core.plot_style import GREY, WIDTH, looks, subplots
from linrnn.core.tables import Table, show
from linrnn.losses import loss_names
from linrnn.runs.environment import commit_in_words, describe_environment
from linrnn.training.runtime import device_name, resolve_device

AnyRow = TypeVar("AnyRow")
Say = Callable[[str], None]  # shows a line to the user


# ----------------------------------------------------------------------------------------------------------- keys
@dataclass
class Keys:
    """Keys that most benchmarks have."""

    measure: bool = option(True, "false: only write page and picture again from the existing rows")
    device: str = option("auto", "auto (a GPU if there is one) | cpu | cuda", choices=("auto", "cpu", "cuda"))
    results_dir: str = option("results", "rows and page go to <results_dir>/<benchmark>/<gpu>/", path="read")
    output_dir: str | None = option(None, "or to this directory", path="written")


def parse_loss(text: str) -> LossConfig:
    """`name [option=value …]`, as in `liger accumulate=fp32`: a loss of linrnn or of benchmarks.other_losses.

    Raises:
        ConfigError: an unknown name or option. The message offers the nearest ones.
    """
    name, *options = text.split()
    names = [*loss_names(), *OTHER_LOSSES]
    if name not in names:
        raise ConfigError(
            f"{name}: there is no such loss", f"nearest: {', '.join(nearest(name, names))}; all: {', '.join(names)}"
        )
    if name in OTHER_LOSSES:
        if options:
            raise ConfigError(f"{text}: {name} has no options", f"write {name}")
        return LossConfig(name)
    return load_config([f"loss={name}", *(f"loss.{option}" for option in options)]).loss


def results_directory(config: Keys, benchmark: str) -> Path:
    """Where this device's rows lie: results/<benchmark>/<gpu>, or what `output_dir` names."""
    if config.output_dir is not None:
        return Path(config.output_dir)
    return Path(config.results_dir) / benchmark / slug(device_name(resolve_device(config.device)))


def status_and_reason(error: Exception) -> tuple[str, str]:
    """What a row says of a loss that failed: its status (unsupported | out_of_memory | failed), and why."""
    if isinstance(error, UnsupportedError):
        return "unsupported", as_reason(error)
    memory = isinstance(error, OutOfMemoryError) or ran_out_of_memory(error)
    return "out_of_memory" if memory else "failed", as_reason(error)


def free(device: torch.device) -> None:
    """Give back what Python and the allocator hold of what is gone."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# ---------------------------------------------------------------------------------------------------------- files
def begin_run(directory: Path, command: str, config: Any) -> dict[str, Any]:
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


def append_rows(directory: Path, rows: Sequence[Any], name: str = "rows.jsonl") -> None:
    """Add rows to a file."""
    _append(directory / name, [asdict(row) for row in rows])


def last_rows(
    directory: Path, row_type: type[AnyRow], key: Callable[[AnyRow], Hashable], name: str = "rows.jsonl"
) -> list[AnyRow]:
    """The last row of a file for every key, in the order of the first ones.

    Raises:
        DataError: nothing was measured, or the file is damaged.
    """
    path = directory / name
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


# ---------------------------------------------------------------------------------------------------------- pages
@dataclass(frozen=True)
class Column:
    """A column of a page's tables: its head, a row's cell (`field:format`, or a function), and what it means."""

    head: str
    cell: str | Callable[[Any], object]
    meaning: str = ""

    def of(self, row: Any) -> object:
        """The cell of a row; `-` for a field without a value."""
        if callable(self.cell):
            return self.cell(row)
        name, _, form = self.cell.partition(":")
        return show(getattr(row, name), form)


def table(columns: Sequence[Column], rows: Sequence[Any]) -> list[str]:
    """The lines of a Markdown table. The first column holds words."""
    cells = [[column.of(row) for column in columns] for row in rows]
    return Table([column.head for column in columns], cells, words=(columns[0].head,)).markdown()


def meanings(columns: Sequence[Column]) -> list[str]:
    """A table of what the columns mean."""
    told = [(column.head, column.meaning) for column in columns if column.meaning]
    return Table(("column", "meaning"), told, words=("column", "meaning")).markdown()


def section(heading: str, about: str, columns: Sequence[Column], rows: Sequence[Any], *remarks: str) -> list[str]:
    """A heading, a line about the rows, their table, and below it the losses without figures and further remarks."""
    lines, ran = [f"## {heading}", "", about, ""], [row for row in rows if row.status == "ok"]
    lines += [*table(columns, ran), ""] if ran else []
    below = [f"* `{row.loss}`: {row.status}. {row.reason}" for row in rows if row.status != "ok"] + [*remarks]
    return [*lines, *below, *([""] if below else [])]


def interval(low: float | None, high: float | None, form: str = ".3f") -> str:
    """The ends of an interval; `-` where there is none."""
    return "-" if low is None or high is None else f"{low:{form}}-{high:{form}}"


def time_and_memory(ms: float | None, gib: float | None) -> str:
    """The note of a point."""
    return ", ".join([*([f"{ms:,.1f} ms"] if ms else []), *([f"{gib:.1f} GiB"] if gib else [])])


def write_page(path: Path, lines: Sequence[str], directory: Path, used: Sequence[str]) -> Path:
    """Write a page, and below it the commands, commits, devices and versions of the runs that it `used`, by id."""
    write_text(path, "\n".join([*lines, *runs_section(runs_of(directory, used))]))
    return path


def runs_of(directory: Path, used: Sequence[str]) -> list[dict[str, Any]]:
    """The runs with these ids in the order of their ids, once each. An id that runs.jsonl lacks is left out."""
    runs = read_runs(directory)
    return [runs[run] for run in sorted(set(used)) if run in runs]


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


# ------------------------------------------------------------------------------------------------------- pictures
@dataclass(frozen=True)
class Point:
    """A line of a picture: a value with its interval, if it has one, and a note at the right."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    note: str = ""


def forest(groups: Mapping[str, Sequence[Point]], title: str, axis: str, at: float = 1.0) -> Any:
    """A line for each point, below the heading of its group. A vertical line stands at `at`.

    A point with an interval is filled with its loss's look. A point without one is hollow.
    """
    found = looks(point.label.replace(",", "") for points in groups.values() for point in points)
    height = 1.1 + sum(0.2 + 0.17 * len(wrap(head, 110)) + 0.26 * len(points) for head, points in groups.items())
    figure, panel = subplots(figsize=(WIDTH, height))
    across = panel.get_yaxis_transform()
    places: dict[float, str] = {}
    y = 0.0
    for heading, points in groups.items():
        y -= 1.3
        panel.text(0, y, "\n".join(wrap(heading, 110)), transform=across, va="center", weight="bold", size=9)
        for point in points:
            y -= 1
            look, style = found[point.label.replace(",", "")], {}
            if point.low is None or point.high is None:
                style = {"markerfacecolor": "white"}
            else:
                panel.plot([point.low, point.high], [y, y], color=look.colour, linewidth=1.5)
            panel.plot([point.value], [y], **{**look.point, **style})
            panel.text(1.01, y, point.note, transform=across, va="center", size=8.5)
            places[y] = point.label
    panel.axvline(at, color=GREY, linewidth=0.8, zorder=1)
    panel.set_yticks(list(places), list(places.values()))
    panel.set_ylim(y - 0.8, -0.4)
    panel.grid(axis="y", visible=False)
    panel.margins(x=0.08)
    panel.set_xlabel(axis)
    figure.suptitle(title)
    figure.tight_layout()
    return figure
