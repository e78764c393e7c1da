"""A group of runs as people read it: a table with every run's figures and origin, verdicts on the criteria, plots."""

import json
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from linrnn.config.schema import ReportConfig
from linrnn.core.errors import ConfigError
from linrnn.runs.figures import host_decides
from linrnn.runs.mixtures import same_origin
from linrnn.study import plots
from linrnn.study.criteria import LEAST_STEPS, MVE_CHANGED, OPEN, RULES, RULES_CHANGED, Verdict
from linrnn.study.curves import LAST, SMOOTHED_STEPS, mean_of_last
from linrnn.study.hypotheses import branches
from linrnn.study.results import (
    BREAKDOWNS,
    COMMITTED,
    MAX_BATCHES,
    WALL_CLOCK,
    Run,
    alike,
    backend_names,
    check_origin,
    comparison,
    loss_time_share,
    read_breakdowns,
    read_committed,
    read_list,
    read_max_batches,
    read_runs,
    write_committed,
)
from linrnn.study.verdicts import free_loss_speed_up, verdicts

GIB = 2**30
OURS = ("cce_kahan", "cce_filter")  # the backends whose verdicts stand in the report itself
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


def make_report(config: ReportConfig) -> list[Path]:
    """What scripts/report.py does; returns the paths of what was written, report.md first.

    Raises:
        ConfigError: neither a group nor a report is named, or both; the runs are of different origins.
        DataError: there are no runs to read.
    """
    output = Path(config.output_dir) if config.output_dir else None
    if config.group and not config.summary:
        results = Path(config.results_dir)
        return write_report(
            read_runs(results / config.group),
            output or results / "summaries" / config.group,
            config.group,
            read_max_batches(results / config.max_batch_group),
            read_breakdowns(Path(config.breakdowns)),
        )
    if config.summary and not config.group:
        summary = Path(config.summary)
        runs = read_committed(summary)
        lists = (read_list(summary / name) for name in (MAX_BATCHES, BREAKDOWNS))
        return write_pages(runs, output or summary, summary.resolve().name, *lists)
    raise ConfigError(
        f"group={config.group} summary={config.summary}: one of them must be named, and one alone",
        "name runs made here as group=mve, or a report's directory as summary=results/summaries/mve",
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
        max_batches, breakdowns: as :mod:`linrnn.study.results` reads them. The report leaves out those of another
            origin, and says so.

    Returns:
        The paths, report.md first.

    Raises:
        ConfigError: the runs were made on different GPUs, with different versions or at different commits.
    """
    paths = write_pages(runs, directory, title, max_batches, breakdowns)
    committed = directory / COMMITTED
    write_committed(runs, committed)
    kinds = {(run.summary["model"], run.summary["size"]) for run in runs}
    answers = [answer for answer in max_batches if (answer["model"], answer["size"]) in kinds]
    taken_apart = [b for b in breakdowns if (b["run"]["model"], b["run"]["size"]) in kinds]
    others = []
    for name, content in ((MAX_BATCHES, answers), (BREAKDOWNS, taken_apart)):
        if content:
            (directory / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            others.append(directory / name)
    return [*paths, committed, *others]


def write_pages(
    runs: Sequence[Run],
    directory: Path,
    title: str,
    max_batches: Sequence[dict[str, Any]] = (),
    breakdowns: Sequence[dict[str, Any]] = (),
) -> list[Path]:
    """As :func:`write_report`, of a report what people read: report.md, verdicts.md and the plots."""
    check_origin(runs, title)
    directory.mkdir(parents=True, exist_ok=True)
    found = verdicts(runs, max_batches)
    pictures = [plots.save(figure, directory / name) for name, figure in _figures(runs, title)]
    report, rows = directory / "report.md", directory / "verdicts.md"
    report.write_text(_markdown(runs, title, found, breakdowns, pictures), encoding="utf-8")
    every = [f"# {title}: every verdict", "", *verdict_table(found), "", *_rules(runs, found), ""]
    rows.write_text("\n".join(every), encoding="utf-8")
    return [report, rows, *pictures]


def _figures(runs: Sequence[Run], title: str) -> list[tuple[str, Any]]:
    """The plots that have something to show."""
    measured = [run for run in runs if run.finished and not run.mixture and run.summary["tokens_per_second"]]
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
        lines += ["## Verdicts", "", *verdict_table(own), "", *_rules(runs, own)]
        lines += ["All backends: [verdicts.md](verdicts.md).", ""]
    if crossover := plots.crossover_lines(runs):
        lines += ["## Vocabulary: where a loss passes the baseline", "", *crossover, ""]
    if any(run.finished for run in runs):
        lines += ["## If the hypothesis is wrong", "", *_branch_lines(found), ""]
        lines += ["## What is next", "", *_bottleneck_lines(runs, breakdowns), *FOLLOW_UPS, ""]
    lines += [f"![{path.stem.replace('_', ' ')}]({path.name})" for path in pictures]
    return "\n".join([*lines, ""])


def _table(runs: Sequence[Run]) -> list[str]:
    checkpointing = plots.varies(runs, "activation_checkpointing")
    horizons = len({run.horizon for run in runs if run.horizon}) > 1
    named = list(zip(runs, backend_names([run.summary for run in runs]), strict=True))
    labels = [(*_order(run, name), _checkpointed(run), run.horizon) for run, name in named]
    same = len(set(labels)) < len(labels)  # runs that differ in what has no column are told apart by their names
    lines = [
        f"| {'run | ' * same}model | size | loss | {'checkpointing | ' * checkpointing}B | T | V | seed "
        f"| {'steps | ' * horizons}status | train loss, nats | valid loss, nats | bits per byte | peak memory, GiB "
        f"| ratio | tokens/s, {plots.clock_of(runs)} | ratio | step, device ms | of it loss "
        "| MFU | MFU by 6N |",
        f"|{'---|' * same}---|---|---|{'---|' * checkpointing}{'--:|' * (4 + horizons)}---|{'--:|' * 11}",
    ]
    baseline = plots.baseline_of(runs)
    bases = {
        (run.setting, run.summary["seed"]): run.summary
        for run in runs
        if run.summary["loss"] == baseline and not run.mixture
    }
    for run, name in sorted(named, key=lambda entry: (*_order(*entry), entry[0].horizon or 0)):
        s = run.summary
        base = {} if run.mixture else bases.get((run.setting, s["seed"]), {})
        cells = [
            *([s["run_name"]] if same else []),
            s["model"],
            s["size"],
            name,
            *([_checkpointed(run)] if checkpointing else []),
            str(s["batch_size"]),
            str(s["seq_len"]),
            _show(s["vocab_size"], ","),
            str(s["seed"]),
            *([_steps(run)] if horizons else []),
            s["status"] + (", a mixture" if run.mixture else ""),
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
            _show(s.get("mfu_6n"), ".1%"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    measured = next((run.summary for run in runs if run.summary["peak_memory_is"]), None)
    lines += [
        "",
        f"Train loss: mean of the last {LAST} steps (of all, where there are fewer). {_speed_is(runs)} Step and loss: "
        "medians over the steps after the warm-up. Peak memory: "
        f"{measured['peak_memory_is'] if measured else 'not measured'}. Ratios: to `{baseline}` of the same "
        "setting and seed.",
        "",
    ]
    lines += [
        f"* {run.summary['model']} x {name}, B = {run.summary['batch_size']}: {run.summary['status']}: "
        f"{run.summary.get('reason') or 'no reason was recorded'}"
        for run, name in named
        if not run.finished
    ]
    lines += [
        f"* **{run.name} is a mixture: its processes differ in {', '.join(run.mixture)}; it takes part in no verdict**"
        for run in runs
        if run.mixture
    ]
    return [*lines, *_host_lines(runs)]


def _steps(run: Run) -> str:
    """Of a run, and of its schedule where that is longer."""
    steps, horizon = run.summary["steps"], run.horizon
    return f"{steps} of {horizon}" if horizon and horizon != steps else str(steps)


def _speed_is(runs: Sequence[Run]) -> str:
    """What tokens/s are, and what they leave out."""
    clock = plots.clock_of(runs)
    if clock == WALL_CLOCK:
        return "Tokens/s: by wall clock, of all steps after the warm-up."
    left_out = "which leaves out what the host does between steps: to be measured again by wall clock"
    if clock == plots.DEVICE_TIME:
        return f"Tokens/s: of a step's median device time, {left_out}."
    names = [r.name for r in runs if r.summary["tokens_per_second"] and r.summary.get("tokens_per_second_is") is None]
    return f"Tokens/s: by wall clock; of {', '.join(names)} of a step's median device time, {left_out}."


def _host_lines(runs: Sequence[Run]) -> list[str]:
    """Runs of which what the host does between steps is a part of the speed."""
    return [
        f"* **the host decides the speed of {run.name}**: of a step's {run.summary['wall_step_ms']:.2f} ms by wall "
        f"clock {run.summary['host_step_ms']:.2f} are not the device's"
        for run in runs
        if host_decides(run.summary)
    ]


def course_lines(runs: Sequence[Run]) -> list[str]:
    """Where a run ended early: curves over the steps that two have, of two losses or of two seeds of one."""
    if not any(run.losses and not run.finished for run in runs):
        return []
    names = dict(zip((run.name for run in runs), backend_names([r.summary for r in runs]), strict=True))
    baseline, rows = plots.baseline_of(runs), []
    for a, b in combinations(sorted(runs, key=lambda run: run.summary["loss"] != baseline), 2):
        same_loss, same_seed = names[a.name] == names[b.name], _seed(a) == _seed(b)
        if same_loss == same_seed or not alike(a, b):
            continue
        found = comparison(b, a)
        if found is None or found.last is None or found.steps * found.every < LEAST_STEPS:
            continue
        validated = max(dict(a.validations).keys() & dict(b.validations).keys(), default=None)
        valid = [None if validated is None else dict(run.validations)[validated] for run in (b, a)]
        cells = [
            a.summary["model"],
            f"{names[b.name]}, seed {_seed(b)}",
            f"{names[a.name]}, seed {_seed(a)}",
            str(found.steps),
            _show(found.largest, ".4f"),
            f"{found.last:+.4f}",
            _show(validated, ","),
            *(_show(value, ".2f") for value in valid),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    if not rows:
        return []
    return [
        "## Over the steps that two runs have",
        "",
        f"| model | run | against | steps | largest difference (mean of {SMOOTHED_STEPS} steps), nats "
        f"| mean of the last {LAST} steps, difference | validated at step | perplexity | against |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|",
        *rows,
        "",
        "Two seeds see other batches: their curves differ by the batches' noise as well.",
        "",
    ]


def _seed(run: Run) -> int:
    return int(run.summary["seed"])


def _filter_lines(runs: Sequence[Run]) -> list[str]:
    """What filters kept and dropped, means over the last steps of each run."""
    rows = []
    for run, name in zip(runs, backend_names([run.summary for run in runs]), strict=True):
        if run.statistics:
            last = {key: mean_of_last(curve) for key, curve in run.statistics.items()}
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
    environment = next((run.environment for run in runs if run.environment and not run.mixture), {})
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
        "| criterion | model | loss | against | value | 90 % interval | n | asked | verdict |",
        "|---|---|---|---|--:|--:|--:|--:|---|",
    ]
    order = list(dict.fromkeys(verdict.criterion.name for verdict in found))
    for v in sorted(found, key=lambda v: (order.index(v.criterion.name), v.against == "standard")):
        form = v.criterion.form
        words = "; ".join(filter(None, [v.remark, v.setting]))
        cells = [
            v.criterion.name,
            v.model,
            v.backend,
            v.against or "-",
            _show(v.value, form),
            "-" if v.low is None or v.high is None else f"{v.low:{form}} to {v.high:{form}}",
            str(v.n),
            v.criterion.bound,
            f"**{v.verdict}**" + (f" ({words})" if words else ""),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _rules(runs: Sequence[Run], found: Sequence[Verdict]) -> list[str]:
    """How verdicts were come by, and what of that was changed after results were seen."""
    lines = [RULES, ""]
    if any(verdict.criterion.name.startswith("MVE") for verdict in found):
        lines += [MVE_CHANGED, ""]
    if any(run.summary["tokens_per_second"] and "tokens_per_second_is" not in run.summary for run in runs):
        lines += [RULES_CHANGED, ""]
    return lines


def _branch_lines(found: Sequence[Verdict]) -> list[str]:
    return [f"* {branch}: **{word}** ({figures})" for branch, word, figures in branches(found)]


def _bottleneck_lines(runs: Sequence[Run], breakdowns: Sequence[dict[str, Any]]) -> list[str]:
    """The largest part of time and of memory with our loss, and the most that a loss without cost could give."""
    environment = next((run.environment for run in runs if run.environment and not run.mixture), {})
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
    firsts: dict[tuple[str, str, str], tuple[Run, float, float]] = {}
    for run, name in zip(runs, backend_names([run.summary for run in runs]), strict=True):
        share, bound = loss_time_share(run), free_loss_speed_up(run)
        counts = run.finished and not run.mixture and run.summary["loss"] in (plots.baseline_of(runs), *OURS)
        if counts and share is not None and bound is not None:
            firsts.setdefault((run.summary["model"], name, _checkpointed(run)), (run, share, bound))
    return [
        f"* {model} x {name}, B = {run.summary['batch_size']}, T = {run.summary['seq_len']}, "
        f"V = {run.summary['vocab_size']:,}, checkpointing {checkpointing}: the loss takes {share:.1%} of a step; "
        f"without any cost it would be {bound:.3f} x as fast."
        for (model, name, checkpointing), (run, share, bound) in firsts.items()
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
