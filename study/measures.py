"""The figures of claims.yaml, each from the committed rows that its claim names."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from benchmarks.loss_rows import read_rows as read_rows_of_losses
from benchmarks.steps_rows import AGAIN, BASELINE, EAGER, Row, read_rows
from linrnn.core.errors import ConfigError
from linrnn.core.files import read_object
from linrnn.report.plot_style import in_words, loss_of
from linrnn.report.runs import read_committed
from linrnn.report.targets import Verdict
from linrnn.report.verdicts import EXACT
from study.criteria import CONTROL, CRITERIA, FOLDERS, verdicts
from study.searches import Key, Search, batch_ratios, searches_on_the_h100
from study.step_parts import parts_of_step
from study.step_speed import filter_speeds, speed_of

RESULTS = Path(__file__).resolve().parents[1] / "results"
CLAIMS: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "claims.yaml").read_text())
GIB = 2**30
NAMES = {  # of losses, for a reader
    EAGER: "eager",
    BASELINE: "torch.compile",
    AGAIN: "torch.compile, built twice",
    CONTROL: "noise-floor run",
    "liger": "Liger",
    "fla": "FLA's fused loss",
    "fla fuse_linear=false": "FLA's default loss",
}
OURS = (EXACT, "cce_filter")
Measured = Iterable[tuple[float, int]]  # values, and how many rounds, pairs or seeds are behind each
Where = dict[str, Any]
UNITS: dict[str, Callable[[float], float]] = {
    "percent": lambda value: 100 * value,
    "gain": lambda value: 100 * (value - 1),  # of a ratio, in percent
}


MEASURES: dict[str, Callable[..., Measured]] = {}
committed = cache(read_committed)  # pages ask for the same rows many times


@cache
def searches() -> dict[Key, Search]:
    return searches_on_the_h100(RESULTS)


def rows_in(file: str) -> list[dict[str, Any]]:
    """The rows of a file below results/, a JSON object a line."""
    return [json.loads(line) for line in (RESULTS / file).read_text().splitlines()]


@cache
def verdicts_of(directory: Path) -> list[Verdict]:
    return verdicts(committed(directory))


def measure(function: Callable[..., Measured]) -> Callable[..., Measured]:
    """claims.yaml names a measure by its function."""
    MEASURES[function.__name__] = function
    return function


def told(loss: str) -> str:
    """A loss in a reader's words."""
    return NAMES.get(loss) or (f"{loss_of(loss)} (ours)" if loss_of(loss) in OURS else in_words(loss))


# ---------------------------------------------------------------------------------------------- measures of claims.yaml
@measure
def loss_layer(folder: str, where: Where, field: str, of: str | None = None) -> Measured:
    """A field of the rows of benchmarks/loss.py; `of`: divided by that backend's on the same problem."""
    rows = read_rows_of_losses(RESULTS / folder)
    bases = {row.problem: getattr(row, field) for row in rows if row.set == where["set"] and row.backend == of}
    own = [(row, getattr(row, field)) for row in rows if _has(vars(row), where)]
    return [(value / (bases[row.problem] if of else 1), row.rounds) for row, value in own if value is not None]


@measure
def field_of_lines(file: str, where: Where, field: str) -> Measured:
    """A field of a file of rows, a JSON object a line; the first line is the command's."""
    return [(row[field], row["batches"]) for row in rows_in(file)[1:] if _has(row, where)]


def _has(row: dict[str, Any], where: Where) -> bool:
    return all(row[key] == value for key, value in where.items())


@measure
def beside_own(folder: str, where: Where, field: str) -> Measured:
    """A figure of models with their library's own loss, transformers' or TRL's, divided by the same with ours."""
    found = {(row["model"], row["loss"]): row for row in rows_in(f"{folder}/rows.jsonl")}
    own = [(row, found[model, EXACT]) for (model, loss), row in found.items() if loss == where["loss"]]
    return [(row[field] / ours[field], row["rounds"]) for row, ours in own if row["model"] in where["models"]]


@measure
def step_speed(folders: str | list[str], where: Where, against: str) -> Measured:
    """Tokens/s of a loss as a multiple of another's in the same process."""
    rows = list(_steps(folders))
    bases = {(row.run, row.line): row for row in rows if row.loss == against}
    found = (speed_of(row, bases.get((row.run, row.line))) for row in rows if _holds(row, where))
    return [(speed.value, speed.n) for speed in found if speed is not None]


@measure
def step(folders: str | list[str], where: Where, field: str, less: str | None = None) -> Measured:
    """A field of steps' rows; `less`: that of this loss, where it was measured, minus the row's own."""
    rows = list(_steps(folders))
    bases = {row.line: getattr(row, field) for row in rows if row.loss == less}
    found = [(getattr(row, field), row) for row in rows if _holds(row, where) and (not less or row.line in bases)]
    return [(bases[row.line] - value if less else value, row.rounds) for value, row in found if value is not None]


def _steps(folders: str | list[str]) -> Iterator[Row]:
    for folder in [folders] if isinstance(folders, str) else folders:
        yield from read_rows(RESULTS / folder)


def _holds(row: Row, where: Where) -> bool:
    """`with` and `without` name a part of the row's line, other keys its fields."""
    own = {key: value for key, value in where.items() if key not in ("with", "without")}
    without = "without" in where and where["without"] in row.line
    within = where.get("with", "") in row.line and not without
    return within and _has(vars(row), own)


