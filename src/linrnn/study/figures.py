"""Draw the pictures of README and docs from committed rows into results/figures/."""

from collections.abc import Callable
from dataclasses import replace
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
from linrnn.runs.step_parts import parts_of_step
from linrnn.study.benchmarks.filter_speed import filter_speeds
from linrnn.study.benchmarks.largest_batch import batch_verdicts, searches_on_the_h100
from linrnn.study.benchmarks.step_speed import step_peaks, step_speeds
from linrnn.study.criteria import FINAL_LOSS, MVE_LOSS, VALID_LOSS, Criterion, Verdict
from linrnn.study.plots import Row as ForestRow
from linrnn.study.plots import (
    batch_rows,
    changed_losses,
    difference_rows,
    distances,
    distances_from_compiled,
    filter_speed_up,
    forest,
    largest_batches,
    loss_rows,
    memory_parts,
    overview,
    peak_rows,
    speed_rows,
    step_parts,
    study_rows,
)
from linrnn.study.plots.forest import OF_SPEED
from linrnn.study.plots.select import named
from linrnn.study.report.settings import changes_of_loss
from linrnn.study.results import read_committed
from linrnn.study.verdicts import CONTROL, verdicts

# Groups below results/summaries for the study's picture: the MVE over twelve seeds, and the models at 1.3B.
SEEDS = "same_loss"
STUDY = (
    SEEDS,
    "phase2_expandable",
    "phase2_expandable_gla_full",
    "phase2_expandable_transformer",
    "phase2_models",
)
NO_CHECKPOINTING, CHECKPOINTING = "phase2_expandable", "phase2_expandable_gla_full"
FILTERS = {  # of the group "apple": the words for a loss, and what its colour stands for
    "cce_filter filter_unbiased=False": ("our kernels drop small entries of dE", "paper"),
    "cce_filter filter_unbiased=True": ("our kernels estimate these entries from a sample", "cce_filter"),
    "cce_apple": ("Apple's kernels drop tiles whose entries are all small", "cce_apple"),
    CONTROL: ("control: last bits moved (compiled_nudged)", CONTROL),
}
_10M = {
    "cce_filter filter_unbiased=True": "cce_filter (ours, samples dE)",
    "cce_filter filter_unbiased=False": "cce_filter (ours, drops small entries of dE)",
    "cce_apple": "cce_apple (Apple's, drops tiles of dE)",
    "cce_kahan": "cce_kahan (ours, exact)",
    CONTROL: f"control ({CONTROL})",
}
# The study's panels of filters and of 448 M parameters: the question, its criterion, and words for losses of groups.
PANELS: tuple[tuple[str, Criterion, dict[str, dict[str, str]]], ...] = (
    (
        "Filters at 10 M, final loss minus compiled's",
        MVE_LOSS,
        {
            "pretrain_filter_mve": {
                "cce_filter": "cce_filter (ours, samples dE and dC), 512 steps",
                CONTROL: f"control ({CONTROL}), 512 steps",
            },
            "apple": _10M,
        },
    ),
    ("Filters at 10 M, test loss minus compiled's", VALID_LOSS, {"apple_test": _10M}),
    (
        "GLA at 448 M, final loss minus compiled's",
        FINAL_LOSS,
        {
            "pretrain_filter": {
                "cce_kahan": "cce_kahan (ours, exact)",
                "cce_filter": "cce_filter (ours, samples)",
                CONTROL: f"control ({CONTROL})",
            }
        },
    ),
)
FINE_TUNED_LOSS = "Fine-tuned at 448 M, minus compiled's"
FINE_TUNED = {
    name: f"finetune_filter_{name.lower().replace(' ', '_')}"
    for name in ("GLA", "Transformer", "KDA", "Gated DeltaNet")
}
FINE_TUNING = {  # losses of these groups: the words for a loss, and the label whose look it gets
    "cce_filter": ("cce_filter: samples", "cce_filter"),
    "cce_kahan": ("cce_kahan: exact", "cce_kahan"),
    CONTROL: ("control: last bits moved", CONTROL),
    "cce_apple": ("Apple's cce: drops tiles of dE and dC", "cce_apple"),
    "cce_apple variant=cce": ("Apple's cce: drops tiles of dE and dC", "cce_apple"),
    "cce_apple variant=cce_kahan_full_c": ("Apple's cce_kahan_full_c: of dE alone", "cce_apple"),
    "cce_apple variant=cce_exact": ("Apple's cce_exact: drops nothing", "cce_apple"),
}
BREAKDOWNS = {  # the drawn breakdowns: a model in words, and its file below results/summaries/breakdown
    "GLA": "gla-1b3-cce_kahan-steps15-t2048-s0",
    "GLA, shared projection": "gla-1b3-cce_kahan-r1024-steps15-t2048-s0",
    "Gated DeltaNet": "gated_deltanet-1b3-cce_kahan-steps15-t2048-s0",
    "KDA": "kda-1b3-cce_kahan-steps15-t2048-s0",
    "Transformer": "transformer-1b3-cce_kahan-steps15-t2048-s0",
    "Transformer, shared projection": "transformer-1b3-cce_kahan-r1024-steps15-t2048-s0",
}
HERO = ("llama_1b3", "gemma2_2b")  # shapes of the loss benchmark
DEVICE = "nvidia_h100_80gb_hbm3"
# Folders of whole steps. Those of one tuple name their lines together: they differ in the vocabulary.
STEPS = ("", "_262144"), ("_kda",), ("_gated_deltanet",), ("_350m_graphs",), ("_mve_graphs",)
AT_LARGEST = ("_largest",)  # each loss with its own largest batch
GPUS = {"H100": DEVICE, "H200": "nvidia_h200"}  # with a grid


