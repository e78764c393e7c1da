"""What a loss is compared with another by: one Metric each. A new metric goes here."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import isclose
from statistics import median
from typing import Any

from linrnn.report.curves import SMOOTHED_STEPS, largest_difference
from linrnn.report.runs import SETTING, Run, backend_names, without_horizon
from linrnn.runs.measurements import by_wall_clock, is_cpu_bound
from linrnn.runs.origins import differing

LEAST_STEPS = 50  # a run needs so many steps for its losses to be compared: train_loss_nats is a mean over 50
LEAST_MEASURED = 5  # a run needs so many steps after the warm-up for its times to be compared
DEVICE_TIME = "by the device time of a step: to be measured again by wall clock"
ANSWER_SETTING = (  # two searches for the largest batch must share these
    *("accumulation_steps", "seq_len", "activation_checkpointing", "chunk_size", "vocab_size", "tie_embeddings"),
    *("precision", "memory_budget_gib", "parallel", "world_size"),
)


@dataclass(frozen=True)
class Pair:
    """The runs of a loss and of the baseline, of one model and setting."""

    own: Sequence[Run]
    base: Sequence[Run]
    backend: str  # the loss's name
    against: str  # the baseline's
    by_setting: Mapping[tuple[Any, ...], Mapping[str, list[Run]]]  # all runs of their kind, by setting and loss
    answers: Sequence[dict[str, Any]] = ()  # of searches for the largest batch (scripts/find_max_batch.py)
    environment: Mapping[str, Any] = field(default_factory=dict)  # the runs' own; answers of another one are left out


@dataclass(frozen=True)
class Sample:
    """What was measured of a metric."""

    values: Sequence[float] = ()  # one per pair of runs; empty: not measured
    remarks: Sequence[str] = ()  # what a reader must know; without values, why there are none
    doubts: Sequence[str] = ()  # reasons why the values decide nothing
    setting: str = ""  # where it was measured, if not in the pair's setting


@dataclass(frozen=True)
class Metric:
    """Something that losses are compared by."""

    name: str  # in a target
    words: str  # for a reader
    measure: Callable[[Pair], list[Sample]]  # its samples for a pair
    form: str  # the format of values
    needs: str  # what must be run to measure it
    ratio: bool = True  # values are ratios to the baseline; otherwise they are differences, or the run's own
    by_chance: bool = True  # values vary from run to run, as speeds and losses do. Memory does not: one run decides
    of_losses: bool = False  # it compares losses, not time or memory
    alone: bool = False  # a run has it without a baseline
    always: bool = False  # a report without targets shows it


# ----------------------------------------------------------------------------------------------- two runs of one seed
Compare = Callable[[Run, Run], Sample | None]  # a run beside the baseline's run of the same seed


def speed_ratio(run: Run, base: Run) -> Sample | None:
    """Ratio of tokens/s of two GPU runs; None if one is too short, or their clocks differ."""
    value, other = (one.summary.get("tokens_per_second") for one in (run, base))
    clock, same_clock = (by_wall_clock(one.summary) for one in (run, base))
    if not value or not other or not timed(run, base) or clock != same_clock:
        return None
    cpu_bound = is_cpu_bound(run.summary) or is_cpu_bound(base.summary)
    return Sample([value / other], ["CPU-bound"] * cpu_bound, [] if clock else [DEVICE_TIME])


def _memory_ratio(run: Run, base: Run) -> Sample | None:
    """Ratio of the peaks allocated on the GPU. None on a CPU, where a process holds more than the step."""
    value, other = ((one.summary.get("memory_bytes") or {}).get("peak") for one in (run, base))
    return Sample([value / other]) if value is not None and other else None


def _curve_difference(run: Run, base: Run) -> Sample | None:
    """The largest difference between two loss curves."""
    largest, every = largest_difference(run.losses, base.losses)
    if not learnt(run, base) or largest is None:
        return None
    return Sample([largest], [f"every {every}th step logged"] if every > 1 else [])


def _backward_speed_up(run: Run, base: Run) -> Sample | None:
    """Speed-up of the output layer's own backward kernels."""
    own, other = ((one.summary.get("loss_layer_ms") or {}).get("backward") for one in (run, base))
    return Sample([other / own]) if own and other and timed(run, base) else None


def learnt(run: Run, base: Run) -> bool:
    """Whether losses can be compared. Runs of a few steps, made for speed and memory, say nothing about them."""
    return min(run.summary.get("steps") or 0, base.summary.get("steps") or 0) >= LEAST_STEPS


