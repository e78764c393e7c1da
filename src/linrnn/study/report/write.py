"""Write a group's report. `make_report` finds the runs or the committed rows; `write_report` writes the files."""

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from linrnn.config import load_config
from linrnn.config.schema import ReportConfig
from linrnn.config.strings import quoted
from linrnn.core.errors import ConfigError
from linrnn.core.files import write_json, write_text
from linrnn.study import plots
from linrnn.study.criteria import LEAST_STEPS
from linrnn.study.plots import select
from linrnn.study.report import remarks
from linrnn.study.report.own_runs import are_of_study, without_hypotheses
from linrnn.study.report.page import Pictures, Section, to_html, to_markdown
from linrnn.study.report.sections import of_verdicts, sections
from linrnn.study.results import (
    BREAKDOWNS,
    COMMITTED,
    MAX_BATCHES,
    Run,
    check_origin,
    find_group,
    loss_layer_share,
    loss_time_share,
    read_breakdowns,
    read_committed,
    read_list,
    read_max_batches,
    write_committed,
)
from linrnn.study.verdicts import verdicts


def make_report(config: ReportConfig) -> list[Path]:
    """The work of scripts/report.py. Prints what it reads; returns the paths that it wrote, report.md first.

    If the group has runs here, these are read. Otherwise its committed rows are read; they are not changed.

    Raises:
        ConfigError: neither a group nor a report is named, or both are; or the runs have different origins; or a
            report of other runs would be lost.
        DataError: there are no runs to read.
    """
    if bool(config.group) == bool(config.summary):
        raise ConfigError(
            "group and summary are both named" if config.group else "neither group nor summary is named",
            "name a group as group=mve, or a report's directory as summary=results/summaries/mve",
        )
    results = Path(config.results_dir)
    if config.group:
        group = find_group(results, config.group)
        title, directory, runs, committed = config.group, group.directory, group.runs, group.committed
    else:
        directory = Path(str(config.summary))
        title, runs, committed = directory.resolve().name, read_committed(directory), True
    source = f"{len(runs)} {'committed runs' if committed else 'runs'} of {directory}"
    print(f"read {source}")
    again = _command(config)
    if committed:
        lists = (read_list(directory / name) for name in (MAX_BATCHES, BREAKDOWNS))
        output = Path(config.output_dir) if config.output_dir else directory
        return write_pages(runs, output, title, *lists, source=source, again=again)
    output = Path(config.output_dir) if config.output_dir else results / "summaries" / title
    if not config.output_dir:
        _keep_other_runs(output, runs)
    groups = dict.fromkeys((directory, results / config.max_batch_group))
    answers = [answer for group in groups for answer in read_max_batches(group)]
    taken_apart = read_breakdowns(Path(config.breakdowns))
    return write_report(runs, output, title, answers, taken_apart, source=source, again=again)


def _command(config: ReportConfig) -> str:
    """The command that makes this report again: the group or summary, and every other key that has no default value."""
    defaults, values = (dataclasses.asdict(one) for one in (load_config([], "report"), config))
    changed = [f"{key}={value}" for key, value in values.items() if value != defaults[key]]
    return shlex.join(["python", "scripts/report.py", *quoted(changed, "report")])


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


def write_report(
    runs: Sequence[Run],
    directory: Path,
    title: str,
    max_batches: Sequence[dict[str, Any]] = (),
    breakdowns: Sequence[dict[str, Any]] = (),
    **said: str,
) -> list[Path]:
    """Write the pages of :func:`write_pages`, and the rows from which they can be written again.

    The rows are runs.json.xz (summaries and every logged step), and the largest batches and breakdowns of the same
    models and sizes.

    Raises:
        ConfigError: the runs were made on different GPUs, with different versions or at different commits.
    """
    paths = write_pages(runs, directory, title, max_batches, breakdowns, **said)
    rows = write_committed(runs, directory)
    kinds = {(run.summary["model"], run.summary["size"]) for run in runs}
    answers = [answer for answer in max_batches if (answer["model"], answer["size"]) in kinds]
    taken_apart = [b for b in breakdowns if (b["run"]["model"], b["run"]["size"]) in kinds]
    others = []
    for name, content in ((MAX_BATCHES, answers), (BREAKDOWNS, taken_apart)):
        if content:
            write_json(directory / name, content)
            others.append(directory / name)
    return [*paths, rows, *others]


