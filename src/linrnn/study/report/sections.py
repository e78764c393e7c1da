"""The sections of a report, in order: verdicts, plots, runs, conclusions, and how the runs were made."""

from collections.abc import Sequence
from typing import Any

from linrnn.core.tables import Table
from linrnn.runs.summary import MEAN_OF_LAST
from linrnn.study import plots
from linrnn.study.criteria import UNDECIDED, Verdict
from linrnn.study.report import remarks, tables
from linrnn.study.report.own_runs import abbreviations, are_of_study
from linrnn.study.report.page import Block, Bullets, Commands, Pictures, Section
from linrnn.study.report.settings import RULES, changes_of_loss
from linrnn.study.results import Run
from linrnn.study.verdicts import CONTROL, OURS


def sections(
    runs: Sequence[Run],
    found: Sequence[Verdict],
    breakdowns: Sequence[dict[str, Any]],
    pictures: Pictures,
    *,
    every_loss: bool,
) -> list[Section]:
    """A report's sections.

    Args:
        every_loss: whether to include verdicts on other losses than ours. The HTML page does; report.md links to
            verdicts.md instead.
    """
    controls = [verdict for verdict in found if verdict.backend == CONTROL]
    own = [verdict for verdict in found if verdict.backend.split()[0] in OURS]
    others = [verdict for verdict in found if verdict not in own and verdict not in controls]
    own, others = (one and [*one, *controls] for one in (own, others))
    made = [Section("Verdicts", [remarks.on_count(own)]), *of_verdicts(own)] if own else []
    if own:
        rules = remarks.on_rules(runs, own)
        made.append(Section("How verdicts are reached", rules if every_loss else [*rules, _ELSEWHERE], level=3))
    if changes := changes_of_loss(runs):
        heading = "What float8, compiled blocks and shared projections change in the loss"
        made.append(Section(heading, [tables.of_verdicts(changes), RULES]))
    made.append(Section("Plots", [pictures]) if pictures.paths else Section("", []))
    runs_blocks: list[Any] = [tables.of_runs(runs), remarks.on_figures(runs), Bullets(remarks.on_runs(runs))]
    made.append(Section("Runs", runs_blocks))
    if courses := tables.of_courses(runs):
        made.append(Section("Over the steps that two runs have", [courses, tables.BATCH_NOISE]))
    if filters := tables.of_filters(runs):
        made.append(Section("What filters kept", [filters, _KEPT]))
    if crossover := [line.removeprefix("* ") for line in plots.crossover_lines(runs)]:
        made.append(Section("Vocabulary: where a loss passes the baseline", [Bullets(crossover)]))
    if any(run.finished for run in runs):
        if are_of_study(runs):
            made.append(Section("If the hypothesis is wrong", [Bullets(remarks.on_branches(found))]))
        made.append(Section("What is next", _next(runs, breakdowns)))
    if every_loss and others:
        made += [Section("Verdicts on the other losses", [remarks.on_count(others)]), *of_verdicts(others)]
    if not are_of_study(runs):
        made.append(Section("Abbreviations", [Bullets(abbreviations(found))]))
    commands = Commands([run.summary["command"] for run in runs])
    made.append(Section("How the runs were made", [Bullets(remarks.on_origin(runs)), "Commands:", commands]))
    return [section for section in made if section.blocks]


_ELSEWHERE = "All losses: [verdicts.md](verdicts.md)."
_MISSING = "Not measured"
_KEPT = f"Shares of softmax entries kept and of mass not kept are by token, means of the last {MEAN_OF_LAST} steps."


def _next(runs: Sequence[Run], breakdowns: Sequence[dict[str, Any]]) -> list[Block]:
    """What could still be gained: by a loss that took no time, and what breakdowns name."""
    free = tables.of_free_losses(runs)
    steps = remarks.on_breakdowns(runs, breakdowns)
    if not free and not steps:
        steps = [remarks.NO_BOTTLENECK]
    bullets = Bullets([*steps, *(remarks.FOLLOW_UPS if are_of_study(runs) else ())])
    return [free, remarks.FREE_LOSS, bullets] if free else [bullets]


def of_verdicts(found: Sequence[Verdict]) -> list[Section]:
    """Verdicts in up to three sections: answered, undecided, and not measured."""
    answered, undecided = (
        tables.with_control([verdict for verdict in found if verdict.verdict in words], found)
        for words in (tables.ANSWERED, (UNDECIDED,))
    )
    blocks: list[tuple[str, Table | None]] = [
        ("Met or missed", tables.of_verdicts(answered) if answered else None),
        ("Undecided", tables.of_verdicts(undecided) if undecided else None),
        (_MISSING, tables.not_measured(found)),
    ]
    return [Section(title, [block], level=3, folded=title == _MISSING) for title, block in blocks if block]