def timed(run: Run, base: Run) -> bool:
    """Whether times can be compared. A median of a step or two says nothing. A CPU may be shared with others."""
    measured = min(one.summary["measured_steps"] or 0 for one in (run, base))  # none on a shared GPU
    return measured >= LEAST_MEASURED and run.on_gpu and base.on_gpu


# ------------------------------------------------------------------------------------------------ samples of a pair
def by_seed(compare: Compare) -> Callable[[Pair], list[Sample]]:
    """A value for each seed that both losses ran. If a seed was run several times, its value is the median."""

    def measure(pair: Pair) -> list[Sample]:
        found: dict[int, list[Sample]] = defaultdict(list)
        for run in pair.own:
            for base in pair.base:
                if run.summary["seed"] == base.summary["seed"] and (one := compare(run, base)) is not None:
                    found[run.summary["seed"]].append(one)
        every = [one for of_seed in found.values() for one in of_seed]
        values = [median(value for one in of_seed for value in one.values) for of_seed in found.values()]
        alone = [] if pair.base else [f"{pair.against} has no finished run in this setting"]
        remarks = alone + [word for one in every for word in one.remarks]
        return [Sample(values, remarks, [word for one in every for word in one.doubts])]

    return measure


def _difference(key: str) -> Callable[[Pair], list[Sample]]:
    def compare(run: Run, base: Run) -> Sample | None:
        value, other = run.summary.get(key), base.summary.get(key)
        return Sample([value - other]) if value is not None and other is not None and learnt(run, base) else None

    return by_seed(compare)


def _at_fastest_batch(pair: Pair) -> list[Sample]:
    """Each loss at its fastest batch (by median speed over seeds), among the batches that both ran."""
    own, base = (_by_batch(pair, name) for name in (pair.backend, pair.against))
    common = sorted(own.keys() & base.keys())
    if len(common) < 2:
        return [Sample(remarks=[f"needs {_BATCHES}"])]

    def fastest(by_batch: Mapping[int, list[Run]]) -> int:
        return max(common, key=lambda batch: median(one.summary["tokens_per_second"] for one in by_batch[batch]))

    batch, other = fastest(own), fastest(base)
    [sample] = by_seed(speed_ratio)(replace(pair, own=own[batch], base=base[other]))
    words = f"B = {batch} against {other}, of {', '.join(map(str, common))}"
    return [replace(sample, remarks=[words, *sample.remarks], setting="each at its fastest batch")]


def _by_batch(pair: Pair, backend: str) -> dict[int, list[Run]]:
    """The timed runs by batch that differ from the pair's in loss, seed and what follows from the batch."""
    kind = [key for key in SETTING if key not in ("batch_size", "steps", "horizon")]
    first, found = pair.own[0], defaultdict[int, list[Run]](list)
    for one in (run for backends in pair.by_setting.values() for run in backends.get(backend, [])):
        equal_tokens = isclose(one.summary["tokens"], first.summary["tokens"], rel_tol=0.1)
        if one.values(kind) == first.values(kind) and equal_tokens and timed(one, one):
            found[one.summary["batch_size"]].append(one)
    return found


def _of_searches(pair: Pair, value: Callable[[dict[str, Any]], float | None]) -> list[Sample]:
    """The ratio of a value of two searches for the largest batch, for each setting that both losses searched."""
    run, remarks = pair.own[0].summary, set[str]()
    found: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = defaultdict(dict)
    for answer, name in zip(pair.answers, backend_names(pair.answers), strict=True):
        like = all(answer[key] == run[key] for key in ("model", "size", "activation_checkpointing"))
        like = like and bool(answer["environment"].get("gpus"))  # a CPU's answers are rough
        if like and (others := differing([pair.environment, answer["environment"]])):
            remarks.add(f"measured elsewhere: another {', '.join(others)}")
        elif like:
            # Names tell losses apart by the options that differ among the runs, or among the answers.
            same = all((answer.get(key) or {}) == (run.get(key) or {}) for key in ("loss", "loss_options"))
            setting = (*(answer.get(key) for key in ANSWER_SETTING), without_horizon(answer["training"]))
            found[setting][pair.backend if same else name] = answer
    samples = []
    for answers in found.values():
        own, base = answers.get(pair.backend), answers.get(pair.against)
        if own and base:
            over, under = value(own), value(base)
            where = (
                f"{own['max_sequences']} against {base['max_sequences']} sequences, T = {own['seq_len']}, "
                f"checkpointing {own['activation_checkpointing']}, {own['memory_budget_gib']:g} GiB"
            ) + (f" on each of {own['world_size']} ranks ({own['parallel']})" if own["world_size"] > 1 else "")
            doubts = [] if own["exact"] and base["exact"] else ["a search did not end exact"]
            clocks = {probe.get("tokens_per_second_is") for one in (own, base) for probe in one["probes"]}
            doubts += [DEVICE_TIME] * (value is _speed_at_largest and "device time" in clocks)
            samples.append(Sample([over / under] if over is not None and under else [], (), doubts, where))
    return samples or [Sample(remarks=sorted(remarks))]


