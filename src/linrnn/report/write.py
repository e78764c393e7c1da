"""Write a group's report. `make_report` finds the runs or the committed rows; `write_report` writes the files."""

import base64
import html
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from linrnn.config.schema import ReportConfig
from linrnn.core.files import write_json, write_text
from linrnn.core.tables import Table
from linrnn.models.facts import model_in_words
from linrnn.report import plots, tables
from linrnn.report.metrics import LEAST_STEPS
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
    read_targets,
)
from linrnn.report.verdicts import verdicts
from linrnn.runs.intervals import WITHIN
from linrnn.runs.measurements import is_cpu_bound
from linrnn.runs.origins import commit_in_words
from linrnn.runs.summary import MEAN_OF_LAST

MOST = 4  # values of a key that the second sentence names
FOLLOWING = {"data_fingerprint", "n_parameters", "steps", "horizon", "training"}  # unnamed: they follow
KEPT = f"Shares of softmax entries kept and of mass not kept are by token, means of the last {MEAN_OF_LAST} steps."
COLUMNS = [
    "n: pairs of runs behind a value. B: micro-batch size, in sequences. T: tokens of a sequence. V: vocabulary size.",
    f"Train loss: the mean of the last {MEAN_OF_LAST} steps. Nats: the unit of a loss with the natural logarithm.",
    "Tokens/s: over all steps after the warm-up. Times of step and loss: medians over these steps.",
    "MFU: model FLOPs utilisation, the share of the GPU's peak rate that the model's own FLOPs take.",
]


def make_report(config: ReportConfig) -> list[Path]:
    """The work of scripts/report.py. Prints what it reads; returns the paths that it wrote, report.md first.

    If the group has runs here, these are read. Otherwise its committed rows are read; they are not changed. A report of
    other runs is not overwritten: this one is then written beside its own runs.

    Raises:
        DataError: there are no runs to read.
    """
    results = Path(config.results_dir)
    runs, directory = find_group(results, config.group)
    committed = (directory / COMMITTED).exists()
    print(f"read {len(runs)} {'committed runs' if committed else 'runs'} of {directory}")
    if warning := origin_warning(runs):
        print(f"warning: {warning}")
    groups = {directory: None} if committed else {directory: None, results / config.max_batch_group: None}
    answers = [answer for group in groups for answer in read_max_batches(group)]
    output, targets = Path(config.output_dir or results / REPORTS / config.group), read_targets(directory)
    if not committed and not config.output_dir and (others := _others(output, runs)):
        print(f"{output} holds a report of {len(others)} runs that are not here, such as {others[0]}: it stays")
        output = directory / "report"
    paths = write_report(runs, output, config.group, targets, answers, rows=not committed)
    if not committed and (directory / TARGETS).exists():
        write_text(output / TARGETS, (directory / TARGETS).read_text(encoding="utf-8"))
        paths.append(output / TARGETS)
    return paths


def _others(directory: Path, runs: Sequence[Run]) -> list[str]:
    """Names of the runs of the report in `directory` that are not among `runs`: with it, their rows would be lost."""
    here = {(run.name, run.summary.get("started")) for run in runs}
    there = read_committed(directory) if (directory / COMMITTED).exists() else []
    return [run.name for run in there if (run.name, run.summary.get("started")) not in here]


def write_report(
    runs: Sequence[Run],
    directory: Path,
    title: str,
    targets: Sequence[Target] = (),
    max_batches: Sequence[dict[str, Any]] = (),
    *,
    rows: bool = True,
) -> list[Path]:
    """Write report.md, report.html and the plots that the runs allow. Returns the paths, report.md first.

    Args:
        targets: those of a sweep's file; empty: the report judges nothing.
        max_batches: as :mod:`linrnn.report.runs` reads them.
        rows: also write what the report can be made from again: runs.json.xz (environments, summaries and every logged
            step), and the largest batches of the same models and sizes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    pictures = [save(figure, directory / name) for name, figure in _figures(runs, targets)]
    text = in_markdown(runs, title, targets, max_batches, pictures)
    write_text(directory / "report.md", text)
    write_text(directory / "report.html", to_html(title, text, directory))
    paths = [directory / "report.md", directory / "report.html", *pictures]
    kinds = {(run.summary["model"], run.summary["size"]) for run in runs}
    if rows:
        paths.append(write_committed(runs, directory))
    if rows and (answers := [answer for answer in max_batches if (answer["model"], answer["size"]) in kinds]):
        write_json(directory / MAX_BATCHES, answers)
        paths.append(directory / MAX_BATCHES)
    return paths


def to_html(title: str, markdown: str, directory: Path) -> str:
    """A page that needs no other file. Text becomes no markup beside Markdown's; pictures become part of the page."""

    def data_uri(found: re.Match[str]) -> str:
        return f'src="data:image/png;base64,{base64.b64encode((directory / found[1]).read_bytes()).decode()}"'

    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown)
    page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return page.replace("TITLE", html.escape(title)).replace("BODY", re.sub(r'src="(\w+\.png)"', data_uri, body))