@measure
def largest_batch(_: str, where: Where, against: str) -> Measured:
    """Sequences that fit with our exact loss, as a multiple of another's."""
    about, model = (where["checkpointing"], against), where.get("model")
    return [
        (ratio, 1) for key, ratio in batch_ratios(searches()).items() if key[1:] == about and model in (None, key[0])
    ]


@measure
def sequences(_: str, where: Where, loss: str) -> Measured:
    """Sequences that fit with a loss."""
    return [(searches()[where["model"], where["checkpointing"], loss].batch, 1)]


@measure
def verdict(group: str, where: Where, criterion: str, against: str) -> Measured:
    """The value and the 90 % interval of one verdict on a group of runs: min and max are the interval."""
    about = CRITERIA[criterion], where["loss"], against
    [found] = [one for one in verdicts_of(RESULTS / group) if (one.target, one.backend, one.against) == about]
    return [(value, found.n) for value in (found.value, found.low, found.high) if value is not None]


@measure
def apart(groups: list[str], where: Where, criterion: str) -> Measured:
    """The values of one kind of verdict in several groups, against torch.compile."""
    found = [one for group in groups for one in verdicts_of(RESULTS / group) if one.backend in where["losses"]]
    about = CRITERIA[criterion], BASELINE
    return [(one.value, one.n) for one in found if (one.target, one.against) == about and one.value is not None]


@measure
def difference(group: str, where: Where, field: str) -> Measured:
    """A field of runs minus that of torch.compile's run of the same seed."""
    return [(value, 1) for value in beside_compiled(RESULTS / group, field)[where["loss"]].values()]


def beside_compiled(directory: Path, field: str) -> dict[str, dict[int, float]]:
    """A field of a group's finished runs minus that of torch.compile's of the same seed, by loss and seed."""
    runs = [run.summary for run in committed(directory) if run.finished]
    bases = {run["seed"]: run[field] for run in runs if run["loss"] == BASELINE}
    found: dict[str, dict[int, float]] = {}
    for run in (run for run in runs if run["loss"] != BASELINE):
        found.setdefault(run["loss"], {})[run["seed"]] = run[field] - bases[run["seed"]]
    return found


@measure
def part(folder: str, _: Where, name: str) -> Measured:
    """A part's share of a step's time, for each model of 1.3B."""
    for file in FOLDERS["breakdowns"].values():
        parts = parts_of_step(read_object(RESULTS / folder / f"{file}.json", ("run", "time")))
        yield sum(time for own, time in parts.items() if own in name.split()) / sum(parts.values()), 9


@measure
def memory(_: str, where: Where, kind: str) -> Measured:
    """What the output layer adds to a step: in GiB, of its peak, and how much lower the peak is without it."""
    for own, peak, without in memory_of_steps().values():
        yield {"gib": own, "share": own / peak, "lower": 1 - without / peak}[kind], 1


def memory_of_steps() -> dict[str, list[float]]:
    """For each model of 1.3B, in GiB: what the output layer adds to a step, the peak, and the peak without it."""
    names, found = ("loss_forward", "peak", "peak/without_loss_layer"), {}
    for words, file in FOLDERS["breakdowns"].items():
        memory = read_object(RESULTS / "summaries/breakdown" / f"{file}.json", ("memory",))["memory"]
        found[words] = [memory[name]["measured"] / GIB for name in names]
    return found


@measure
def filter_speed(folders: list[str], _: Where, against: str) -> Measured:
    """How many times as fast the filter's backward pass is on the shapes that it filters."""
    found = [verdict for folder in folders for verdict, _ in filter_speeds(RESULTS / folder)]
    return [(one.value, one.n) for one in found if one.against == against and one.value]


@measure
def target(_: str, where: Where, name: str) -> Measured:
    """The bound of a target of criteria.yaml."""
    return [(CRITERIA[name].bound, 1)]


@measure
def hours(folder: str, where: Where, dollars: float) -> Measured:
    """GPU-hours of committed runs, or their price."""
    found = _summaries(folder)
    return [(dollars * sum(run["wall_seconds"] or 0 for run in found) / 3600, len(found))]


@measure
def runs(folder: str, where: Where, _: str) -> Measured:
    """How many runs are committed."""
    return [(len(_summaries(folder)), 1)]


def _summaries(folder: str) -> list[dict[str, Any]]:
    paths = sorted((RESULTS / folder).glob("*/runs.json.xz"))
    return [run.summary for path in paths for run in committed(path.parent)]


def claim(name: str) -> dict[str, str]:
    """A claim's figure as it is shown, and n.

    Raises:
        ConfigError: no row answers it.
    """
    said = CLAIMS[name]
    (name_of, first), *options = said["measure"].items()
    found = list(MEASURES[name_of](said["rows"], said.get("where", {}), first, **dict(options)))
    if not found:
        raise ConfigError(f"study/claims.yaml: no row answers {name}", "correct its rows or its where")
    unit = UNITS[said["as"]] if "as" in said else float
    values, counts = [unit(value) for value, _ in found], sorted({n for _, n in found})
    figures = {
        "value": values[0], "median": median(values), "min": min(values), "max": max(values),
        "size": max(map(abs, values)), "count": len(values),
    }  # fmt: skip
    return {"text": said["show"].format(**figures), "n": span_of(counts)}


def span_of(counts: Sequence[int]) -> str:
    """5, or 5 to 8."""
    return str(counts[0]) if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"