def _largest(answer: dict[str, Any]) -> float | None:
    """None if no probe fitted, but smaller batches were not tried."""
    return float(answer["max_sequences"]) if answer["max_sequences"] or answer["exact"] else None


def _speed_at_largest(answer: dict[str, Any]) -> float | None:
    """Tokens/s of the probe at the largest batch; None if none fitted."""
    probes = [one for one in answer["probes"] if one["batch"] == answer["max_sequences"] and one["fits"]]
    return probes[0].get("tokens_per_second") if probes else None


def _share(pair: Pair, gradients: bool) -> list[Sample]:
    """The output layer's share of the peak, with or without the gradients that it returns; a value for each seed."""
    shares = {}
    for run in pair.own:
        s, memory = run.summary, run.summary.get("memory_bytes") or {}
        if "loss_backward" in memory and "peak" in memory:
            n_values = s["hidden_size"] * (s["batch_size"] * s["seq_len"] + s["vocab_size"])
            returned = 0 if gradients else (4 if s["precision"] == "fp32" else 2) * n_values
            shares[s["seed"]] = max(memory["loss_forward"], memory["loss_backward"] - returned) / memory["peak"]
    return [Sample([*shares.values()])]


_BOTH, _SEARCH = "runs of both losses in one setting", "a search by scripts/find_max_batch.py for both"
_STEPS = f"of {LEAST_MEASURED} steps after the warm-up, on a GPU"
_BATCHES, _TIMED = f"runs of both losses at the same several batches, {_STEPS}", f"{_BOTH}, {_STEPS}"
_LOSSES: dict[str, Any] = {"needs": f"{_BOTH}, of {LEAST_STEPS} steps", "ratio": False, "of_losses": True}
_CURVES = _LOSSES | {"needs": f"{_LOSSES['needs']}, at least every {SMOOTHED_STEPS // 2}th of them logged"}
_SHARES: dict[str, Any] = {"form": ".1%", "needs": "a run on a GPU", "by_chance": False, "alone": True}
METRICS = {
    metric.name: metric
    for metric in (
        Metric("peak_memory_bytes", "peak memory, ratio", by_seed(_memory_ratio), ".3f", f"{_BOTH}, on a GPU",
               by_chance=False, always=True),
        Metric("tokens_per_second", "tokens/s at the same batch, ratio", by_seed(speed_ratio), ".3f",
               _TIMED, always=True),
        Metric("max_sequences", "largest batch under the budget, ratio", partial(_of_searches, value=_largest), ".2f",
               _SEARCH, by_chance=False),
        Metric("tokens_per_second_at_max_sequences", "tokens/s, each at its own largest batch, ratio",
               partial(_of_searches, value=_speed_at_largest), ".3f", _SEARCH),
        Metric("tokens_per_second_at_fastest_batch", "tokens/s, each at its fastest batch, equal tokens, ratio",
               _at_fastest_batch, ".3f", _BATCHES),
        Metric("train_loss_nats", "final training loss, difference, nats", _difference("train_loss_nats"), "+.4f",
               always=True, **_LOSSES),
        Metric("valid_loss_nats", "validation loss, difference, nats", _difference("valid_loss_nats"), "+.4f",
               always=True, **_LOSSES),
        Metric("valid_perplexity", "validation perplexity, difference", _difference("valid_perplexity"), "+.3f",
               **_LOSSES),
        Metric("curve_difference",
               f"training loss, largest difference of the curves (mean of {SMOOTHED_STEPS} steps), nats",
               by_seed(_curve_difference), ".4f", **_CURVES),
        Metric("backward_speed_up", "backward pass of the output layer, speed-up",
               by_seed(_backward_speed_up), ".2f", _TIMED),
        Metric("loss_layer_share", "output layer's share of peak memory, gradients counted",
               partial(_share, gradients=True), **_SHARES),
        Metric("loss_layer_share_without_gradients", "output layer's share of peak memory, without gradients",
               partial(_share, gradients=False), **_SHARES),
    )
}  # fmt: skip