def write_pages(
    runs: Sequence[Run],
    directory: Path,
    title: str,
    max_batches: Sequence[dict[str, Any]] = (),
    breakdowns: Sequence[dict[str, Any]] = (),
    *,
    source: str = "",
    again: str = "scripts/report.py",
) -> list[Path]:
    """Write the pages of a report: report.md, verdicts.md, report.html and the plots that the runs allow.

    Args:
        max_batches, breakdowns: as :mod:`linrnn.study.results` reads them. Those of another origin are left out, and
            the report says so.
        source: what the runs were read from; report.html shows it.
        again: the command that writes the pages again; report.html shows it.

    Returns:
        The paths, report.md first.

    Raises:
        ConfigError: the runs were made on different GPUs, with different versions or at different commits.
    """
    check_origin(runs, title)
    directory.mkdir(parents=True, exist_ok=True)
    found = verdicts(runs, max_batches)
    if not are_of_study(runs):
        found = without_hypotheses(found)
    pictures = Pictures([plots.save(figure, directory / name) for name, figure in _figures(runs)])
    short, whole = (sections(runs, found, breakdowns, pictures, every_loss=every) for every in (False, True))
    every = [Section("Verdicts", [remarks.on_count(found)]), *of_verdicts(found)]
    every.append(Section("How verdicts are reached", remarks.on_rules(runs, found)))
    documents = {
        "report.md": to_markdown(title, short),
        "verdicts.md": to_markdown(f"{title}: every verdict", every),
        "report.html": to_html(title, whole, f"Read from {source or f'{len(runs)} runs'}.", again),
    }
    for name, text in documents.items():
        write_text(directory / name, text)
    return [*(directory / name for name in documents), *pictures.paths]


def _figures(runs: Sequence[Run]) -> list[tuple[str, Any]]:
    """The plots that have data to show, by file name."""
    measured = select.measured(runs)
    figures: list[tuple[str, Any]] = []
    if any(run.losses and (run.summary["steps"] or 0) >= LEAST_STEPS for run in runs):
        figures.append(("loss_curves.png", plots.loss_curves(runs)))
    if any("dropped_mass_mean" in run.statistics for run in runs):
        figures.append(("dropped_mass.png", plots.dropped_mass(runs)))
    several = [along for along in plots.AXES if plots.varies(measured, along)]
    if len({run.summary["loss"] for run in measured}) > 1 and not several:
        figures.append(("pareto.png", plots.pareto(measured)))
    if plots.varies(measured, "batch_size"):
        figures.append(("batch_scaling.png", plots.batch_scaling(measured)))
    if plots.varies([run for run in measured if run.summary.get("chunk_size")], "chunk_size"):
        figures.append(("chunk_sizes.png", plots.chunk_sizes(measured)))
    if "seq_len" in several:
        figures.append(("length_scaling.png", plots.length_scaling(measured)))
    if "vocab_size" in several and plots.speeds_rank(measured):
        figures.append(("vocabulary_crossover.png", plots.vocabulary_crossover(measured)))
    shares = (("share", loss_layer_share, plots.loss_share), ("time", loss_time_share, plots.loss_time))
    for along in several:
        for name, share, draw in shares:
            with_share = [run for run in measured if share(run) is not None]
            if plots.varies(with_share, along):
                figures.append((f"loss_{name}_by_{along}.png", draw(with_share, along)))
    return figures
