"""The sentences of a report: what its figures mean, where runs were made, what limits their speed, and what is next."""

from collections.abc import Sequence
from typing import Any

from linrnn.runs.environment import commit_in_words
from linrnn.runs.figures import (
    NOT_MEASURED,
    WALL_CLOCK,
    by_wall_clock,
    host_decides,
    on_cpu,
    uneven_steps,
    waits_between_steps,
)
from linrnn.runs.mixtures import same_origin
from linrnn.runs.step_parts import shares_of_step
from linrnn.runs.summary import MEAN_OF_LAST
from linrnn.study import plots
from linrnn.study.criteria import (
    FINAL_ADDED,
    FINAL_LOSS,
    MVE_CHANGED,
    OPEN,
    RESTATED,
    RULES,
    RULES_CHANGED,
    VALID_LOSS,
    Verdict,
)
from linrnn.study.hypotheses import branches
from linrnn.study.report.own_runs import YARDSTICK, are_of_study
from linrnn.study.results import Run, backend_names, environment_of
from linrnn.study.verdicts import CONTROL

SATURATED = 0.9  # above this share of the device's peak a larger batch cannot help
ON_CONTROL = (
    f"`{CONTROL}` is the control of loss curves: `compiled`, whose gradient of the hidden states moves by one unit in "
    "the last place in every step. Its difference from `compiled` is what rounding alone makes of equal losses. A loss "
    "that differs no more than the control shows no difference of its own."
)
ON_DROPPED = (
    "`cce_filter` drops small entries in these runs (`loss.filter_unbiased=false`), so its gradients are biased. By "
    "default it estimates these entries from a sample."
)
FREE_LOSS = "The last column is the most that a faster loss could give: a step as fast as if the loss took no time."
NO_BOTTLENECK = f"The next bottleneck: {OPEN}; scripts/breakdown.py finds it."
FOLLOW_UPS = (
    "Follow-up 2 (FP8 or INT4 scan): open. This harness has no such scan.",
    "Follow-up 5 (shared projections): scripts/bench_steps.py with model.shared_projection_rank=… compares steps, "
    "sweep=shared_projections losses.",
)


# --------------------------------------------------------------------------------------------------------- the runs
def on_figures(runs: Sequence[Run]) -> str:
    """A sentence on the columns of the table of runs."""
    measured = next((run.summary for run in runs if run.summary["peak_memory_is"]), None)
    return (
        f"Train loss is the mean of the last {MEAN_OF_LAST} steps, or of all steps where there are fewer. "
        f"{_on_speed(runs)} The times of step and loss are medians over the steps after the warm-up. Peak memory: "
        f"{measured['peak_memory_is'] if measured else 'not measured'}. Ratios are to `{plots.baseline_of(runs)}` of "
        "the same setting and seed."
    )


def _on_speed(runs: Sequence[Run]) -> str:
    """How tokens/s were measured, and what they leave out."""
    clock = plots.clock_of(runs)
    if clock == WALL_CLOCK:
        return "Tokens/s are by wall clock, over all steps after the warm-up."
    if clock == NOT_MEASURED:
        return "Tokens/s, step times and MFU are not measured, because the runs shared their GPUs."
    if clock == plots.NO_SPEED:
        return "Tokens/s are not measured: no run came past its warm-up."
    device = (
        "come from a step's median device time. They leave out what the host does between steps and are to be measured "
        "again by wall clock."
    )
    if clock == plots.DEVICE_TIME:
        return f"Tokens/s {device}"
    names = [r.name for r in runs if r.summary["tokens_per_second"] and not by_wall_clock(r.summary)]
    return f"Tokens/s are by wall clock. Those of {', '.join(names)} {device}"


