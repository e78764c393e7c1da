"""A group of runs as people read it: a table with every run's figures and origin, verdicts on the criteria, plots."""

import json
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

from linrnn import plots
from linrnn.branches import branches
from linrnn.results import (
    BREAKDOWNS,
    COMMITTED,
    MAX_BATCHES,
    Run,
    backend_names,
    check_origin,
    loss_time_share,
    same_origin,
    write_committed,
)
from linrnn.verdicts import LEAST_STEPS, OPEN, SMOOTHED_STEPS, Verdict, largest_difference, verdicts

GIB = 2**30
OURS = ("cce_kahan", "cce_filter")  # the backends whose verdicts stand in the report itself
LAST = 50  # steps
FILTER_COLUMNS = {
    "entries kept": ("entries_kept", ".4%"),
    "mass not kept, mean": ("dropped_mass_mean", ".3f"),
    "99th percentile": ("dropped_mass_p99", ".3f"),
    "most": ("dropped_mass_max", ".3f"),
    "steps computed exactly": ("exact", ".2%"),
}
SATURATED = 0.9  # share of the device's peak above which a larger batch cannot help
FOLLOW_UPS = (
    "* Follow-up 2 (FP8 or INT4 scan): open, no such scan is part of this harness.",
    "* Follow-up 5 (MFA's shared projections): open, no such projections are part of this harness.",
)


