"""What all benchmarks share: their keys, their files, one kind of table and one kind of picture.

A benchmark is a script. It owns its keys, its Row and its columns. Rows are appended to rows.jsonl, and the command
with its environment to runs.jsonl beside it, one line of JSON each. Page and picture are made from these two files, so
`measure=false` makes them again.
"""

import datetime
import gc
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from benchmarks.other_losses import OTHER_LOSSES
from linrnn.config import cli, load_config, nearest
from linrnn.config.schema import LossConfig, option
from linrnn.core.errors import ConfigError, DataError, OutOfMemoryError, UnsupportedError, as_reason, ran_out_of_memory
from linrnn.core.files import whole_lines, write_text
from linrnn.core.machine import slug
from linrnn.core.output import say
from linrnn.core.tables import Table, show
from linrnn.losses import loss_names
from linrnn.report.plot_style import COLOURS, GREY, LOSSES, in_words, legend_below, looks, loss_of, save, subplots
from linrnn.runs.environment import command_line, describe_environment
from linrnn.runs.origins import commit_in_words
from linrnn.training.runtime import device_name, resolve_device

AnyRow = TypeVar("AnyRow")
RESAMPLES = 2000  # of ratio_to
ROWS, RUNS = "rows.jsonl", "runs.jsonl"


# ----------------------------------------------------------------------------------------------------------- keys
@dataclass
class Keys:
    """Keys that most benchmarks have."""

    measure: bool = option(True, "false: only write page and picture again from the existing rows")
    device: str = option("auto", "auto (a GPU if there is one) | cpu | cuda", choices=("auto", "cpu", "cuda"))
    results_dir: str = option("results", "rows and page go to <results_dir>/<benchmark>/<gpu>/", path="read")
    output_dir: str | None = option(None, "or to this directory", path="written")


def run(
    name: str, description: str, measure: Callable[[Any], object], report: Callable[[Path], Sequence[Path]]
) -> None:
    """The command line of a benchmark: measure, unless `measure=false`, then write page and pictures."""

    def main(config: Any) -> None:
        if config.measure:
            measure(config)
        say("wrote " + ", ".join(map(str, report(results_directory(config, name)))))

    cli.run(main, name, description)


def results_directory(config: Keys, benchmark: str) -> Path:
    """Where this device's rows lie: results/<benchmark>/<gpu>, or what `output_dir` names."""
    if config.output_dir is not None:
        return Path(config.output_dir)
    return Path(config.results_dir) / benchmark / slug(device_name(resolve_device(config.device)))


def parse_loss(text: str) -> LossConfig:
    """`name [option=value …]`, as in `liger accumulate=fp32`: a loss of linrnn or of benchmarks.other_losses.

    Raises:
        ConfigError: an unknown name or option. The message offers the nearest ones.
    """
    name, *options = text.split()
    if name not in OTHER_LOSSES:
        check_known("loss", [name], [*loss_names(), *OTHER_LOSSES])
        return load_config([f"loss={name}", *(f"loss.{option}" for option in options)]).loss
    if options:
        raise ConfigError(f"{text}: {name} has no options", f"write {name}")
    return LossConfig(name)


def check_known(key: str, chosen: Sequence[str], known: Sequence[str]) -> None:
    """Reject a choice that there is not.

    Raises:
        ConfigError: with the nearest names.
    """
    if unknown := [name for name in chosen if name not in known]:
        near = f"nearest: {', '.join(nearest(unknown[0], known))}; " if len(known) > 5 else ""
        raise ConfigError(f"{key}: {', '.join(unknown)} is not known", f"{near}choose from {', '.join(known)}")


def attempt(row: Any, device: torch.device, action: Callable[[], object]) -> bool:
    """Whether an action succeeded. A failure is a result: the row's status and reason say what it was."""
    try:
        action()
        return True
    except Exception as error:
        memory = isinstance(error, OutOfMemoryError) or ran_out_of_memory(error)
        unsupported = isinstance(error, UnsupportedError)
        row.status = "unsupported" if unsupported else "out_of_memory" if memory else "failed"
        row.reason = as_reason(error)
    free(device)  # the error held the tensors of its frames
    return False