def on_runs(runs: Sequence[Run]) -> list[str]:
    """Remarks on single runs: failures, mixtures of origins, time that passes between steps, and uneven steps."""
    mixtures = [
        f"**{run.name} is a mixture: its processes differ in {', '.join(run.mixture)}; it takes part in no verdict**"
        for run in runs
        if run.mixture
    ]
    slowed = [
        f"**the host decides the speed of {run.name}**: {run.summary['host_step_ms']:.2f} ms of a step's "
        f"{run.summary['wall_step_ms']:.2f} ms by wall clock are not the device's"
        for run in runs
        if host_decides(run.summary)
    ]
    between = [
        f"{run.summary['host_step_ms']:.2f} ms of the {run.summary['wall_step_ms']:.2f} ms from step to step of "
        f"{run.name} pass between its steps, for data, metrics and the console"
        for run in runs
        if waits_between_steps(run.summary) and on_cpu(run.summary)
    ]
    uneven = [f"{run.name}: {words}" for run in runs if (words := uneven_steps(run.summary))]
    return [*_on_failures(runs), *mixtures, *slowed, *between, *uneven, *_on_sharing(runs)]


def _on_failures(runs: Sequence[Run]) -> list[str]:
    """What became of each run that did not finish. Where model, loss and batch are those of several runs, its name."""
    names = backend_names([run.summary for run in runs])
    kinds = [
        f"{run.summary['model']} x {name}, B = {run.summary['batch_size']}"
        for run, name in zip(runs, names, strict=True)
    ]
    return [
        f"{kind if kinds.count(kind) == 1 else f'{kind}, {run.name}'}: {run.summary['status']}: "
        f"{run.summary.get('reason') or 'no reason was recorded'}"
        for run, kind in zip(runs, kinds, strict=True)
        if not run.finished
    ]


def _on_sharing(runs: Sequence[Run]) -> list[str]:
    """How many runs shared their GPUs with others."""
    count = sum(run.gpu_shared for run in runs)
    if not count:
        return []
    which = "every run" if count == len(runs) else f"{count} of {len(runs)} runs"
    return [
        f"{which} shared its GPU with other runs (`share_gpus=true`): its speed, step time and MFU are not measured. "
        "Its losses and its peak of allocated memory are its own"
    ]


def on_origin(runs: Sequence[Run]) -> list[str]:
    """Device, commit, versions and clocks of the runs."""
    environment = environment_of(runs)
    if not environment:
        return ["device, commit and versions are not recorded, because no run started"]
    packages = ", ".join(f"{name} {version}" for name, version in environment.get("packages", {}).items() if version)
    gpus = ", ".join(gpu["name"] for gpu in environment.get("gpus", [])) or environment.get("cpu")
    driver = f", driver {environment['gpu_driver']}" if environment.get("gpu_driver") else ""
    allocator = f", CUDA allocator {environment['cuda_allocator']}" if environment.get("cuda_allocator") else ""
    return [
        f"device: {gpus}{driver}{allocator}, Python {environment.get('python')}",
        f"commit: {commit_in_words(environment.get('git'))}",
        f"versions: {packages}",
        *_on_kernels(environment),
        *_on_gpus(runs),
    ]


def _on_kernels(environment: dict[str, Any]) -> list[str]:
    """Where the configurations of FLA's kernels are from. Earlier versions and CPUs have no record of them."""
    if not (choices := environment.get("kernel_choices")):
        return []
    first = f"{choices['first']} in their first configuration, " if choices.get("first") else ""
    return [
        f"kernel choices of the first run: {choices['fingerprint']} ({choices['stored']} stored, {choices['near']} "
        f"stored for another batch, {first}{choices['tuned']} tuned at the run)"
    ]


def _on_gpus(runs: Sequence[Run]) -> list[str]:
    """The clocks of the runs' GPUs, and other processes on them."""
    alone = [run for run in runs if not run.gpu_shared]
    states = [(run.summary["run_name"], state) for run in alone if (state := run.summary.get("gpu_state"))]
    clocks = [state["sm_mhz"] for _, state in states if state["sm_mhz"] is not None]
    lines = [f"SM clock at the end of training: {min(clocks):,.0f} to {max(clocks):,.0f} MHz"] if clocks else []
    cards = {state["card"] for _, state in states if state["card"]}
    if len(cards) > 1:
        lines.append(
            f"**{len(cards)} GPUs of this kind made these runs** (`gpu_state.card`): a ratio of two runs' "
            "speeds may also hold the GPUs' difference"
        )
    return lines + [
        f"**{name}: {state['other_processes']} other processes computed on the GPU**"
        for name, state in states
        if state["other_processes"]
    ]