def write_report(
    runs: Sequence[Run],
    directory: Path,
    title: str,
    max_batches: Sequence[dict[str, Any]] = (),
    breakdowns: Sequence[dict[str, Any]] = (),
) -> list[Path]:
    """Write report.md, verdicts.md, runs.json (summaries and curves), the largest batches and breakdowns of the same
    models and sizes, and the plots that the runs allow.

    Args:
        max_batches, breakdowns: as :mod:`linrnn.results` reads them; those of another origin are left out, which the
            report says.

    Returns:
        The paths, report.md first.

    Raises:
        ConfigError: the runs were made on different GPUs, with different versions or at different commits.
    """
    check_origin(runs, title)
    directory.mkdir(parents=True, exist_ok=True)
    found = verdicts(runs, max_batches)
    pictures = [plots.save(figure, directory / name) for name, figure in _figures(runs, title)]
    report, rows, committed = (directory / name for name in ("report.md", "verdicts.md", COMMITTED))
    report.write_text(_markdown(runs, title, found, breakdowns, pictures), encoding="utf-8")
    rows.write_text(f"# {title}: every verdict\n\n" + "\n".join(verdict_table(found)) + "\n", encoding="utf-8")
    write_committed(runs, committed)
    kinds = {(run.summary["model"], run.summary["size"]) for run in runs}
    answers = [answer for answer in max_batches if (answer["model"], answer["size"]) in kinds]
    taken_apart = [b for b in breakdowns if (b["run"]["model"], b["run"]["size"]) in kinds]
    others = []
    for name, content in ((MAX_BATCHES, answers), (BREAKDOWNS, taken_apart)):
        if content:
            (directory / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            others.append(directory / name)
    return [report, rows, committed, *others, *pictures]


def _figures(runs: Sequence[Run], title: str) -> list[tuple[str, Any]]:
    """The plots that have something to show."""
    measured = [run for run in runs if run.finished and run.summary["tokens_per_second"]]
    figures: list[tuple[str, Any]] = []
    if any(run.losses and (run.summary["steps"] or 0) >= LEAST_STEPS for run in runs):
        figures.append(("loss_curves.png", plots.loss_curves(runs, title)))
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
    if "vocab_size" in several:
        figures.append(("vocabulary_crossover.png", plots.vocabulary_crossover(measured)))
    shares = (("share", plots.loss_layer_share, plots.loss_share), ("time", loss_time_share, plots.loss_time))
    for along in several:
        for name, share, draw in shares:
            with_share = [run for run in measured if share(run) is not None]
            if plots.varies(with_share, along):
                figures.append((f"loss_{name}_by_{along}.png", draw(with_share, along)))
    return figures


def _markdown(
    runs: Sequence[Run],
    title: str,
    found: Sequence[Verdict],
    breakdowns: Sequence[dict[str, Any]],
    pictures: Sequence[Path],
) -> str:
    own = [verdict for verdict in found if verdict.backend.split()[0] in OURS]
    lines = [f"# {title}", "", *_table(runs), *course_lines(runs), *_filter_lines(runs), *_origin(runs)]
    if own:
        lines += ["## Verdicts", "", *verdict_table(own), "", "All backends: [verdicts.md](verdicts.md).", ""]
    if crossover := plots.crossover_lines(runs):
        lines += ["## Vocabulary: where a loss passes the baseline", "", *crossover, ""]
    if any(run.finished for run in runs):
        lines += ["## If the hypothesis is wrong", "", *_branch_lines(found), ""]
        lines += ["## What is next", "", *_bottleneck_lines(runs, breakdowns), *FOLLOW_UPS, ""]
    lines += [f"![{path.stem.replace('_', ' ')}]({path.name})" for path in pictures]
    return "\n".join([*lines, ""])


def _table(runs: Sequence[Run]) -> list[str]:
    checkpointing = plots.varies(runs, "activation_checkpointing")
    labels = [
        (*_order(run, name), _checkpointed(run))
        for run, name in zip(runs, backend_names([run.summary for run in runs]), strict=True)
    ]
    alike = len(set(labels)) < len(labels)  # runs that differ in what has no column are told apart by their names
    lines = [
        f"| {'run | ' * alike}model | size | loss | {'checkpointing | ' * checkpointing}B | T | V | seed | status "
        "| train loss, nats | valid loss, nats | bits per byte | peak memory, GiB | ratio | tokens/s | ratio "
        "| step, ms | of it loss | MFU |",
        f"|{'---|' * alike}---|---|---|{'---|' * checkpointing}{'--:|' * 4}---|{'--:|' * 10}",
    ]
    baseline = plots.baseline_of(runs)
    bases = {(run.setting, run.summary["seed"]): run.summary for run in runs if run.summary["loss"] == baseline}
    named = zip(runs, backend_names([run.summary for run in runs]), strict=True)
    for run, name in sorted(named, key=lambda entry: _order(*entry)):
        s, base = run.summary, bases.get((run.setting, run.summary["seed"]), {})
        cells = [
            *([s["run_name"]] if alike else []),
            s["model"],
            s["size"],
            name,
            *([s["activation_checkpointing"]] if checkpointing else []),
            str(s["batch_size"]),
            str(s["seq_len"]),
            _show(s["vocab_size"], ","),
            str(s["seed"]),
            s["status"],
            _show(s["train_loss_nats"], ".4f"),
            _show(s["valid_loss_nats"], ".4f"),
            _show(s["valid_bits_per_byte"], ".4f"),
            _show(s["peak_memory_bytes"], ".2f", 1 / GIB),
            _show(_ratio(s["peak_memory_bytes"], base.get("peak_memory_bytes")), ".2f"),
            _show(s["tokens_per_second"], ",.0f"),
            _show(_ratio(s["tokens_per_second"], base.get("tokens_per_second")), ".3f"),
            _show(s["step_time_ms_median"], ".2f"),
            _show(loss_time_share(run), ".1%"),
            _show(s["mfu"], ".1%"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    measured = next((run.summary for run in runs if run.summary["peak_memory_is"]), None)
    lines += [
        "",
        f"Train loss: mean of the last {LAST} steps (of all, where there are fewer). "
        "Speed: median over the steps after the warm-up. Peak memory: "
        f"{measured['peak_memory_is'] if measured else 'not measured'}. Ratios: to `{baseline}` of the same "
        "setting and seed.",
        "",
    ]
    unfinished = [(run, name) for run, name in zip(runs, backend_names([r.summary for r in runs]), strict=True)]
    lines += [
        f"* {run.summary['model']} x {name}, B = {run.summary['batch_size']}: {run.summary['status']}: "
        f"{run.summary.get('reason') or 'no reason was recorded'}"
        for run, name in unfinished
        if not run.finished
    ]
    return lines


def course_lines(runs: Sequence[Run]) -> list[str]:
    """Where a run ended early: curves over the steps that two have, of two losses or of two seeds of one."""
    if not any(run.losses and not run.finished for run in runs):
        return []
    names = dict(zip((run.summary["run_name"] for run in runs), backend_names([r.summary for r in runs]), strict=True))
    baseline, rows = plots.baseline_of(runs), []
    for a, b in combinations(sorted(runs, key=lambda run: run.summary["loss"] != baseline), 2):
        common = sorted(dict(a.losses).keys() & dict(b.losses).keys())
        same_loss, same_seed = (names[a.summary["run_name"]] == names[b.summary["run_name"]], _seed(a) == _seed(b))
        if a.course != b.course or same_loss == same_seed or len(common) < LEAST_STEPS:
            continue
        means = [fmean(dict(run.losses)[step] for step in common[-LAST:]) for run in (b, a)]
        validated = max(dict(a.validations).keys() & dict(b.validations).keys(), default=None)
        valid = [None if validated is None else dict(run.validations)[validated] for run in (b, a)]
        cells = [
            a.summary["model"],
            f"{names[b.summary['run_name']]}, seed {_seed(b)}",
            f"{names[a.summary['run_name']]}, seed {_seed(a)}",
            str(len(common)),
            _show(largest_difference(b, a), ".4f"),
            f"{means[0] - means[1]:+.4f}",
            _show(validated, ","),
            *(_show(value, ".2f") for value in valid),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    if not rows:
        return []
    return [
        "## Over the steps that two runs have",
        "",
        f"| model | run | against | steps | largest difference (mean of {SMOOTHED_STEPS}), nats "
        f"| mean of the last {LAST}, difference | validated at step | perplexity | against |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|",
        *rows,
        "",
        "Two seeds see other batches: their curves differ by the batches' noise as well.",
        "",
    ]


def _seed(run: Run) -> int:
    return int(run.summary["seed"])


def _filter_lines(runs: Sequence[Run]) -> list[str]:
    """What filters kept and dropped, means over the last logged steps of each run."""
    rows = []
    for run, name in zip(runs, backend_names([run.summary for run in runs]), strict=True):
        if run.statistics:
            last = {key: fmean(value for _, value in curve[-LAST:]) for key, curve in run.statistics.items()}
            cells = [_show(last.get(key), form) for key, form in FILTER_COLUMNS.values()]
            rows.append(f"| {run.summary['model']} | {name} | {run.summary['seed']} | {' | '.join(cells)} |")
    if not rows:
        return []
    return [
        f"| model | loss | seed | {' | '.join(FILTER_COLUMNS)} |",
        f"|---|---|--:|{'--:|' * len(FILTER_COLUMNS)}",
        *rows,
        "",
        f"Shares of softmax entries kept and of mass not kept, by token; means of the last {LAST} steps.",
        "",
    ]


def _origin(runs: Sequence[Run]) -> list[str]:
    environment = next((run.environment for run in runs if run.environment), {})
    packages = ", ".join(f"{name} {version}" for name, version in environment.get("packages", {}).items() if version)
    gpus = ", ".join(gpu["name"] for gpu in environment.get("gpus", [])) or environment.get("cpu")
    git = environment.get("git") or {}
    dirty = " with uncommitted changes" if git.get("dirty") else ""
    driver = f", driver {environment['gpu_driver']}" if environment.get("gpu_driver") else ""
    allocator = f", CUDA allocator {environment['cuda_allocator']}" if environment.get("cuda_allocator") else ""
    return [
        f"* device: {gpus}{driver}{allocator}, Python {environment.get('python')}",
        f"* commit: {git.get('commit')}{dirty}",
        f"* versions: {packages}",
        *_gpu_lines(runs),
        "* commands:",
        "",
        "```",
        *[run.summary["command"] for run in runs],
        "```",
        "",
    ]


def _gpu_lines(runs: Sequence[Run]) -> list[str]:
    """The clocks that the runs had, and who else used the GPU."""
    states = [(run.summary["run_name"], state) for run in runs if (state := run.summary.get("gpu_state"))]
    clocks = [state["sm_mhz"] for _, state in states if state["sm_mhz"] is not None]
    lines = [f"* SM clock at the end of training: {min(clocks):,.0f} to {max(clocks):,.0f} MHz"] if clocks else []
    return lines + [
        f"* **{name}: {state['other_processes']} other processes computed on the GPU**"
        for name, state in states
        if state["other_processes"]
    ]


def verdict_table(found: Sequence[Verdict]) -> list[str]:
    """A row a verdict; in the order of the criteria, compiled before eager."""
    lines = [
        "| criterion | model | loss | against | value | target | margin | spread over seeds | seeds | verdict |",
        "|---|---|---|---|--:|--:|--:|--:|--:|---|",
    ]
    order = list(dict.fromkeys(verdict.criterion.name for verdict in found))
    for v in sorted(found, key=lambda v: (order.index(v.criterion.name), v.against == "standard")):
        form = v.criterion.form
        verdict = f"**{v.verdict}**" + (f" ({v.remark})" if v.remark else "")
        cells = [
            v.criterion.name,
            v.model,
            v.backend,
            v.against or "-",
            _show(v.value, form),
            v.criterion.bound,
            _show(v.margin, form if form.startswith("+") else f"+{form}"),
            _show(v.spread, form.removeprefix("+")),
            str(v.seeds),
            verdict,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _branch_lines(found: Sequence[Verdict]) -> list[str]:
    return [f"* {branch}: **{word}** ({figures})" for branch, word, figures in branches(found)]


def _bottleneck_lines(runs: Sequence[Run], breakdowns: Sequence[dict[str, Any]]) -> list[str]:
    """The largest part of time and of memory with our loss, and the most that a loss without cost could give."""
    environment = next((run.environment for run in runs if run.environment), {})
    kinds = {(run.summary["model"], run.summary["size"]) for run in runs}
    lines = _bound_lines(runs)
    for breakdown in breakdowns:
        run, step = breakdown["run"], breakdown["time"]["step"]["total"]
        if (run["model"], run["size"]) not in kinds or not step:
            continue
        if differing := same_origin(environment, breakdown["environment"]):
            lines.append(f"* {run['run_name']}: its breakdown is left out, made with another {', '.join(differing)}.")
            continue
        parts = {name: sum(v or 0 for v in row.values()) for name, row in breakdown["time"].items() if name != "step"}
        name, share = max(parts, key=lambda part: parts[part]), parts["loss"] / step
        lines.append(
            f"* {run['model']} x {run['loss']}, B = {run['batch_size']}: the largest part of a step is {name} "
            f"({parts[name] / step:.0%}); the loss takes {share:.1%}: without any cost a step would be "
            f"{1 / (1 - share):.3f} x as fast."
        )
        memory = breakdown.get("memory", {})
        peak, without = (memory.get(name, {}).get("measured") for name in ("peak", "peak/without_loss_layer"))
        if peak and without:
            lines.append(f"  Its peak is {peak / without:.3f} x that of the same step without a loss layer.")
        if (breakdown["hardware_utilisation"] or 0) > SATURATED:
            lines.append(
                f"  It computes at {breakdown['hardware_utilisation']:.0%} of the peak: more sequences would only "
                "queue; freed memory is better spent on longer sequences, a larger model or no checkpointing."
            )
    return lines or [f"* The next bottleneck: {OPEN}, needs scripts/breakdown.py."]


def _bound_lines(runs: Sequence[Run]) -> list[str]:
    """Of each model and loss, with and without checkpointing: what a loss that cost no time would make of its step."""
    firsts: dict[tuple[str, str, str], tuple[Run, float]] = {}
    for run, name in zip(runs, backend_names([run.summary for run in runs]), strict=True):
        share = loss_time_share(run)
        if run.finished and share is not None and run.summary["loss"] in (plots.baseline_of(runs), *OURS):
            checkpointing = run.summary.get("activation_checkpointing") or "none"
            firsts.setdefault((run.summary["model"], name, checkpointing), (run, share))
    return [
        f"* {model} x {name}, B = {run.summary['batch_size']}, T = {run.summary['seq_len']}, "
        f"V = {run.summary['vocab_size']:,}, checkpointing {checkpointing}: the loss takes {share:.1%} of a step; "
        f"without any cost it would be {1 / (1 - share):.3f} x as fast."
        for (model, name, checkpointing), (run, share) in firsts.items()
    ]


def _checkpointed(run: Run) -> str:
    return run.summary.get("activation_checkpointing") or "none"


def _order(run: Run, name: str) -> tuple[Any, ...]:
    s = run.summary
    return s["model"], s["size"], s["vocab_size"] or 0, s["seq_len"], s["batch_size"], name, s["seed"]


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base


def _show(value: float | None, form: str, scale: float = 1.0) -> str:
    if value is None:
        return "-"
    return f"{value:{form}}" if scale == 1.0 else f"{value * scale:{form}}"
