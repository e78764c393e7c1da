"""The study's criteria, each answered from runs: met, missed or open, with value, target, margin, spread."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import isclose
from statistics import median
from typing import Any

from linrnn.results import SETTING, Run, backend_names, same_origin

BASELINES = ("compiled", "standard")  # verdicts against compiled cross-entropy first, eager second
MET, MISSED, OPEN = "met", "missed", "open"
SMOOTHED_STEPS = 20
LEAST_STEPS = 50  # of runs whose losses are compared: as many as train_loss_nats averages over
LEAST_MEASURED = 5  # steps after the warm-up, of runs whose times are compared


@dataclass(frozen=True)
class Criterion:
    """A criterion of the proposal.

    Attributes:
        name: what is asked.
        target: the bound that the value is held against.
        at_most: whether the value must be at most the target, else at least.
        form: how values are shown.
        source: what must be run to answer it.
    """

    name: str
    target: float
    at_most: bool
    form: str
    source: str

    def holds(self, value: float) -> bool:
        return value <= self.target if self.at_most else value >= self.target

    @property
    def bound(self) -> str:
        return f"{'≤' if self.at_most else '≥'} {self.target:{self.form}}"


MEMORY = Criterion("peak memory, ratio", 0.6, True, ".3f", "runs of both losses in one setting, on a GPU")
BATCH = Criterion(
    "largest batch under the budget, ratio (H1: 1.3-2)", 1.5, False, ".2f", "scripts/find_max_batch.py for both"
)
SPEED = Criterion(
    "tokens/s at the same batch, ratio",
    1.08,
    False,
    ".3f",
    f"runs of both losses in one setting, of {LEAST_MEASURED} steps after the warm-up",
)
SPEED_AT_LARGEST = Criterion(
    "tokens/s, each at its own largest batch, ratio (H1: 1.08-1.15)",
    1.15,
    False,
    ".3f",
    "scripts/find_max_batch.py for both",
)
PERPLEXITY = Criterion(
    "validation perplexity, difference",
    0.1,
    True,
    "+.3f",
    f"runs of both losses in one setting, of {LEAST_STEPS} steps",
)
CURVES = Criterion(
    f"training loss, largest difference of the curves (mean of {SMOOTHED_STEPS} steps), nats",
    0.01,
    True,
    ".4f",
    PERPLEXITY.source,
)
BACKWARD = Criterion("backward pass of the filtered loss, speed-up (H3: 1.5-2)", 1.5, False, ".2f", SPEED.source)
FILTERS = ("cce_filter", "cce_apple")  # others' forward passes may do a part of their backward passes' work
SHARE = Criterion("loss layer's share of peak memory, gradients counted (H2)", 0.01, True, ".1%", "a run on a GPU")
SHARE_WITHOUT = Criterion("loss layer's share of peak memory, without them (H2)", 0.01, True, ".1%", "a run on a GPU")
MVE_MEMORY = Criterion("MVE: peak memory, ratio", 0.5, True, ".3f", MEMORY.source)
MVE_SPEED = Criterion("MVE: tokens/s at the same batch, ratio", 0.95, False, ".3f", SPEED.source)
MVE_LARGER = Criterion(
    "MVE: tokens/s, each at its fastest batch, equal tokens, ratio", 1.10, False, ".3f", "runs at several batches"
)
MVE_LOSS = Criterion("MVE: final training loss, difference, nats", 0.01, True, ".4f", PERPLEXITY.source)
MVE_NOT_SLOWER = Criterion("MVE: not slower at the same batch (else: failed), ratio", 1.0, False, ".3f", SPEED.source)


@dataclass(frozen=True)
class Verdict:
    """One row: a criterion for a model and a backend, against a baseline.

    Attributes:
        value: median over the seeds that both have; None if nothing answers it.
        spread: largest - smallest of the seeds' values; None for one seed.
        verdict: met, missed, or open (not measured, or the seeds disagree).
        remark: why it is open; the setting.
    """

    criterion: Criterion
    model: str
    backend: str
    against: str | None
    value: float | None
    spread: float | None
    seeds: int
    verdict: str
    remark: str = ""

    @property
    def margin(self) -> float | None:
        """By how much the target is met (positive) or missed (negative)."""
        if self.value is None:
            return None
        return (self.value - self.criterion.target) * (-1 if self.criterion.at_most else 1)


def judge(
    criterion: Criterion, model: str, backend: str, against: str | None, values: Sequence[float], remark: str = ""
) -> Verdict:
    """A verdict from one value a seed."""
    if not values:
        reason = remark or f"not measured: needs {criterion.source}"
        return Verdict(criterion, model, backend, against, None, None, 0, OPEN, reason)
    spread = max(values) - min(values) if len(values) > 1 else None
    outcomes = {criterion.holds(value) for value in values}
    if len(outcomes) > 1:
        verdict, remark = OPEN, "; ".join(filter(None, ["the seeds disagree", remark]))
    else:
        verdict = MET if outcomes == {True} else MISSED
    return Verdict(criterion, model, backend, against, median(values), spread, len(values), verdict, remark)


# ----------------------------------------------------------------------------------------------- comparing runs
# What two searches for the largest batch must share.
ANSWER_SETTING = (
    "accumulation_steps",
    "seq_len",
    "activation_checkpointing",
    "chunk_size",
    "vocab_size",
    "tie_embeddings",
    "precision",
    "memory_budget_gib",
    "training",
)
Compare = Callable[[Run, Run], float | None]


def _speed_ratio(run: Run, base: Run) -> float | None:
    value, other = (one.summary.get("tokens_per_second") for one in (run, base))
    return value / other if value is not None and other and _timed(run, base) else None


def _memory_ratio(run: Run, base: Run) -> float | None:
    """Of what was allocated on the GPU; a CPU's process holds more than the step."""
    value, other = ((one.summary.get("memory_bytes") or {}).get("peak") for one in (run, base))
    return value / other if value is not None and other else None


