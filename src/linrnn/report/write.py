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
from linrnn.report import plots, sentences, tables
from linrnn.report.metrics import LEAST_STEPS
from linrnn.report.page import Block, Commands, Pictures, Section, folded, to_html, to_markdown
from linrnn.report.plot_style import save
from linrnn.report.runs import (
    COMMITTED,
    MAX_BATCHES,
    REPORTS,
    Run,
    apart,
    find_group,
    origin_warning,
    read_committed,
    read_list,
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
from linrnn.report.verdicts import CONTROL, verdicts
from linrnn.runs.intervals import WITHIN


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a report is made from, beside its runs.

    Attributes:
        targets: those of a sweep's file; empty: the report judges nothing.
        max_batches: as :mod:`linrnn.report.runs` reads them. Those of another origin are left out, and the report says
            so.
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
    if config.origins == "apart":
        runs = apart(runs)
    if warning := origin_warning(runs):
        print(f"warning: {warning}")
    inputs = Inputs(read_targets(directory), source=source, again=_command(config))
    if committed:
        output = Path(config.output_dir) if config.output_dir else directory
        inputs = dataclasses.replace(inputs, max_batches=read_list(directory / MAX_BATCHES))
        return write_pages(runs, output, title, inputs)
    output = Path(config.output_dir) if config.output_dir else results / REPORTS / title
    if not config.output_dir:
        _keep_other_runs(output, runs)
    groups = dict.fromkeys((directory, results / config.max_batch_group))
    answers = [answer for group in groups for answer in read_max_batches(group)]
    paths = write_report(runs, output, title, dataclasses.replace(inputs, max_batches=answers))
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
    paths = write_pages(runs, directory, title, inputs)
    paths.append(write_committed(runs, directory))
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
    """A report's sections: three sentences and the plots; all tables are folded, those of results first."""
    judged = verdicts(runs, inputs.targets, inputs.max_batches) if inputs.targets else []
    first: list[Block] = [sentences.opening(runs, compared)]
    if warning := origin_warning(runs):
        first.append(f"**Warning**: {warning}.")
    made = [Section("In short", [*first, Pictures(pictures[:1])])]
    if pictures[1:]:
        made.append(Section("Plots", [Pictures(pictures[1:])]))
    if judged:
        controlled = any(verdict.backend == CONTROL for verdict in judged)
        made.append(folded(f"Targets: {_counted(judged)}", tables.of_verdicts(judged)))
        made.append(folded("Targets: what is not measured", tables.not_measured(judged)))
        made.append(folded("How targets are judged", RULES, sentences.ON_CONTROL if controlled else None))
    made.append(folded("Compared with the baseline", tables.of_verdicts(compared)))
    made.append(folded("What is not compared", tables.not_measured(compared)))
    made.append(folded("Runs", tables.of_runs(runs), sentences.on_figures(runs), sentences.on_runs(runs)))
    if filters := tables.of_filters(runs):
        made.append(folded("What filters kept", filters, sentences.KEPT))
    if free := tables.of_free_losses(runs):
        made.append(folded("If the output layer took no time", free, sentences.FREE_LOSS))
    made.append(folded("Abbreviations", sentences.ABBREVIATIONS))
    commands = Commands([run.summary["command"] for run in runs])
    made.append(folded("How the runs were made", sentences.on_origin(runs), "Commands:", commands))
    return [section for section in made if section.blocks]


def _counted(judged: Sequence[Verdict]) -> str:
    """How many targets came to which result. Those of the noise-floor run are not counted: it judges no loss."""
    found = Counter(v.verdict for v in judged if v.backend != CONTROL)
    words = (REACHED, NOT_REACHED, INCONCLUSIVE, NOT_MEASURED)
    return ", ".join(f"{found[word]} {word}" for word in words if found[word])


# ------------------------------------------------------------------------------------------------------------ plots
def _figures(runs: Sequence[Run], compared: Sequence[Verdict], targets: Sequence[Target]) -> list[tuple[str, Any]]:
    """The plots that have data to show, by file name. The first stands at the top of the report."""
    measured = plots.measured(runs)
    figures: list[tuple[str, Any]] = []
    if (first := plots.overview(compared, targets)) is not None:
        figures.append(("overview.png", first))
    if any(run.losses and (run.summary["steps"] or 0) >= LEAST_STEPS for run in runs):
        margins = [target.bound for target in targets if target.rule == WITHIN and target.metric.name.endswith("nats")]
        figures.append(("loss_curves.png", plots.loss_curves(runs, margin=min(margins, default=None))))
    along = [key for key in plots.AXES if plots.varies(measured, key)]
    if not {"seq_len", "vocab_size"} & {*along}:  # one problem
        if len({run.summary["loss"] for run in measured}) > 1:
            figures.append(("pareto.png", plots.pareto(measured)))
        if on_gpu := [run for run in measured if run.on_gpu]:
            figures.append(("memory.png", plots.memory_parts(on_gpu)))
    return figures + [(f"speed_by_{key}.png", plots.scaling(measured, key)) for key in along]
