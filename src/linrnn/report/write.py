"""Write a group's report. `make_report` finds the runs or the committed rows; `write_report` writes the files."""

import dataclasses
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from linrnn.config import load_config
from linrnn.config.overrides import written
from linrnn.config.schema import ReportConfig
from linrnn.core.errors import ConfigError
from linrnn.core.files import write_json, write_text
from linrnn.core.output import as_started
from linrnn.core.tables import Table
from linrnn.models.facts import model_in_words
from linrnn.report import plots, tables
from linrnn.report.metrics import LEAST_STEPS
from linrnn.report.page import Block, Commands, Pictures, Section, folded, to_html, to_markdown
from linrnn.report.plot_style import save
from linrnn.report.runs import (
    COMMITTED,
    MAX_BATCHES,
    REPORTS,
    SETTING,
    Run,
    backend_names,
    environment_of,
    find_group,
    origin_warning,
    read_committed,
    read_max_batches,
    write_committed,
)
from linrnn.report.targets import (
    INCONCLUSIVE,
    NOT_MEASURED,
    NOT_REACHED,
    REACHED,
    RULES,
    TARGETS,
    Target,
    Verdict,
    read_targets,
)
from linrnn.report.verdicts import baseline_of, verdicts
from linrnn.runs.figures import host_decides
from linrnn.runs.intervals import WITHIN
from linrnn.runs.origins import commit_in_words
from linrnn.runs.summary import MEAN_OF_LAST

