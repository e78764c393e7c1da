"""From which vocabulary on a loss is faster than the baseline: a plot, and sentences."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log
from statistics import median
from typing import Any

from linrnn.report.plots import AXES, clock_of, family, measured, named, panels
from linrnn.report.runs import Run
from linrnn.report.verdicts import baseline_of
from linrnn.runs.figures import WALL_CLOCK, waits_between_steps
from linrnn.runs.intervals import LEAST_PAIRS


@dataclass(frozen=True)
class Crossover:
    """Where a backend and the baseline take the same time.

    Attributes:
        size: along the axis, interpolated between two sizes measured (logarithms of size and ratio).
        faster_above: whether the backend is the faster one above that size.
    """

    size: float
    faster_above: bool


def crossovers(sizes: Sequence[int], ratios: Sequence[float]) -> list[Crossover]:
    """Sizes at which the ratio of times to the baseline's passes 1, from the smallest to the largest.

    Args:
        sizes: distinct and ascending.
        ratios: one per size. A ratio of exactly 1 counts as faster.
    """
    logs, found = [log(ratio) for ratio in ratios], []
    for (size, own), (next_size, next_own) in pairwise(zip(sizes, logs, strict=True)):
        if (own <= 0) != (next_own <= 0):
            found.append(Crossover(size * (next_size / size) ** (own / (own - next_own)), next_own <= 0))
    return found


def speeds_rank(runs: Sequence[Run]) -> bool:
    """Whether the runs' tokens/s can rank losses: all are wall-clock speeds, and little time passes between steps."""
    return clock_of(runs) == WALL_CLOCK and not any(waits_between_steps(run.summary) for run in runs)


def vocabulary_crossover(runs: Sequence[Run]) -> Any:
    """Tokens/s relative to the baseline of the same seed by vocabulary, one panel per model. Above 1 is faster."""
    baseline = baseline_of(runs)
    speed: dict[tuple[Any, ...], float] = {}
    for run in measured(runs):
        if run.summary["loss"] == baseline:
            speed[run.setting, run.summary["seed"]] = run.summary["tokens_per_second"]
    return panels(
        [run for run in runs if (run.setting, run.summary["seed"]) in speed],
        x=lambda s: s["vocab_size"],
        x_label=AXES["vocab_size"][0],
        y=lambda run: run.summary["tokens_per_second"] / speed[run.setting, run.summary["seed"]],
        y_label=f"tokens/s relative to {baseline}",
        title="From which vocabulary on does a loss pay?",
        along="vocab_size",
        level=1.0,
    )


def crossover_lines(runs: Sequence[Run]) -> list[str]:
    """Sentences that say at which vocabulary a loss overtakes the baseline, interpolated between the measured ones.

    They compare whole steps and the loss layer's own kernels. Steps are left out if :func:`speeds_rank` is False.
    """
    baseline, joined = baseline_of(runs), named(family(measured(runs), "vocab_size"))
    times: dict[tuple[str, str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    ranked = speeds_rank([run for run, _ in joined])
    for run, name in joined:
        summary = run.summary
        if summary["activation_checkpointing"] != "none":
            continue
        own = {
            "step": 1 / summary["tokens_per_second"] if ranked else 0.0,
            "loss layer": sum((summary.get("loss_layer_ms") or {}).values()),
        }
        for part, time in own.items():
            if time:
                times[part, summary["model"], name][summary["vocab_size"]].append(time)
    lines: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (part, model, name), own_times in times.items():
        base = times.get((part, model, baseline), {})
        sizes = sorted(own_times.keys() & base.keys())
        if name == baseline or len(sizes) < 2:
            continue
        ratios = [median(own_times[size]) / median(base[size]) for size in sizes]
        n = min(len(side[size]) for size in sizes for side in (own_times, base))
        few = "" if n >= LEAST_PAIRS else f" (n = {n}: inconclusive)"
        lines[model, name].append(f"{part} {_passes(sizes, ratios, baseline)}{few}")
    return [f"* {model} x {name}: {'; '.join(parts)}" for (model, name), parts in lines.items()]


def _passes(sizes: list[int], ratios: list[float], baseline: str) -> str:
    """Where the ratio of times to the baseline's passes 1, or which of the two is faster throughout."""
    passes = [
        f"{'faster' if found.faster_above else 'slower'} than {baseline}'s above about {found.size:,.0f}"
        for found in crossovers(sizes, ratios)
    ]
    always = f"{'faster' if ratios[0] <= 1 else 'slower'} than {baseline}'s from {sizes[0]:,} to {sizes[-1]:,}"
    return ", ".join(passes) or always