def free(device: torch.device) -> None:
    """Give back what Python and the allocator hold of what is gone."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# ---------------------------------------------------------------------------------------------------------- files
class Record:
    """One call of a benchmark: its device, and the directory and id of its rows. It adds itself to runs.jsonl."""

    def __init__(self, config: Keys, benchmark: str) -> None:
        self.directory, self.device = results_directory(config, benchmark), resolve_device(config.device)
        self.id = f"{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%S.%f}"  # noqa: TID251  a label
        self.run = {"id": self.id, "command": command_line(), "config": asdict(config)}
        self.run["environment"] = describe_environment()
        _append(self.directory / RUNS, [self.run])

    def add(self, *rows: Any) -> None:
        _append(self.directory / ROWS, [asdict(row) for row in rows])


def _append(path: Path, records: list[dict[str, Any]]) -> None:
    """Add records. A last line that was cut off (by a full disk or a kill) would swallow the first, so it goes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_bytes() if path.exists() else b""
    whole = whole_lines(before)
    with path.open("ab") as file:
        if len(whole) < len(before):
            file.truncate(len(whole))
        file.write(whole[len(before) :] + "".join(json.dumps(record) + "\n" for record in records).encode())


def _read(path: Path, make: Callable[[dict[str, Any]], AnyRow]) -> list[AnyRow]:
    """What each whole line of a file holds; nothing where there is no file."""
    try:
        lines = whole_lines(path.read_bytes()).splitlines() if path.exists() else []
        return [make(json.loads(line)) for line in lines]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(
            f"{path} has a line that is none of this benchmark's ({error})", "mend the line, or move the file away"
        ) from error


def read_runs(directory: Path) -> dict[str, dict[str, Any]]:
    """The runs of runs.jsonl by id."""
    return dict(_read(directory / RUNS, lambda run: (run["id"], run)))


def last_rows(directory: Path, row_type: type[AnyRow], key: Callable[[AnyRow], Hashable]) -> list[AnyRow]:
    """The last row for every key, in the order of the first ones.

    Fields that `row_type` does not have are left out: committed rows hold more than is measured today.

    Raises:
        DataError: nothing was measured, or the file is damaged.
    """
    known = {field.name for field in fields(row_type)}  # type: ignore[arg-type]
    make = lambda row: row_type(**{name: value for name, value in row.items() if name in known})  # noqa: E731
    rows = _read(directory / ROWS, make)
    if not rows:
        raise DataError(f"no rows under {directory}", "measure them first: measure=true")
    return list({key(row): row for row in rows}.values())


def grouped(rows: Sequence[AnyRow], key: Callable[[AnyRow], Hashable]) -> list[list[AnyRow]]:
    """The rows of each key, in the order of its first row."""
    groups: dict[Hashable, list[AnyRow]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.values())


# ---------------------------------------------------------------------------------------------------------- pages
Columns = Mapping[str, str | Callable[[Any], object]]  # head -> `field:format` or a function of the row


def table(columns: Columns, rows: Sequence[Any]) -> list[str]:
    """The lines of a Markdown table; `-` for a field without a value. The first column holds words."""

    def cell(row: Any, of: str | Callable[[Any], object]) -> object:
        if callable(of):
            return of(row)
        name, _, form = of.partition(":")
        return show(getattr(row, name), form)

    cells = [[cell(row, of) for of in columns.values()] for row in rows]
    return Table([*columns], cells, words=(next(iter(columns)),)).markdown()


def interval(low: float | None, high: float | None, form: str = ".3f") -> str:
    """The ends of an interval; `-` where there is none."""
    return "-" if low is None or high is None else f"{low:{form}}-{high:{form}}"