def draw(results: Path, output: Path) -> list[Path]:
    """Draw every picture from the rows below `results`. Return the paths of the PNGs.

    Raises:
        DataError: rows that a picture needs are missing.
    """
    pictures: dict[str, Callable[[Path], Any]] = {
        "hero": loss_layer,
        "study_at_a_glance": at_a_glance,
        "study": study,
        "study_speed": study_speed,
        "peak_memory": peak_memory,
        "largest_batch": largest_batch,
        "filters": filters,
        "filter_speed": filter_speed,
        "fine_tuning": fine_tuning,
        "follow_up_losses": follow_up_losses,
        "step_parts": parts_of_steps,
    }
    return [save(picture(results), output / f"{name}.png") for name, picture in pictures.items()]


def loss_layer(results: Path) -> Any:
    """The loss layer's time against its memory for every loss, on two shapes."""
    directory = results / "bench_loss" / DEVICE
    measured = [row for path in sorted(directory.glob("*.json")) for row in read_rows(path) if row.set == "shapes"]
    rows = rows_for("shapes", measured).values()  # of one process: other sets hold other backends
    own = [row for row in rows if row.shape in HERO and row.logits == "peaked" and row.gradients == "bf16"]
    if {row.shape for row in own} != set(HERO):
        raise DataError(f"{directory} lacks rows of {' or '.join(HERO)}", "python benchmarks/loss.py set=shapes")
    return hero(own, HERO, _device(directory, own))


def study(results: Path) -> Any:
    """The study's questions and its measurements, for our exact loss; of training losses, for all losses."""
    return forest(study_points(results))


def at_a_glance(results: Path) -> Any:
    """The points of :func:`study` without their names, a strip for each question."""
    return overview(study_points(results))


def study_points(results: Path) -> list[ForestRow]:
    """The study's verdicts, as the forest plot and the overview draw them."""
    kept: dict[tuple[Any, ...], ForestRow] = {}  # if a model was measured twice in a setting, the later row is kept
    losses = []
    for group in STUDY:
        directory = results / "summaries" / group
        runs = read_committed(directory)
        found = verdicts(runs)
        kept.update({(row.verdict.criterion, row.name, row.verdict.against): row for row in study_rows(runs, found)})
        losses += loss_rows(found) if group == SEEDS else []
    *alike, _ = steps = _steps(results)
    for row in peak_rows([verdict for rows in alike for verdict in step_peaks(rows)]):
        key = row.verdict.criterion, row.name, row.verdict.against
        # A share of the baseline's peak, as it was.
        kept[key] = replace(row, attainable=kept[key].attainable if key in kept else None)
    batches = batch_rows(batch_verdicts(searches_on_the_h100(results)))
    speeds = [one for rows in steps for one in step_speeds(rows)]
    return [*speed_rows(speeds), *batches, *kept.values(), *losses, *_filter_rows(results)]


