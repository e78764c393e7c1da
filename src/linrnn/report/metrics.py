"""What two runs, or two searches for the largest batch, are compared by: one Metric each. A new metric goes here."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from linrnn.report.curves import SMOOTHED_STEPS, largest_difference
from linrnn.report.runs import Run
from linrnn.runs.figures import by_wall_clock, host_decides

LEAST_STEPS = 50  # a run needs so many steps for its losses to be compared: train_loss_nats is a mean over 50
LEAST_MEASURED = 5  # a run needs so many steps after the warm-up for its times to be compared
DEVICE_TIME = "by the device time of a step: to be measured again by wall clock"


@dataclass(frozen=True)
class Compared:
    """The comparison of a run with the baseline's run of the same seed.

    Attributes:
        value: their ratio or difference.
        doubt: a reason why the value decides nothing; empty if there is none.
        note: what else a reader must know.
        limits: the lowest and highest ratio that is possible if the two differ only in the loss.
    """

    value: float
    doubt: str = ""
    note: str = ""
    limits: tuple[float, float] | None = None


Compare = Callable[[Run, Run], Compared | None]


def speed_ratio(run: Run, base: Run) -> Compared | None:
    """Ratio of tokens/s of two GPU runs; None if one is too short, or their clocks differ."""
    value, other = (one.summary.get("tokens_per_second") for one in (run, base))
    clock, same_clock = (by_wall_clock(one.summary) for one in (run, base))
    if not value or not other or not timed(run, base) or clock != same_clock:
        return None
    least, most = free_loss_speed_up(run), free_loss_speed_up(base)
    return Compared(
        value / other,
        doubt="" if clock else DEVICE_TIME,
        note="CPU-bound" if host_decides(run.summary) or host_decides(base.summary) else "",
        limits=(1 / least, most) if least and most else None,
    )


def speed_ratio_across_batches(run: Run, base: Run) -> Compared | None:
    """As :func:`speed_ratio`, for runs that differ in more than the loss: without limits."""
    found = speed_ratio(run, base)
    return found and replace(found, limits=None)


def _memory_ratio(run: Run, base: Run) -> Compared | None:
    """Ratio of the peaks allocated on the GPU. None on a CPU, where a process holds more than the step."""
    value, other = ((one.summary.get("memory_bytes") or {}).get("peak") for one in (run, base))
    return Compared(value / other) if value is not None and other else None


def _curve_difference(run: Run, base: Run) -> Compared | None:
    """The largest difference between two loss curves."""
    largest, every = largest_difference(run.losses, base.losses)
    if not learnt(run, base) or largest is None:
        return None
    return Compared(largest, note=f"every {every}th step logged" if every > 1 else "")


def _backward_speed_up(run: Run, base: Run) -> Compared | None:
    """Speed-up of the output layer's own backward kernels."""
    own, other = ((one.summary.get("loss_layer_ms") or {}).get("backward") for one in (run, base))
    return Compared(other / own) if own and other and timed(run, base) else None


def free_loss_speed_up(run: Run) -> float | None:
    """How many times as fast a run's steps would be if the output layer took no time; None if unknown."""
    of_loss, summary = run.summary.get("loss_layer_ms"), run.summary
    step = summary["wall_step_ms"] or summary["step_time_ms_median"]
    if not of_loss or not step:
        return None
    rest = step - sum(of_loss.values())
    return step / rest if rest > 0 else None


def learnt(run: Run, base: Run) -> bool:
    """Whether losses can be compared. Runs of a few steps, made for speed and memory, say nothing about them."""
    return min(run.summary.get("steps") or 0, base.summary.get("steps") or 0) >= LEAST_STEPS


def timed(run: Run, base: Run) -> bool:
    """Whether times can be compared. A median of a step or two says nothing. A CPU may be shared with others."""
    measured = min(one.summary["measured_steps"] or 0 for one in (run, base))  # none on a shared GPU
    return measured >= LEAST_MEASURED and run.on_gpu and base.on_gpu


