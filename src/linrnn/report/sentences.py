"""The sentences of a report: what ran, what differs and by how much; what its figures mean, and what limits them."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from linrnn.core.machine import GIB
from linrnn.models.facts import model_in_words
from linrnn.report.metrics import LEAST_STEPS
from linrnn.report.plots import NO_SPEED, clock_of
from linrnn.report.runs import SETTING, Run, backend_names, environment_of
from linrnn.report.targets import Verdict
from linrnn.report.verdicts import CONTROL, EXACT, baseline_of
from linrnn.runs.figures import NOT_MEASURED, WALL_CLOCK, host_decides, uneven_steps, waits_between_steps
from linrnn.runs.origins import commit_in_words
from linrnn.runs.summary import MEAN_OF_LAST

SAME_SPEED = 0.02  # an interval of tokens/s that stays within this of 1 is called the same speed
SAME_MEMORY = 0.01  # two ratios of memory that are this near are called the same
MOST = 4  # values of a key that the second sentence names
FOLLOWING = {"data_fingerprint", "n_parameters", "steps", "horizon", "training", "origin"}  # unnamed: they follow
ON_CONTROL = (
    f"`{CONTROL}` is the noise-floor run: `compiled`, whose gradient of the hidden states moves by one unit in the "
    "last place in every step. Its difference from `compiled` is rounding noise. A loss that differs no more shows no "
    "difference of its own."
)
FREE_LOSS = "The last column is the most that a faster loss could give: a step as fast as if the loss took no time."
KEPT = f"Shares of softmax entries kept and of mass not kept are by token, means of the last {MEAN_OF_LAST} steps."
ABBREVIATIONS = [
    "n: pairs of runs behind a value. B: micro-batch size, in sequences. T: tokens of a sequence. V: vocabulary size.",
    "nats: the unit of a loss with the natural logarithm. Perplexity is e to the loss.",
    "MFU: model FLOPs utilisation, the share of the GPU's peak rate that the model's own FLOPs take. *By 6N* counts "
    "6 FLOPs for each of N parameters and each token, and adds attention and recurrence. A CPU run has neither.",
]


# --------------------------------------------------------------------------------------- the first three sentences
def opening(runs: Sequence[Run], compared: Sequence[Verdict]) -> list[str]:
    """What ran, what differs among the runs, and how far the most memory-efficient loss is from the baseline.

    Args:
        compared: comparisons without targets.
    """
    several = len(set(backend_names([run.summary for run in runs]))) > 1
    chosen = _leanest(compared) if several else {}
    return [_what_ran(runs), _what_differs(runs), _by_how_much(runs, chosen) if chosen else _of_one_loss(runs)]


def _what_ran(runs: Sequence[Run]) -> str:
    models = list(dict.fromkeys((run.summary["model"], run.summary["size"]) for run in runs))
    named = [f"{model_in_words(model)} ({size})" for model, size in models]
    of = " and ".join(named) if len(named) < 3 else f"{len(named)} models"
    gpus = list(dict.fromkeys(gpu["name"] for gpu in environment_of(runs).get("gpus", [])))
    cpu = all(run.summary.get("device") == "cpu" for run in runs)
    where = " on a CPU" if cpu else f" on {' and '.join(gpus)}" if gpus else ""
    found = Counter(run.summary["status"] for run in runs)
    others = ", ".join(f"{n} {status.replace('_', ' ')}" for status, n in found.items() if status != "finished")
    ended = f"{found['finished']} finished, {others}" if others else "all finished" if len(runs) > 1 else "finished"
    return f"{len(runs)} run{'s' * (len(runs) > 1)} of {of}{where}: {ended}."


def _what_differs(runs: Sequence[Run]) -> str:
    """The losses, the seeds, and the keys of the setting in which runs differ."""
    if len(runs) == 1:
        return f"loss={runs[0].summary['loss']}; there is no other run to compare it with."
    values: dict[str, Sequence[Any]] = {
        "loss": backend_names([run.summary for run in runs]),
        "seed": [run.summary["seed"] for run in runs],
    }
    values |= dict(zip(SETTING, zip(*(run.setting for run in runs), strict=True), strict=True))
    differing = {key: list(dict.fromkeys(own)) for key, own in values.items() if key not in FOLLOWING}
    words = [
        f"{key} ({', '.join(map(str, own)) if len(own) <= MOST else f'{len(own)} values'})"
        for key, own in differing.items()
        if len(own) > 1
    ]
    return f"They differ in {'; '.join(words)}." if words else "They do not differ in loss, seed or setting."


def _leanest(compared: Sequence[Verdict]) -> dict[str, Verdict]:
    """By metric the comparisons of the loss with the lowest peak of memory; of several within SAME_MEMORY the fastest.

    They are of the model and setting with most pairs. Where neither was measured: our exact loss, or the first.
    """
    kinds: dict[tuple[str, str], dict[str, dict[str, Verdict]]] = {}
    for v in compared:
        if v.backend != CONTROL:
            kinds.setdefault((v.model, v.setting), {}).setdefault(v.backend, {})[v.target.metric.name] = v
    if not kinds:
        return {}
    most = max(kinds.values(), key=lambda of_kind: sum(v.n for own in of_kind.values() for v in own.values()))
    least = min((memory for own in most.values() if (memory := _value(own, "peak_memory_bytes"))), default=0.0)

    def place(backend: str) -> tuple[bool, float, bool]:
        memory, speed = (_value(most[backend], name) for name in ("peak_memory_bytes", "tokens_per_second"))
        return (memory or 0.0) > least + SAME_MEMORY, -(speed or 0.0), backend.split()[0] != EXACT

    return most[min(most, key=place)]


def _value(own: dict[str, Verdict], metric: str) -> float | None:
    return own[metric].value if metric in own else None


def _by_how_much(runs: Sequence[Run], own: dict[str, Verdict]) -> str:
    first, memory, speed = next(iter(own.values())), _value(own, "peak_memory_bytes"), own.get("tokens_per_second")
    several = len({run.summary["model"] for run in runs}) > 1
    told = f"With {model_in_words(first.model)}, {first.backend}" if several else first.backend
    if memory is None and (speed is None or speed.value is None):
        told += f" beside {first.against}: memory and speed are compared on a GPU alone"
    else:
        used = "of unmeasured memory runs beside" if memory is None else f"uses {_share(memory)}"
        told += f" {used} {first.against} {_speed(speed)}"
    return f"{told}; {_losses(own)}."


def _share(ratio: float) -> str:
    if abs(ratio - 1) < SAME_MEMORY:
        return "as much memory as"
    return f"{abs(1 - ratio) * 100:.0f} % {'less' if ratio < 1 else 'more'} memory than"


def _speed(v: Verdict | None) -> str:
    """The speed beside the baseline's, as words that follow its name."""
    if v is None or v.value is None:
        return "(speed not compared)"
    if v.low is None or v.high is None:
        return f"at {v.value:.3f} times its speed (one pair)"
    apart = max(abs(v.low - 1), abs(v.high - 1))
    if apart <= SAME_SPEED:
        return f"at the same speed (within {max(math.ceil(apart * 100), 1)} %)"
    chance = ", which may be chance" if v.low <= 1 <= v.high else ""
    interval = f"90 % interval {v.low:.3f} to {v.high:.3f}, {v.n} pairs"
    return f"at {v.value:.3f} times its speed{chance} ({interval})"