def _difference(key: str, absolute: bool = False) -> Compare:
    """Of what was learnt."""

    def compare(run: Run, base: Run) -> float | None:
        if not _learnt(run, base):
            return None
        value, other = run.summary.get(key), base.summary.get(key)
        if value is None or other is None:
            return None
        return abs(value - other) if absolute else value - other

    return compare


def curve_difference(run: Run, base: Run) -> list[tuple[int, float]]:
    """(step, nats above the other's), running mean over SMOOTHED_STEPS steps that both logged."""
    curve, other = dict(run.losses), dict(base.losses)
    steps = sorted(curve.keys() & other.keys())
    raw = [curve[step] - other[step] for step in steps]
    windows = (raw[max(0, end - SMOOTHED_STEPS) : end] for end in range(1, len(raw) + 1))
    return [(step, sum(window) / len(window)) for step, window in zip(steps, windows, strict=True)]


def largest_difference(run: Run, base: Run) -> float | None:
    """Nats between two curves, the most of a mean over SMOOTHED_STEPS steps; None for fewer common steps than that."""
    # The first window has few steps; from a full one on.
    smooth = curve_difference(run, base)[SMOOTHED_STEPS - 1 :]
    return max((abs(nats) for _, nats in smooth), default=None)


def _largest_difference(run: Run, base: Run) -> float | None:
    return largest_difference(run, base) if _learnt(run, base) else None


def _learnt(run: Run, base: Run) -> bool:
    """Whether losses can be compared: runs of a few steps, made for speed and memory, say nothing about them."""
    return min(run.summary.get("steps") or 0, base.summary.get("steps") or 0) >= LEAST_STEPS


def _backward_speed_up(run: Run, base: Run) -> float | None:
    own, other = ((one.summary.get("loss_layer_ms") or {}).get("backward") for one in (run, base))
    return other / own if own and other and _timed(run, base) else None


def _timed(run: Run, base: Run) -> bool:
    """Whether times can be compared: a median of a step or two says nothing."""
    return min(one.summary.get("measured_steps", LEAST_MEASURED) or 0 for one in (run, base)) >= LEAST_MEASURED