MOST = 4  # values of a key that the second sentence names
FOLLOWING = {"data_fingerprint", "n_parameters", "steps", "horizon", "training"}  # unnamed: they follow
FREE_LOSS = "The last column is the most that a faster loss could give: a step as fast as if the loss took no time."
KEPT = f"Shares of softmax entries kept and of mass not kept are by token, means of the last {MEAN_OF_LAST} steps."
COLUMNS = [
    "n: pairs of runs behind a value. B: micro-batch size, in sequences. T: tokens of a sequence. V: vocabulary size.",
    f"Train loss: the mean of the last {MEAN_OF_LAST} steps. Nats: the unit of a loss with the natural logarithm.",
    "Tokens/s: over all steps after the warm-up. Times of step and loss: medians over these steps.",
    "MFU: model FLOPs utilisation, the share of the GPU's peak rate that the model's own FLOPs take.",
]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a report is made from, beside its runs.

    Attributes:
        targets: those of a sweep's file; empty: the report judges nothing.
        max_batches: as :mod:`linrnn.report.runs` reads them.
        source: what the runs were read from, and the command that writes the pages again; report.html shows both.
    """

    targets: Sequence[Target] = ()
    max_batches: Sequence[dict[str, Any]] = ()
    source: str = ""
    again: str = "scripts/report.py"


def make_report(config: ReportConfig) -> list[Path]:
    """The work of scripts/report.py. Prints what it reads; returns the paths that it wrote, report.md first.

    If the group has runs here, these are read. Otherwise its committed rows are read; they are not changed.

    Raises:
        ConfigError: neither a group nor a report is named, or both are; or a report of other runs would be lost.
        DataError: there are no runs to read.
    """
    if bool(config.group) == bool(config.summary):
        raise ConfigError(
            "group and summary are both named" if config.group else "neither group nor summary is named",
            "name a group as group=mve, or a report's directory as summary=results/summaries/mve",
        )
    results = Path(config.results_dir)
    if config.group:
        title, (runs, directory, committed) = config.group, find_group(results, config.group)
    else:
        directory = Path(str(config.summary))
        title, runs, committed = directory.resolve().name, read_committed(directory), True
    source = f"{len(runs)} {'committed runs' if committed else 'runs'} of {directory}"
    print(f"read {source}")
    if warning := origin_warning(runs):
        print(f"warning: {warning}")
    groups = dict.fromkeys([directory] if committed else [directory, results / config.max_batch_group])
    answers = [answer for group in groups for answer in read_max_batches(group)]
    inputs = Inputs(read_targets(directory), answers, source, _command(config))
    output = Path(config.output_dir or (directory if committed else results / REPORTS / title))
    if committed:
        return write_pages(runs, output, title, inputs)
    if not config.output_dir:
        _keep_other_runs(output, runs)
    paths = write_report(runs, output, title, inputs)
    if (directory / TARGETS).exists():
        write_text(output / TARGETS, (directory / TARGETS).read_text(encoding="utf-8"))
        paths.append(output / TARGETS)
    return paths


def _command(config: ReportConfig) -> str:
    """The command that makes this report again: the group or summary, and every other key that has no default value."""
    defaults, values = (dataclasses.asdict(one) for one in (load_config([], "report"), config))
    changed = [written(key, value) for key, value in values.items() if value != defaults[key]]
    return as_started(shlex.join(["python", "scripts/report.py", *changed]))


def _keep_other_runs(directory: Path, runs: Sequence[Run]) -> None:
    """Reject a report in the place of one whose runs are not all here: its rows would be lost."""
    if not (directory / COMMITTED).exists():
        return
    here = {(run.name, run.summary.get("started")) for run in runs}
    lost = [run.name for run in read_committed(directory) if (run.name, run.summary.get("started")) not in here]
    if lost:
        raise ConfigError(
            f"{directory} holds a report of {len(lost)} runs that are not here, such as {lost[0]}",
            "write this report elsewhere with output_dir=…, or give the runs another group",
        )


def write_report(runs: Sequence[Run], directory: Path, title: str, inputs: Inputs = Inputs()) -> list[Path]:
    """Write the pages of :func:`write_pages`, and the rows from which they can be written again.

    The rows are runs.json.xz (environments, summaries and every logged step), and the largest batches of the same
    models and sizes.
    """
    paths = [*write_pages(runs, directory, title, inputs), write_committed(runs, directory)]
    kinds = {(run.summary["model"], run.summary["size"]) for run in runs}
    if answers := [answer for answer in inputs.max_batches if (answer["model"], answer["size"]) in kinds]:
        write_json(directory / MAX_BATCHES, answers)
        paths.append(directory / MAX_BATCHES)
    return paths


def write_pages(runs: Sequence[Run], directory: Path, title: str, inputs: Inputs = Inputs()) -> list[Path]:
    """Write report.md, report.html and the plots that the runs allow. Returns the paths, report.md first."""
    directory.mkdir(parents=True, exist_ok=True)
    compared = verdicts(runs)
    pictures = [save(figure, directory / name) for name, figure in _figures(runs, compared, inputs.targets)]
    made = sections(runs, compared, inputs, pictures)
    source = f"Read from {inputs.source or f'{len(runs)} runs'}."
    write_text(directory / "report.md", to_markdown(title, made))
    write_text(directory / "report.html", to_html(title, made, source, inputs.again))
    return [directory / "report.md", directory / "report.html", *pictures]


# --------------------------------------------------------------------------------------------------------- sections
def sections(
    runs: Sequence[Run], compared: Sequence[Verdict], inputs: Inputs, pictures: Sequence[Path] = ()
) -> list[Section]:
    """A report's sections. What was asked and what was compared stand open, all else is folded."""
    first: list[Block] = [opening(runs)]
    if warning := origin_warning(runs):
        first.append(f"**Warning**: {warning}.")
    made = [Section("In short", [*first, Pictures(pictures[:1])])]
    judged = verdicts(runs, inputs.targets, inputs.max_batches) if inputs.targets else []
    if judged:
        found = Counter(v.verdict for v in judged)
        words = [f"{found[one]} {one}" for one in (REACHED, NOT_REACHED, INCONCLUSIVE, NOT_MEASURED) if found[one]]
        made.append(Section(f"Targets: {', '.join(words)}", [_with_values(judged)]))
        made.append(folded("How targets are judged", RULES))
    made.append(Section("Compared with the baseline", [_with_values(compared)]))
    made.append(Section("Plots", [Pictures(pictures[1:])]))
    missing = tables.of_verdicts([v for v in judged or compared if v.value is None])
    made.append(folded("What is not measured", missing))
    made.append(folded("Runs", tables.of_runs(runs), remarks(runs), [*COLUMNS, _ratios_of(runs)]))
    made.append(folded("What filters kept", tables.of_filters(runs), KEPT))
    made.append(folded("If the output layer took no time", tables.of_free_losses(runs), FREE_LOSS))
    commands = Commands([run.summary["command"] for run in runs])
    made.append(folded("How the runs were made", made_with(runs), "Commands:", commands))
    return [section for section in made if any(section.blocks[:1])]


def _with_values(found: Sequence[Verdict]) -> Table:
    return tables.of_verdicts([v for v in found if v.value is not None])


