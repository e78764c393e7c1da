"""Draw the pictures of README and docs from committed rows into results/figures/: `python -m study.pictures`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import read_runs
from benchmarks.loss_pictures import hero
from benchmarks.loss_rows import Row, read_rows, rows_for
from benchmarks.steps_rows import Row as StepRow
from benchmarks.steps_rows import read_rows as read_rows_of_steps
from linrnn.core.errors import DataError
from linrnn.core.files import read_object
from linrnn.core.plot_style import looks, save
from linrnn.report.plots import memory_parts
from linrnn.report.plots.select import named
from linrnn.report.runs import read_committed
from linrnn.report.targets import Verdict
from linrnn.report.verdicts import CONTROL
from linrnn.runs.step_parts import parts_of_step
from study.changes import changes_of_loss
from study.changes_picture import changed_losses
from study.criteria import CRITERIA, FINAL_LOSS, FOLDERS, verdicts
from study.distances import distances
from study.filter_speed import filter_speeds
from study.filter_speed_picture import filter_speed_up
from study.fine_tuning import distances_from_compiled
from study.gradient_noise import draw as draw_noise
from study.largest_batches import largest_batches
from study.overview import overview
from study.points import Row as ForestRow
from study.points import batch_rows, difference_rows, loss_rows, peak_rows, speed_rows, study_rows
from study.searches import batch_verdicts, searches_on_the_h100
from study.step_parts import step_parts
from study.step_speed import step_peaks, step_speeds

GPUS, FOLLOW_UPS, HERO = (FOLDERS[key] for key in ("gpus", "follow_ups", "hero"))


def draw(results: Path, output: Path) -> list[Path]:
    """Draw every picture from the rows below `results`. Return the paths of the PNGs.

    Raises:
        DataError: rows that a picture needs are missing.
    """
    pictures: dict[str, Callable[[Path], Any]] = {
        "hero": loss_layer,
        "study_at_a_glance": at_a_glance,
        "peak_memory": peak_memory,
        "largest_batch": largest_batch,
        "filters": filters,
        "filter_speed": filter_speed,
        "fine_tuning": fine_tuning,
        "follow_up_losses": follow_up_losses,
        "step_parts": parts_of_steps,
        "gradient_noise": gradient_noise,
    }
    return [save(picture(results), output / f"{name}.png") for name, picture in pictures.items()]


def loss_layer(results: Path) -> Any:
    """The loss layer's time against its memory for every loss, on two shapes."""
    directory = results / "bench_loss" / FOLDERS["device"]
    measured = [row for path in sorted(directory.glob("*.json")) for row in read_rows(path) if row.set == "shapes"]
    rows = rows_for("shapes", measured).values()  # of one process: other sets hold other backends
    own = [row for row in rows if row.shape in HERO and row.logits == "peaked" and row.gradients == "bf16"]
    if {row.shape for row in own} != set(HERO):
        raise DataError(f"{directory} lacks rows of {' or '.join(HERO)}", "python benchmarks/loss.py set=shapes")
    return hero(own, HERO, _device(directory, own))


def at_a_glance(results: Path) -> Any:
    """Every verdict of the study, a strip for each question."""
    return overview(study_points(results))


def study_points(results: Path) -> list[ForestRow]:
    """The study's verdicts, as the overview draws them."""
    kept: dict[tuple[Any, ...], ForestRow] = {}  # if a model was measured twice in a setting, the later row is kept
    losses = []
    for group in FOLDERS["groups"]:
        directory = results / "summaries" / group
        runs = read_committed(directory)
        found = verdicts(runs)
        kept.update({(row.verdict.target, row.name, row.verdict.against): row for row in study_rows(runs, found)})
        losses += loss_rows(found) if group == FOLDERS["seeds"] else []
    *alike, _ = steps = _steps(results)
    for row in peak_rows([verdict for rows in alike for verdict in step_peaks(rows)]):
        kept[row.verdict.target, row.name, row.verdict.against] = row
    batches = batch_rows(batch_verdicts(searches_on_the_h100(results)))
    speeds = [one for rows in steps for one in step_speeds(rows)]
    return [*speed_rows(speeds), *batches, *kept.values(), *losses, *_filter_rows(results)]


def _steps(results: Path) -> list[list[StepRow]]:
    """The rows of whole steps, those with each loss's largest batch last."""
    return [
        [row for name in names for row in read_rows_of_steps(results / "bench_steps" / f"{FOLDERS['device']}{name}")]
        for names in (*FOLDERS["steps"], FOLDERS["steps_at_largest"])
    ]