@dataclass(frozen=True)
class Metric:
    """Something that two runs, or two searches for the largest batch, are compared by.

    Attributes:
        name: in a target.
        words: for a reader.
        form: the format of values.
        needs: what must be run to measure it.
        compare: compares two runs of one seed; None: :mod:`linrnn.report.verdicts` says how.
        ratio: whether values are ratios to the baseline; otherwise they are differences, or the run's own.
        by_chance: whether values vary from run to run, as speeds and losses do. Memory does not: one run decides.
        of_losses: whether it compares losses, not time or memory.
        alone: whether a run has it without a baseline.
        always: whether a report without targets shows it.
    """

    name: str
    words: str
    form: str
    needs: str
    compare: Compare | None = None
    ratio: bool = True
    by_chance: bool = True
    of_losses: bool = False
    alone: bool = False
    always: bool = False


OF_TIMES: tuple[Compare, ...] = (speed_ratio, speed_ratio_across_batches, _backward_speed_up)
AT_FASTEST, AT_LARGEST = "tokens_per_second_at_fastest_batch", "tokens_per_second_at_max_sequences"
BATCH = "max_sequences"
_BOTH = "runs of both losses in one setting"
_STEPS = f"of {LEAST_MEASURED} steps after the warm-up, on a GPU"
_SEARCHED = "a search by scripts/find_max_batch.py for both"
_LOSSES: dict[str, Any] = {"needs": f"{_BOTH}, of {LEAST_STEPS} steps", "ratio": False, "of_losses": True}
_SHARE: dict[str, Any] = {"form": ".1%", "needs": "a run on a GPU", "by_chance": False, "alone": True}
_PEAK: dict[str, Any] = {"compare": _memory_ratio, "by_chance": False, "always": True}
_CURVES = f"training loss, largest difference of the curves (mean of {SMOOTHED_STEPS} steps), nats"
_LOGGED = {"needs": f"{_LOSSES['needs']}, at least every {SMOOTHED_STEPS // 2}th of them logged"}
_BATCHES = f"runs of both losses at the same several batches, {_STEPS}"
_TIMED = f"{_BOTH}, {_STEPS}"


def _difference(key: str, words: str, form: str, *, always: bool = False) -> Metric:
    """The difference of `key` between two trained runs."""

    def compare(run: Run, base: Run) -> Compared | None:
        value, other = run.summary.get(key), base.summary.get(key)
        known = value is not None and other is not None and learnt(run, base)
        return Compared(value - other) if known else None  # type: ignore[operator]

    return Metric(key, words, form, compare=compare, always=always, **_LOSSES)


METRICS = {
    metric.name: metric
    for metric in (
        Metric("peak_memory_bytes", "peak memory, ratio", ".3f", f"{_BOTH}, on a GPU", **_PEAK),
        Metric("tokens_per_second", "tokens/s at the same batch, ratio", ".3f", _TIMED, speed_ratio, always=True),
        Metric(BATCH, "largest batch under the budget, ratio", ".2f", _SEARCHED, by_chance=False),
        Metric(AT_LARGEST, "tokens/s, each at its own largest batch, ratio", ".3f", _SEARCHED),
        Metric(AT_FASTEST, "tokens/s, each at its fastest batch, equal tokens, ratio", ".3f", _BATCHES),
        _difference("train_loss_nats", "final training loss, difference, nats", "+.4f", always=True),
        _difference("valid_loss_nats", "validation loss, difference, nats", "+.4f", always=True),
        _difference("valid_perplexity", "validation perplexity, difference", "+.3f"),
        Metric("curve_difference", _CURVES, ".4f", compare=_curve_difference, **_LOSSES | _LOGGED),
        Metric("backward_speed_up", "backward pass of the output layer, speed-up", ".2f", _TIMED, _backward_speed_up),
        Metric("loss_layer_share", "output layer's share of peak memory, gradients counted", **_SHARE),
        Metric(
            "loss_layer_share_without_gradients", "output layer's share of peak memory, without gradients", **_SHARE
        ),
    )
}