def _losses(own: dict[str, Verdict]) -> str:
    for metric, words in (("valid_loss_nats", "validation"), ("train_loss_nats", "training")):
        if (v := own.get(metric)) is not None and v.value is not None:
            told = f"its final {words} loss is {abs(v.value):.4f} nats {'higher' if v.value > 0 else 'lower'}"
            if v.low is None or v.high is None:
                return f"{told} (one pair)"
            chance = ", which may be chance" if v.low <= 0 <= v.high else ""
            return f"{told}{chance} (90 % interval {v.low:+.4f} to {v.high:+.4f}, {v.n} pairs)"
    return f"final losses are not compared, which takes runs with one seed and {LEAST_STEPS} steps or more"


def _of_one_loss(runs: Sequence[Run]) -> str:
    """The best run of a group without two losses to compare."""
    best = min((run for run in runs if run.finished), key=lambda run: run.summary["train_loss_nats"], default=None)
    if best is None:
        return "There is nothing to compare, because no run finished."
    s = best.summary
    figures = [f"a training loss of {s['train_loss_nats']:.4f} nats"] if s["train_loss_nats"] is not None else []
    figures += [f"{s['peak_memory_bytes'] / GIB:.2f} GiB at its peak"] if s["peak_memory_bytes"] else []
    figures += [f"{s['tokens_per_second']:,.0f} tokens/s"] if s["tokens_per_second"] else []
    return f"{best.name} reached {', '.join(figures) or 'its last step'}."