PAIRED: tuple[tuple[Criterion, Compare], ...] = (
    (MEMORY, _memory_ratio),
    (SPEED, _speed_ratio),
    (PERPLEXITY, _difference("valid_perplexity")),
    (CURVES, _largest_difference),
)
PAIRED_FILTER: tuple[tuple[Criterion, Compare], ...] = ((BACKWARD, _backward_speed_up),)
PAIRED_MVE: tuple[tuple[Criterion, Compare], ...] = (
    (MVE_MEMORY, _memory_ratio),
    (MVE_SPEED, _speed_ratio),
    (MVE_NOT_SLOWER, _speed_ratio),
    (MVE_LOSS, _difference("train_loss_nats", absolute=True)),
)


def verdicts(runs: Sequence[Run], max_batches: Sequence[dict[str, Any]] = ()) -> list[Verdict]:
    """Every criterion for every model and backend of `runs`, with and without activation checkpointing, in the setting
    that most backends share.

    Args:
        runs: of one origin.
        max_batches: as :mod:`linrnn.results` reads them; those of another origin are left out, and the verdict says so.
    """
    names = backend_names([run.summary for run in runs])
    settings: dict[tuple[str, str], dict[tuple[Any, ...], dict[str, list[Run]]]]
    settings = defaultdict(lambda: defaultdict(dict))
    for run, name in zip(runs, names, strict=True):
        if run.finished:
            kind = run.summary["model"], _checkpointing(run.summary)
            settings[kind][run.setting].setdefault(name, []).append(run)
    environment = next((run.environment for run in runs if run.environment), {})
    found: list[Verdict] = []
    for (model, checkpointing), by_setting in settings.items():
        setting = max(by_setting, key=lambda one: (len(by_setting[one]), sum(map(len, by_setting[one].values()))))
        backends = by_setting[setting]
        telling = _telling(setting, by_setting)
        here: list[Verdict] = []
        for backend in backends:
            own = backends[backend]
            for against in (name for name in BASELINES if name != backend):
                criteria = [*PAIRED, *(PAIRED_FILTER if own[0].summary["loss"] in FILTERS else ())]
                criteria += PAIRED_MVE if own[0].summary["size"] == "mve" else ()
                for criterion, compare in criteria:
                    base = backends.get(against, [])
                    here.append(_remarked(_paired(criterion, compare, model, backend, against, own, base), telling))
                if own[0].summary["size"] == "mve":
                    here.append(_fastest_batches(own[0], backend, against, by_setting))
                here += _largest_batches(own[0], backend, against, max_batches, environment)
            here += [_remarked(verdict, telling) for verdict in _shares(model, backend, own)]
        if sum(other == model for other, _ in settings) > 1:
            words = f"checkpointing {checkpointing}"
            here = [v if words in v.remark else _remarked(v, words) for v in here]
        found += here
    return found


def _telling(setting: tuple[Any, ...], others: Iterable[tuple[Any, ...]]) -> str:
    """What of a setting others do not have, as `vocab_size=32000`; what follows from something else is left out."""
    named = zip(SETTING, setting, zip(*others, strict=True), strict=True)
    return ", ".join(
        f"{key}={value}"
        for key, value, values in named
        if key not in ("n_parameters", "data_fingerprint", "steps", "training") and len(set(values)) > 1
    )


def _remarked(verdict: Verdict, words: str) -> Verdict:
    return replace(verdict, remark="; ".join(filter(None, [verdict.remark, words])))


def _paired(
    criterion: Criterion, compare: Compare, model: str, backend: str, against: str, own: list[Run], base: list[Run]
) -> Verdict:
    """Seed by seed; of runs that were made again the median."""
    values = []
    for seed in dict.fromkeys(run.summary["seed"] for run in own):
        pairs = ((run, other) for run in own for other in base if run.summary["seed"] == other.summary["seed"] == seed)
        if found := [value for run, other in pairs if (value := compare(run, other)) is not None]:
            values.append(median(found))
    remark = "" if base else f"{against} has no finished run in this setting"
    return judge(criterion, model, backend, against, values, remark)


