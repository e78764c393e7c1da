"""The sentences of a report: what its figures mean, where runs were made, what limits their speed, and what is next."""

from collections.abc import Sequence

from linrnn.report.plots import NO_SPEED, clock_of
from linrnn.report.runs import Run, environment_of
from linrnn.report.targets import RULES, Verdict
from linrnn.report.verdicts import CONTROL, baseline_of
from linrnn.runs.figures import (
    NOT_MEASURED,
    WALL_CLOCK,
    host_decides,
    uneven_steps,
    waits_between_steps,
)
from linrnn.runs.origins import commit_in_words
from linrnn.runs.summary import MEAN_OF_LAST

ON_CONTROL = (
    f"`{CONTROL}` is the noise-floor run: `compiled`, whose gradient of the hidden states moves by one unit in the "
    "last place in every step. Its difference from `compiled` is rounding noise. A loss that differs no more shows no "
    "difference of its own."
)
FREE_LOSS = "The last column is the most that a faster loss could give: a step as fast as if the loss took no time."
ABBREVIATIONS = (
    "n: pairs of runs behind a value. B: micro-batch size, in sequences. T: tokens of a sequence. V: vocabulary size.",
    "nats: the unit of a loss with the natural logarithm. Perplexity is e to the loss.",
    "MFU: model FLOPs utilisation, the share of the GPU's peak rate that the model's own FLOPs take. *By 6N* counts "
    "6 FLOPs for each of N parameters and each token, and adds attention and recurrence. A CPU run has neither.",
)


# --------------------------------------------------------------------------------------------------------- the runs
def on_figures(runs: Sequence[Run]) -> str:
    """A sentence on the columns of the table of runs."""
    measured = next((run.summary for run in runs if run.summary["peak_memory_is"]), None)
    return (
        f"Train loss is the mean of the last {MEAN_OF_LAST} steps, or of all steps where there are fewer. "
        f"{_on_speed(runs)} The times of step and loss are medians over the steps after the warm-up. Peak memory: "
        f"{measured['peak_memory_is'] if measured else 'not measured'}. Ratios are to `{baseline_of(runs)}` of "
        "the same setting and seed."
    )


def _on_speed(runs: Sequence[Run]) -> str:
    """How tokens/s were measured, and what they leave out."""
    clock = clock_of(runs)
    if clock == NOT_MEASURED:
        return "Tokens/s, step times and MFU are not measured, because the runs shared their GPUs."
    if clock == NO_SPEED:
        return "Tokens/s are not measured: no run came past its warm-up."
    if clock == WALL_CLOCK:
        return "Tokens/s are by wall clock, over all steps after the warm-up."
    return (
        "Tokens/s come from a step's median device time. They leave out the CPU's work between steps and are to be "
        "measured again by wall clock."
    )


def on_runs(runs: Sequence[Run]) -> list[str]:
    """Remarks on single runs: failures, mixtures of origins, time that passes between steps, and uneven steps."""
    failures, mixtures, between, uneven = [], [], [], []
    for run in runs:
        s, name = run.summary, run.name
        if not run.finished:
            failures.append(f"{name}: {s['status']}: {s.get('reason') or 'no reason was recorded'}")
        if run.mixture:
            differing = ", ".join(run.mixture)
            mixtures.append(f"**{name} is a mixture: its processes differ in {differing}; no result counts it**")
        if waits_between_steps(s):
            host, wall = f"{s['host_step_ms']:.2f} ms", f"{s['wall_step_ms']:.2f} ms"
            between.append(
                f"**{name} is CPU-bound**: {host} of a step's {wall} by wall clock are not the device's"
                if host_decides(s)
                else f"{host} of the {wall} from step to step of {name} pass between its steps, for data, metrics and "
                "the console"
            )
        if words := uneven_steps(s):
            uneven.append(f"{name}: {words}")
    return [*failures, *mixtures, *between, *uneven, *_on_sharing(runs)]


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
        *_on_gpus(runs),
    ]


def _on_gpus(runs: Sequence[Run]) -> list[str]:
    """The clocks of the runs' GPUs, and other processes on them."""
    alone = [run for run in runs if not run.gpu_shared]
    states = [(run.summary["run_name"], state) for run in alone if (state := run.summary.get("gpu_state"))]
    clocks = [state["sm_mhz"] for _, state in states if state["sm_mhz"] is not None]
    lines = [f"SM clock at the end of training: {min(clocks):,.0f} to {max(clocks):,.0f} MHz"] if clocks else []
    cards = {state["card"] for _, state in states if state.get("card")}
    if len(cards) > 1:
        lines.append(
            f"**{len(cards)} GPUs of this kind made these runs** (`gpu_state.card` in runs.json): a ratio of two runs' "
            "speeds may also hold the GPUs' difference"
        )
    return lines + [
        f"**{name}: {state['other_processes']} other processes computed on the GPU**"
        for name, state in states
        if state["other_processes"]
    ]


# ----------------------------------------------------------------------------------------------------- the targets
def on_rules(found: Sequence[Verdict]) -> list[str]:
    """How results are reached."""
    return [RULES, ON_CONTROL] if any(verdict.backend == CONTROL for verdict in found) else [RULES]