def write_report(
    directory: Path,
    name: str,
    title: str,
    sections: Mapping[str, Sequence[Any]],
    columns: Columns,
    pictures: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Write <name>.md, a table below each heading, and the pictures by their files' names. Returns all paths.

    Rows without figures stand below their table with the reason. The last section holds the commands, commits, devices
    and versions behind the rows.
    """
    drawn = [save_picture(figure, directory / f"{stem}.png") for stem, figure in (pictures or {}).items()]
    lines = [f"# {title}: {directory.name}", ""]
    lines += [line for path in drawn for line in (f"![{path.stem}]({path.name})", "")]
    for heading, rows in sections.items():
        ran = [row for row in rows if row.status == "ok"]
        failed = [f"* `{row.label}`: {row.status}. {row.reason}" for row in rows if row.status != "ok"]
        lines += [f"## {heading}", "", *([*table(columns, ran), ""] if ran else []), *failed, *([""] if failed else [])]
    lines += ["## Runs", ""]
    used = {row.run for rows in sections.values() for row in rows}
    for number, run in enumerate((run for run in read_runs(directory).values() if run["id"] in used), start=1):
        environment = run["environment"]
        device = ", ".join(_devices(environment))
        if driver := environment.get("gpu_driver"):
            device += f", driver {driver}"
        packages = ", ".join(f"{name} {version}" for name, version in environment["packages"].items() if version)
        what = f"commit {commit_in_words(environment['git'])}, {device}, Python {environment['python']}, {packages}"
        lines.append(f"{number}. `{run['command']}`: {what}")
    page = directory / f"{name}.md"
    write_text(page, "\n".join([*lines, ""]))
    return [page, *drawn]


def _devices(environment: Mapping[str, Any]) -> list[str]:
    return [gpu["name"] for gpu in environment["gpus"]] or [environment["cpu"]]


def devices_of(directory: Path) -> str:
    """The names of the GPUs, or of the CPUs, on which the rows of a directory were measured."""
    return ", ".join(
        dict.fromkeys(name for run in read_runs(directory).values() for name in _devices(run["environment"]))
    )


# -------------------------------------------------------------------------------------------------------- picture
Bars = Mapping[str, Mapping[str, float]]  # a row of the picture -> a series -> its value
_WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
BESIDE: dict[str, Any] = {"textcoords": "offset points", "va": "center", "size": 8.5, "bbox": _WHITE}  # a bar's value


def bars(panels: Mapping[str, tuple[str, Bars]], title: str, note: str = "", at: float | None = None) -> Any:
    """Horizontal bars with their values: a panel for each axis, a group for each row, a colour for each series.

    Args:
        panels: by the words of the axis: the format of its values, and the bars.
        at: where a vertical line stands.
    """
    rows = list(dict.fromkeys(row for _, values in panels.values() for row in values))
    series = list(dict.fromkeys(name for _, values in panels.values() for own in values.values() for name in own))
    found = looks(series) if all(loss_of(name) in LOSSES for name in series) else {}
    colours = {name: found[name].colour if found else COLOURS[i] for i, name in enumerate(series)}
    step = len(series) + 0.7
    size = (8, 1.5 + 0.21 * step * len(rows) + 0.2 * note.count("\n"))
    figure, [grid] = subplots(1, len(panels), figsize=size, sharey=True, squeeze=False)
    lines: dict[str, Any] = {}
    for axes, (axis, (form, values)) in zip(grid, panels.items(), strict=True):
        for number, row in enumerate(rows):
            for name, value in values.get(row, {}).items():
                y = number * step + series.index(name)
                lines[in_words(name) if found else name] = axes.barh(y, value, 0.9, color=colours[name])
                axes.annotate(f"{value:{form}}", (value, y), (3, 0), **BESIDE)
        if at is not None:
            axes.axvline(at, color=GREY, linewidth=0.8)
        axes.set(xlabel=axis, xlim=(0, 1.14 * max(value for own in values.values() for value in own.values())))
        axes.grid(visible=False, axis="y")
    grid[0].set_yticks([number * step + (len(series) - 1) / 2 for number in range(len(rows))], rows)
    grid[0].invert_yaxis()
    figure.suptitle(title)
    legend_below(figure, lines if len(series) > 1 else {}, note)
    return figure


def save_picture(figure: Any, path: Path) -> Path:
    """Write a PNG and, beside it, an SVG without dates or random names. Returns the PNG's path."""
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    with pyplot.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.stem}):
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    return save(figure, path)


def ratio_to(ms: Sequence[float], base_ms: Sequence[float], seed: int) -> tuple[float, float, float]:
    """The median of the rounds' ratios of two times, and the ends of its 95 % bootstrap interval.

    The intervals of ten rounds hold the truth 94 times in 100. `seed` is that of the resampling.
    """
    ratios = np.array(ms) / np.array(base_ms)
    samples = np.random.default_rng(seed).choice(ratios, size=(RESAMPLES, len(ratios)))
    low, high = np.quantile(np.median(samples, axis=1), (0.025, 0.975))
    return float(np.median(ratios)), float(low), float(high)