def _fastest_batches(
    run: Run, backend: str, against: str, by_setting: dict[tuple[Any, ...], dict[str, list[Run]]]
) -> Verdict:
    """Each loss at the batch of its highest speed, among runs like `run` but for the batch, of about as many tokens."""
    follow = ("batch_size", "steps")

    def kind(one: Run) -> tuple[Any, ...]:
        return tuple(one.summary.get(key) for key in SETTING if key not in follow)

    speeds: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for backends in by_setting.values():
        for name, group in backends.items():
            for other in group:
                equal_tokens = isclose(other.summary["tokens"], run.summary["tokens"], rel_tol=0.1)
                if kind(other) == kind(run) and equal_tokens and other.summary["tokens_per_second"]:
                    speeds[name].append((other.summary["tokens_per_second"], other.summary["batch_size"]))
    own, base = speeds[backend], speeds[against]
    model = run.summary["model"]
    if len({batch for _, batch in own}) < 2 or not base:
        return judge(MVE_LARGER, model, backend, against, [])
    remark = f"B = {max(own)[1]} against {max(base)[1]}"
    return judge(MVE_LARGER, model, backend, against, [max(own)[0] / max(base)[0]], remark)


def _largest_batches(
    run: Run, backend: str, against: str, answers: Sequence[dict[str, Any]], environment: dict[str, Any]
) -> list[Verdict]:
    model = run.summary["model"]
    found: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = defaultdict(dict)
    left_out: list[str] = []
    for answer, name in zip(answers, backend_names(answers), strict=True):
        if (answer["model"], answer["size"]) != (model, run.summary["size"]):
            continue
        if _checkpointing(answer) != _checkpointing(run.summary):
            continue
        if differing := same_origin(environment, answer["environment"]):
            left_out = differing
            continue
        key = tuple(answer.get(k) for k in ANSWER_SETTING)
        found[key][name] = answer
    pairs = [(both[backend], both[against]) for both in found.values() if backend in both and against in both]
    reason = f"measured elsewhere: another {', '.join(left_out)}" if left_out else ""
    if not pairs:
        return [judge(criterion, model, backend, against, [], reason) for criterion in (BATCH, SPEED_AT_LARGEST)]
    verdicts = []
    for own, base in pairs:
        remark = (
            f"{own['max_sequences']} against {base['max_sequences']} sequences, T = {own['seq_len']}, "
            f"checkpointing {own.get('activation_checkpointing')}, {own['memory_budget_gib']:g} GiB"
            + ("" if own["exact"] and base["exact"] else "; a search did not end exact")
        )
        unknown = not own["max_sequences"] and not own["exact"]  # no probe fitted, and there were batches left to try
        batches = [own["max_sequences"] / base["max_sequences"]] if base["max_sequences"] and not unknown else []
        speeds = [_best_speed(answer) for answer in (own, base)]
        ratio = [speeds[0] / speeds[1]] if speeds[0] and speeds[1] else []
        verdicts.append(judge(BATCH, model, backend, against, batches, remark))
        verdicts.append(judge(SPEED_AT_LARGEST, model, backend, against, ratio, remark))
    return verdicts


def _checkpointing(summary: dict[str, Any]) -> str:
    return summary.get("activation_checkpointing") or "none"


def _best_speed(answer: dict[str, Any]) -> float | None:
    """tokens/s of the probe at the largest batch."""
    found = [p["tokens_per_second"] for p in answer["probes"] if p["batch"] == answer["max_sequences"] and p["fits"]]
    return found[0] if found else None


def _shares(model: str, backend: str, runs: Sequence[Run]) -> list[Verdict]:
    """Of the peak: what the loss layer's passes add at most, with and without the gradients that they return."""
    shares, without = {}, {}
    for run in runs:
        s, memory = run.summary, run.summary.get("memory_bytes") or {}
        if "loss_backward" not in memory or "peak" not in memory:
            continue
        compute = 4 if s["precision"] == "fp32" else 2
        width = s.get("hidden_size") or _hidden_size(s["size"])
        gradients = compute * width * (s["batch_size"] * s["seq_len"] + s["vocab_size"])
        shares[s["seed"]] = max(memory["loss_forward"], memory["loss_backward"]) / memory["peak"]
        without[s["seed"]] = max(memory["loss_forward"], memory["loss_backward"] - gradients, 0) / memory["peak"]
    return [
        judge(SHARE, model, backend, None, list(shares.values())),
        judge(SHARE_WITHOUT, model, backend, None, list(without.values())),
    ]


def _hidden_size(size: str) -> int:
    """Of a size of configs/size, for summaries of before they held it."""
    from linrnn.config import load_config

    return int(load_config([f"size={size}"]).size.hidden_size)