# ---------------------------------------------------------------------------------------------------------- the text
def in_markdown(
    runs: Sequence[Run],
    title: str,
    targets: Sequence[Target],
    max_batches: Sequence[dict[str, Any]],
    pictures: Sequence[Path],
) -> str:
    """The report: what ran, what was asked, what was compared, the plots, and how the runs were made."""
    warning, judged = origin_warning(runs), verdicts(runs, targets, max_batches) if targets else []
    found = Counter(v.verdict for v in judged)
    answers = [f"{found[word]} {word}" for word in (REACHED, NOT_REACHED, INCONCLUSIVE, NOT_MEASURED) if found[word]]
    columns = [*COLUMNS, "Ratios are to the baseline's run of the same setting and seed, which has the ratio 1."]
    lines = [
        *(f"# {title}", "", *_listed(opening(runs)), ""),
        *([f"**Warning**: {warning}.", ""] if warning else []),
        *_section(f"Targets: {', '.join(answers)}", tables.of_verdicts(judged), [RULES]),
        *_section("Compared with the baseline", tables.of_verdicts(verdicts(runs))),
        *_section("Plots", [f"![{path.stem.replace('_', ' ')}]({path.name})" for path in pictures]),
        *_section("Runs", tables.of_runs(runs), _listed(remarks(runs)), _listed(columns)),
        *_section("What filters kept", tables.of_filters(runs), [KEPT]),
        *_section(
            "How the runs were made", [made_with(runs)], ["```", *(run.summary["command"] for run in runs), "```"]
        ),
    ]
    return "\n".join(lines)


def _section(title: str, first: Table | list[str], *others: list[str]) -> list[str]:
    """A heading and blocks of lines; nothing if the first block is empty."""
    if not first:
        return []
    blocks = [first.markdown() if isinstance(first, Table) else first, *filter(None, others)]
    return [f"## {title}", "", *(line for block in blocks for line in (*block, ""))]


def _listed(sentences: Sequence[str]) -> list[str]:
    return [f"* {sentence}" for sentence in sentences]


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


def remarks(runs: Sequence[Run]) -> list[str]:
    """Remarks on single runs: failures, CPU-bound steps, and GPUs that were shared."""
    found = []
    for run in runs:
        s, state = run.summary, run.summary.get("gpu_state") or {}
        if not run.finished:
            found.append(f"{run.name}: {s['status']}: {s.get('reason') or 'no reason was recorded'}")
        if is_cpu_bound(s):
            host, wall = f"{s['host_step_ms']:.2f} ms", f"{s['wall_step_ms']:.2f} ms"
            found.append(f"**{run.name} is CPU-bound**: {host} of a step's {wall} by wall clock are not the device's")
        if state.get("other_processes") and not run.gpu_shared:
            found.append(f"**{run.name}: {state['other_processes']} other processes computed on the GPU**")
    if count := sum(run.gpu_shared for run in runs):
        which = "every run" if count == len(runs) else f"{count} of {len(runs)} runs"
        found.append(f"{which} shared its GPU with other runs (`share_gpus=true`): its times are not measured")
    return found


def made_with(runs: Sequence[Run]) -> str:
    """Device, commit and versions of the runs."""
    environment = environment_of(runs)
    if not environment:
        return "device, commit and versions are not recorded, because no run started"
    told = {
        "device": ", ".join(gpu["name"] for gpu in environment.get("gpus", [])) or environment.get("cpu"),
        "driver": environment.get("gpu_driver"),
        "CUDA allocator": environment.get("cuda_allocator"),
        "commit": commit_in_words(environment.get("git")),
        "Python": environment.get("python"),
        **environment.get("packages", {}),
    }
    return ", ".join(f"{name} {value}" for name, value in told.items() if value)


# ------------------------------------------------------------------------------------------------------------ plots
def _figures(runs: Sequence[Run], targets: Sequence[Target]) -> list[tuple[str, Any]]:
    """The plots that have data to show, by file name."""
    figures: list[tuple[str, Any]] = []
    if any(run.losses and (run.summary["steps"] or 0) >= LEAST_STEPS for run in runs):
        margins = [target.bound for target in targets if target.rule == WITHIN and target.metric.name.endswith("nats")]
        figures.append(("loss_curves.png", plots.loss_curves(runs, margin=min(margins, default=None))))
    measured = plots.measured(runs)
    if len({(run.summary["seq_len"], run.summary["vocab_size"]) for run in measured}) == 1:  # one problem
        if len({run.summary["loss"] for run in measured}) > 1:
            figures.append(("pareto.png", plots.pareto(measured)))
        if len({run.summary["batch_size"] for run in measured}) > 1:
            figures.append(("speed_by_batch.png", plots.speed_by_batch(measured)))
        if on_gpu := [run for run in measured if run.on_gpu]:
            figures.append(("memory.png", plots.memory_parts(on_gpu)))
    return figures