def study_speed(results: Path) -> Any:
    """The panels of :func:`study` on the speed of whole steps, for the page that asks no more."""
    speeds = [one for rows in _steps(results) for one in step_speeds(rows)]
    return forest(speed_rows(speeds), "What the study asked of speed, and what was measured", OF_SPEED)


def _steps(results: Path) -> list[list[StepRow]]:
    """The rows of whole steps, those with each loss's largest batch last."""
    return [
        [row for name in names for row in read_rows_of_steps(results / "bench_steps" / f"{DEVICE}{name}")]
        for names in (*STEPS, AT_LARGEST)
    ]


def _filter_rows(results: Path) -> list[ForestRow]:
    """The study's rows on filters, and on losses at 448 M parameters."""

    def found(group: str) -> list[Verdict]:
        return verdicts(read_committed(results / "summaries" / group))

    rows: list[ForestRow] = []
    for panel, criterion, groups in PANELS:
        for group, words in groups.items():
            rows += difference_rows(found(group), criterion, panel, words)
    for model, group in FINE_TUNED.items():
        words = {"cce_filter": f"{model}, cce_filter (ours, samples)", CONTROL: f"{model}, control"}
        rows += difference_rows(found(group), FINAL_LOSS, FINE_TUNED_LOSS, words)
    return rows


def peak_memory(results: Path) -> Any:
    """Peak memory by component for GLA 1b3, without and with activation checkpointing."""
    runs = []
    for group, kind in ((NO_CHECKPOINTING, "none"), (CHECKPOINTING, "full")):
        own = read_committed(results / "summaries" / group)
        runs += [run for run in own if run.summary["activation_checkpointing"] == kind]
    return memory_parts(runs)


def largest_batch(results: Path) -> Any:
    """The largest batches on an H100, from searches with an exact result."""
    answers = [search.answer() for search in searches_on_the_h100(results).values() if search.exact and search.batch]
    return largest_batches(answers, "How many sequences of a 1.3B model fit on an H100 of 80 GB?")


def filters(results: Path) -> Any:
    """Pretraining with filters that drop entries or tiles, or sample entries: distances from compiled's losses."""
    runs = named(read_committed(results / "summaries" / "apple"))
    bases = {run.summary["seed"]: run for run, name in runs if name == "compiled"}
    found = looks([look for _, look in FILTERS.values()])
    curves = {
        words: (found[look], [(run, bases[run.summary["seed"]]) for run, name in runs if name == loss])
        for loss, (words, look) in FILTERS.items()
    }
    texts = "Training: a slice of Wikipedia, read at most once", "Validation: WikiText-103"
    return distances(curves, texts, "GLA of 10 M parameters from random weights, with filters of three rules")


def filter_speed(results: Path) -> Any:
    """The speed-up of the filter's gradients on the grid's shapes that it filters, on each GPU."""
    return filter_speed_up({gpu: list(filter_speeds(results / "bench_loss" / name)) for gpu, name in GPUS.items()})


def fine_tuning(results: Path) -> Any:
    """How far fine-tuning with filters and with exact losses ends from torch.compile's, for each model of 350M."""
    found = {name: verdicts(read_committed(results / "summaries" / group)) for name, group in FINE_TUNED.items()}
    return distances_from_compiled(found, FINE_TUNING)


def follow_up_losses(results: Path) -> Any:
    """What float8 blocks and shared projections change in the training loss, at three sizes."""
    groups = {"10 M": "follow_ups", "448 M": "follow_ups_350m", "1.75 B": "follow_ups_1b3"}
    return changed_losses(
        {size: changes_of_loss(read_committed(results / "summaries" / group)) for size, group in groups.items()}
    )


def parts_of_steps(results: Path) -> Any:
    """What a step's time divides into once the loss layer is cheap, for each model of 1.3B."""
    directory = results / "summaries" / "breakdown"
    found = {
        words: parts_of_step(read_object(directory / f"{name}.json", ("run", "time")))
        for words, name in BREAKDOWNS.items()
    }
    return step_parts(found, "Where a step of a 1.3B model goes, 8 x 2,048 tokens on an H100, with cce_kahan")


def _device(directory: Path, rows: list[Row]) -> str:
    """The GPU's name, from runs.jsonl."""
    origins = {row.run for row in rows}
    runs = [run for name, run in read_runs(directory).items() if name in origins]
    names = {gpu["name"] for run in runs for gpu in run["environment"]["gpus"]}
    return ", ".join(sorted(names))