# ----------------------------------------------------------------------------------------------------- the verdicts
def on_count(found: Sequence[Verdict]) -> str:
    """The number of verdicts of each kind. The control's are not counted: it is no loss that is judged."""
    found = [verdict for verdict in found if verdict.backend != CONTROL]
    counts = {word: sum(v.verdict == word for v in found) for word in ("met", "missed", "undecided")}
    missing = sum(v.verdict == OPEN for v in found)
    words = [f"{count} {word}" for word, count in counts.items()]
    return f"Verdicts: {', '.join(words)}, {missing} not measured."


def on_rules(runs: Sequence[Run], found: Sequence[Verdict]) -> list[str]:
    """How verdicts are reached, and which rules changed after results were seen."""
    lines = [RULES]
    if any(verdict.backend == CONTROL for verdict in found):
        lines.append(ON_CONTROL)
    unbiased = [options["filter_unbiased"] for run in runs if "filter_unbiased" in (options := _options(run))]
    if unbiased and not any(unbiased):  # where some are, the losses' names tell them apart
        lines.append(ON_DROPPED)
    if not are_of_study(runs):
        return [*lines, YARDSTICK]
    if any(verdict.criterion == VALID_LOSS and verdict.value is not None for verdict in found):
        lines.append(RESTATED)
    if any(verdict.criterion == FINAL_LOSS and verdict.value is not None for verdict in found):
        lines.append(FINAL_ADDED)
    if any(verdict.criterion.name.startswith("MVE") for verdict in found):
        lines.append(MVE_CHANGED)
    if any(run.summary["tokens_per_second"] and not by_wall_clock(run.summary) for run in runs):
        lines.append(RULES_CHANGED)
    return lines


def _options(run: Run) -> dict[str, Any]:
    return run.summary.get("loss_options") or {}


def on_branches(found: Sequence[Verdict]) -> list[str]:
    """The branches of the proposal's "if the hypothesis is wrong", with their answers."""
    return [f"{branch}: **{word}** ({figures})" for branch, word, figures in branches(found)]


# -------------------------------------------------------------------------------------------------- what comes next
def on_breakdowns(runs: Sequence[Run], breakdowns: Sequence[dict[str, Any]]) -> list[str]:
    """What each breakdown names as the largest part of time and of memory."""
    environment = environment_of(runs)
    kinds = {(run.summary["model"], run.summary["size"]) for run in runs}
    lines = []
    for breakdown in breakdowns:
        run = breakdown["run"]
        if (run["model"], run["size"]) not in kinds or not breakdown["time"]["step"]["total"]:
            continue
        if differing := same_origin(environment, breakdown["environment"]):
            lines.append(
                f"{run['run_name']}: its breakdown is left out. It was made with another {', '.join(differing)}."
            )
        else:
            lines.append(" ".join(_on_breakdown(breakdown)))
    return lines


def _on_breakdown(breakdown: dict[str, Any]) -> list[str]:
    """Sentences on the breakdown of one run."""
    run = breakdown["run"]
    shares = {part: found.value for part, found in shares_of_step(breakdown).items()}
    name, share = max(shares, key=lambda part: shares[part]), shares["loss"]
    lines = [
        f"{run['model']} x {run['loss']}, B = {run['batch_size']}, by scripts/breakdown.py: the largest part of a step "
        f"is {name} ({shares[name]:.0%}). The loss takes {share:.1%} of a step. A loss without cost would make the "
        f"step {1 / (1 - share):.3f} x as fast."
    ]
    memory = breakdown["memory"]
    peak, without = (memory.get(key, {}).get("measured") for key in ("peak", "peak/without_loss_layer"))
    if peak and without:
        lines.append(f"Its peak is {peak / without:.3f} x that of the same step without a loss layer.")
    if (breakdown["hardware_utilisation"] or 0) > SATURATED:
        lines.append(
            f"It computes at {breakdown['hardware_utilisation']:.0%} of the GPU's peak rate, so more sequences would "
            "only queue. Freed memory is better spent on longer sequences, a larger model or no checkpointing."
        )
    return lines