def opening(runs: Sequence[Run]) -> list[str]:
    """What ran, and the losses, the seeds and the keys of the setting in which the runs differ."""
    models = list(dict.fromkeys((run.summary["model"], run.summary["size"]) for run in runs))
    named = [f"{model_in_words(model)} ({size})" for model, size in models]
    of = " and ".join(named) if len(named) < 3 else f"{len(named)} models"
    devices = {str(run.summary["device"]) for run in runs if run.summary.get("device")}
    found = Counter(run.summary["status"].replace("_", " ") for run in runs)
    ended = ", ".join(f"{count} {status}" for status, count in found.items())
    began = [run for run in runs if run.summary["status"] != "unsupported"] or runs  # others have no setting
    values: dict[str, Sequence[Any]] = {
        "loss": backend_names([run.summary for run in runs]),
        "seed": [run.summary["seed"] for run in runs],
        **dict(zip(SETTING, zip(*(run.setting for run in began), strict=True), strict=True)),
    }
    differing = {key: list(dict.fromkeys(own)) for key, own in values.items() if key not in FOLLOWING}
    words = [
        f"{key} ({', '.join(map(str, own)) if len(own) <= MOST else f'{len(own)} values'})"
        for key, own in differing.items()
        if len(own) > 1
    ]
    where = f" on {' and '.join(sorted(devices))}" if devices else ""
    return [
        f"{len(runs)} run{'s' * (len(runs) > 1)} of {of}{where}: {ended}.",
        f"They differ in {'; '.join(words)}." if words else "There are no two losses, seeds or settings to compare.",
    ]


def _ratios_of(runs: Sequence[Run]) -> str:
    return f"Ratios are to `{baseline_of(runs)}` of the same setting and seed."


def remarks(runs: Sequence[Run]) -> list[str]:
    """Remarks on single runs: failures, mixtures of origins, CPU-bound steps, and GPUs that were shared."""
    found = []
    for run in runs:
        s, state = run.summary, run.summary.get("gpu_state") or {}
        if not run.finished:
            found.append(f"{run.name}: {s['status']}: {s.get('reason') or 'no reason was recorded'}")
        if run.mixture:
            words = f"its processes differ in {', '.join(run.mixture)}; no result counts it"
            found.append(f"**{run.name} is a mixture: {words}**")
        if host_decides(s):
            host, wall = f"{s['host_step_ms']:.2f} ms", f"{s['wall_step_ms']:.2f} ms"
            found.append(f"**{run.name} is CPU-bound**: {host} of a step's {wall} by wall clock are not the device's")
        if state.get("other_processes") and not run.gpu_shared:
            found.append(f"**{run.name}: {state['other_processes']} other processes computed on the GPU**")
    if count := sum(run.gpu_shared for run in runs):
        which = "every run" if count == len(runs) else f"{count} of {len(runs)} runs"
        found.append(f"{which} shared its GPU with other runs (`share_gpus=true`): its times are not measured")
    return found


def made_with(runs: Sequence[Run]) -> list[str]:
    """Device, commit and versions of the runs."""
    environment = environment_of(runs)
    if not environment:
        return ["device, commit and versions are not recorded, because no run started"]
    gpus = ", ".join(gpu["name"] for gpu in environment.get("gpus", [])) or environment.get("cpu")
    told = {
        "device": gpus,
        "driver": environment.get("gpu_driver"),
        "CUDA allocator": environment.get("cuda_allocator"),
        "commit": commit_in_words(environment.get("git")),
        "Python": environment.get("python"),
        **environment.get("packages", {}),
    }
    return [", ".join(f"{name} {value}" for name, value in told.items() if value)]


# ------------------------------------------------------------------------------------------------------------ plots
def _figures(runs: Sequence[Run], compared: Sequence[Verdict], targets: Sequence[Target]) -> list[tuple[str, Any]]:
    """The plots that have data to show, by file name. The first stands at the top of the report."""
    figures: list[tuple[str, Any]] = []
    if (first := plots.overview(compared, targets)) is not None:
        figures.append(("overview.png", first))
    if any(run.losses and (run.summary["steps"] or 0) >= LEAST_STEPS for run in runs):
        margins = [target.bound for target in targets if target.rule == WITHIN and target.metric.name.endswith("nats")]
        figures.append(("loss_curves.png", plots.loss_curves(runs, margin=min(margins, default=None))))
    along = [key for key in plots.AXES if plots.varies(runs, key)]
    if not {"seq_len", "vocab_size"} & {*along}:  # one problem
        measured = plots.measured(runs)
        if len({run.summary["loss"] for run in measured}) > 1:
            figures.append(("pareto.png", plots.pareto(measured)))
        if on_gpu := [run for run in measured if run.on_gpu]:
            figures.append(("memory.png", plots.memory_parts(on_gpu)))
    return figures + [(f"speed_by_{key}.png", plots.scaling(runs, key)) for key in along]