def _filter_rows(results: Path) -> list[ForestRow]:
    """The study's rows on filters, and on losses at 448 M parameters."""

    def found(group: str) -> list[Verdict]:
        return verdicts(read_committed(results / "summaries" / group))

    rows: list[ForestRow] = []
    for panel in FOLDERS["panels"]:
        for group, words in panel["groups"].items():
            rows += difference_rows(found(group), CRITERIA[panel["criterion"]], panel["title"], words)
    for model, group in FOLDERS["fine_tuning"]["groups"].items():
        words = {"cce_filter": f"{model}, cce_filter (ours, samples)", CONTROL: f"{model}, control"}
        rows += difference_rows(found(group), FINAL_LOSS, "Fine-tuned at 448 M, minus compiled's", words)
    return rows


def peak_memory(results: Path) -> Any:
    """Peak memory by component for GLA 1b3, without and with activation checkpointing."""
    runs = []
    for kind, group in FOLDERS["peak_memory"].items():
        own = read_committed(results / "summaries" / group)
        runs += [run for run in own if run.summary["activation_checkpointing"] == kind]
    return memory_parts(runs)


def largest_batch(results: Path) -> Any:
    """The largest batches on an H100, from searches with an exact result."""
    answers = [search.answer() for search in searches_on_the_h100(results).values() if search.exact and search.batch]
    return largest_batches(answers, "How many sequences of a 1.3B model fit on an H100 of 80 GB?")


def filters(results: Path) -> Any:
    """Pretraining with filters that drop entries or tiles, or sample entries: distances from compiled's losses."""
    words_of = FOLDERS["filters"]["losses"]
    runs = named(read_committed(results / "summaries" / FOLDERS["filters"]["group"]))
    bases = {run.summary["seed"]: run for run, name in runs if name == "compiled"}
    found = looks([look for _, look in words_of.values()])
    curves = {
        words: (found[look], [(run, bases[run.summary["seed"]]) for run, name in runs if name == loss])
        for loss, (words, look) in words_of.items()
    }
    texts = "Training: a slice of Wikipedia, read at most once", "Validation: WikiText-103"
    return distances(curves, texts, "GLA of 10 M parameters from random weights, with filters of three rules")


def filter_speed(results: Path) -> Any:
    """The speed-up of the filter's gradients on the grid's shapes that it filters, on each GPU."""
    return filter_speed_up(
        {gpu: list(filter_speeds(results / "bench_loss" / name)) for gpu, name in FOLDERS["gpus"].items()}
    )


def fine_tuning(results: Path) -> Any:
    """How far fine-tuning with filters and with exact losses ends from torch.compile's, for each model of 350M."""
    groups = FOLDERS["fine_tuning"]["groups"].items()
    found = {name: verdicts(read_committed(results / "summaries" / group)) for name, group in groups}
    return distances_from_compiled(found, FOLDERS["fine_tuning"]["losses"])


def follow_up_losses(results: Path) -> Any:
    """What float8 blocks and shared projections change in the training loss, at three sizes."""
    return changed_losses(
        {size: changes_of_loss(read_committed(results / "summaries" / group)) for size, group in FOLLOW_UPS.items()}
    )


def parts_of_steps(results: Path) -> Any:
    """What a step's time divides into once the loss layer is cheap, for each model of 1.3B."""
    directory = results / "summaries" / "breakdown"
    found = {
        words: parts_of_step(read_object(directory / f"{name}.json", ("run", "time")))
        for words, name in FOLDERS["breakdowns"].items()
    }
    return step_parts(found, "Where a step of a 1.3B model goes, 8 x 2,048 tokens on an H100, with cce_kahan")


def gradient_noise(results: Path) -> Any:
    """How much noise the sampled gradient adds to a batch's own."""
    _, *lines = (results / "gradient_noise" / f"{GPUS['H200']}.jsonl").read_text().splitlines()
    return draw_noise([json.loads(line) for line in lines])


def _device(directory: Path, rows: list[Row]) -> str:
    """The GPU's name, from runs.jsonl."""
    origins = {row.run for row in rows}
    runs = [run for name, run in read_runs(directory).items() if name in origins]
    names = {gpu["name"] for run in runs for gpu in run["environment"]["gpus"]}
    return ", ".join(sorted(names))


if __name__ == "__main__":
    ROOT = Path(__file__).resolve().parents[1]
    for path in draw(ROOT / "results", ROOT / "results" / "figures"):
        print(f"wrote {path.relative_to(ROOT)}")