# --------------------------------------------------------------------------------------------------------- the runs
def on_figures(runs: Sequence[Run]) -> str:
    """What the columns of the table of runs mean."""
    peak = next((run.summary["peak_memory_is"] for run in runs if run.summary["peak_memory_is"]), "not measured")
    speed = {
        NOT_MEASURED: "Tokens/s, step times and MFU are not measured, because the runs shared their GPUs.",
        NO_SPEED: "Tokens/s are not measured: no run came past its warm-up.",
        WALL_CLOCK: "Tokens/s are by wall clock, over all steps after the warm-up.",
    }.get(
        clock_of(runs),
        "Tokens/s come from a step's median device time. They leave out the CPU's work between steps and are to be "
        "measured again by wall clock.",
    )
    return (
        f"Train loss is the mean of the last {MEAN_OF_LAST} steps, or of all steps where there are fewer. {speed} The "
        f"times of step and loss are medians over the steps after the warm-up. Peak memory: {peak}. Ratios are to "
        f"`{baseline_of(runs)}` of the same setting and seed."
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
    found = [*failures, *mixtures, *between, *uneven]
    if count := sum(run.gpu_shared for run in runs):
        which = "every run" if count == len(runs) else f"{count} of {len(runs)} runs"
        found.append(
            f"{which} shared its GPU with other runs (`share_gpus=true`): its speed, step time and MFU are not "
            "measured. Its losses and its peak of allocated memory are its own"
        )
    return found


def on_origin(runs: Sequence[Run]) -> list[str]:
    """Device, commit, versions and clocks of the runs, and other processes on their GPUs."""
    environment = environment_of(runs)
    if not environment:
        return ["device, commit and versions are not recorded, because no run started"]
    packages = ", ".join(f"{name} {version}" for name, version in environment.get("packages", {}).items() if version)
    gpus = ", ".join(gpu["name"] for gpu in environment.get("gpus", [])) or environment.get("cpu")
    driver = f", driver {environment['gpu_driver']}" if environment.get("gpu_driver") else ""
    allocator = f", CUDA allocator {environment['cuda_allocator']}" if environment.get("cuda_allocator") else ""
    lines = [
        f"device: {gpus}{driver}{allocator}, Python {environment.get('python')}",
        f"commit: {commit_in_words(environment.get('git'))}",
        f"versions: {packages}",
    ]
    states = {run.name: state for run in runs if not run.gpu_shared and (state := run.summary.get("gpu_state"))}
    if clocks := [state["sm_mhz"] for state in states.values() if state["sm_mhz"] is not None]:
        lines.append(f"SM clock at the end of training: {min(clocks):,.0f} to {max(clocks):,.0f} MHz")
    cards = {state["card"] for state in states.values() if state.get("card")}
    if len(cards) > 1:
        lines.append(
            f"**{len(cards)} GPUs of this kind made these runs** (`gpu_state.card` in runs.json): a ratio of two runs' "
            "speeds may also hold the GPUs' difference"
        )
    others = {name: state["other_processes"] for name, state in states.items() if state["other_processes"]}
    return lines + [f"**{name}: {count} other processes computed on the GPU**" for name, count in others.items()]
