"""The study's criteria, each answered from runs: met, missed or open, with value, target, margin, spread."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from linrnn.results import Run, backend_names, same_origin

BASELINES = ("compiled", "standard")  # verdicts against compiled cross-entropy first, eager second
MET, MISSED, OPEN = "met", "missed", "open"
SMOOTHED_STEPS = 20
LEAST_STEPS = 50  # of runs whose losses are compared: as many as train_loss_nats averages over


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


MEMORY = Criterion("peak memory, ratio", 0.6, True, ".3f", "runs of both losses in one setting")
BATCH = Criterion(
    "largest batch under the budget, ratio (H1: 1.3-2)", 1.5, False, ".2f", "scripts/find_max_batch.py for both"
)
SPEED = Criterion("tokens/s at the same batch, ratio", 1.08, False, ".3f", "runs of both losses in one setting")
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
BACKWARD = Criterion(
    "backward pass of the filtered loss, speed-up (H3: 1.5-2)", 1.5, False, ".2f", "runs of both losses in one setting"
)
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
    "seq_len",
    "activation_checkpointing",
    "chunk_size",
    "vocab_size",
    "tie_embeddings",
    "precision",
    "memory_budget_gib",
)
Compare = Callable[[Run, Run], float | None]


def _ratio(key: str) -> Compare:
    def compare(run: Run, base: Run) -> float | None:
        value, other = run.summary.get(key), base.summary.get(key)
        return value / other if value is not None and other else None

    return compare


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
    return other / own if own and other else None


PAIRED: tuple[tuple[Criterion, Compare], ...] = (
    (MEMORY, _ratio("peak_memory_bytes")),
    (SPEED, _ratio("tokens_per_second")),
    (PERPLEXITY, _difference("valid_perplexity")),
    (CURVES, _largest_difference),
)
PAIRED_FILTER: tuple[tuple[Criterion, Compare], ...] = ((BACKWARD, _backward_speed_up),)
PAIRED_MVE: tuple[tuple[Criterion, Compare], ...] = (
    (MVE_MEMORY, _ratio("peak_memory_bytes")),
    (MVE_SPEED, _ratio("tokens_per_second")),
    (MVE_NOT_SLOWER, _ratio("tokens_per_second")),
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
        here: list[Verdict] = []
        for backend in backends:
            own = backends[backend]
            for against in (base for base in BASELINES if base != backend):
                criteria = [*PAIRED, *(PAIRED_FILTER if own[0].summary["loss"] in FILTERS else ())]
                criteria += PAIRED_MVE if own[0].summary["size"] == "mve" else ()
                for criterion, compare in criteria:
                    here.append(_paired(criterion, compare, model, backend, against, own, backends.get(against, [])))
                if own[0].summary["size"] == "mve":
                    here.append(_fastest_batches(model, backend, against, by_setting))
                here += _largest_batches(own[0], backend, against, max_batches, environment)
            here += _shares(model, backend, own)
        if sum(other == model for other, _ in settings) > 1:
            words = f"checkpointing {checkpointing}"
            here = [v if words in v.remark else replace(v, remark=f"{v.remark}; {words}".lstrip("; ")) for v in here]
        found += here
    return found


def _paired(
    criterion: Criterion, compare: Compare, model: str, backend: str, against: str, own: list[Run], base: list[Run]
) -> Verdict:
    """Seed by seed."""
    others = {run.summary["seed"]: run for run in base}
    pairs = [(run, others[run.summary["seed"]]) for run in own if run.summary["seed"] in others]
    values = [value for value in (compare(run, other) for run, other in pairs) if value is not None]
    remark = "" if base else f"{against} has no finished run in this setting"
    return judge(criterion, model, backend, against, values, remark)


def _fastest_batches(
    model: str, backend: str, against: str, by_setting: dict[tuple[Any, ...], dict[str, list[Run]]]
) -> Verdict:
    """Each loss at the batch of its highest speed, among runs of about the same number of tokens."""
    speeds: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for backends in by_setting.values():
        for name, group in backends.items():
            for run in group:
                if run.summary["tokens_per_second"]:
                    speeds[name].append((run.summary["tokens_per_second"], run.summary["batch_size"]))
    own, base = speeds[backend], speeds[against]
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
        batches = [own["max_sequences"] / base["max_sequences"]] if base["max_sequences"] else []
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
    shares, without = [], []
    for run in runs:
        s, memory = run.summary, run.summary.get("memory_bytes") or {}
        if "loss_backward" not in memory or "peak" not in memory:
            continue
        d_model = _hidden_size(s)
        compute = 4 if s["precision"] == "fp32" else 2
        gradients = compute * d_model * (s["batch_size"] * s["seq_len"] + s["vocab_size"]) if d_model else None
        shares.append(max(memory["loss_forward"], memory["loss_backward"]) / memory["peak"])
        if gradients is not None:
            rest = max(memory["loss_forward"], memory["loss_backward"] - gradients, 0)
            without.append(rest / memory["peak"])
    return [judge(SHARE, model, backend, None, shares), judge(SHARE_WITHOUT, model, backend, None, without)]


def _hidden_size(summary: dict[str, Any]) -> int | None:
    """Width of a named size; None for a size that configs/size does not have."""
    from linrnn.config import load_config
    from linrnn.errors import ConfigError

    try:
        return int(load_config([f"size={summary['size']}"]).size.hidden_size)
    except ConfigError:
        return None


# ----------------------------------------------------------------------------------------------- what follows
def branches(found: Sequence[Verdict]) -> list[tuple[str, str, str]]:
    """The proposal's "if the hypothesis is wrong", each with holds | does not hold | open, and the figures."""

    def values(criterion: Criterion, backend: str, against: str) -> list[float]:
        return [
            v.value
            for v in found
            if v.criterion is criterion and v.backend == backend and v.against == against and v.value is not None
        ]

    ours = next((v.backend for v in found if v.backend.startswith("cce_kahan")), "cce_kahan")
    base = "compiled" if values(MEMORY, ours, "compiled") else "standard"
    rows = []
    batch, speed = values(BATCH, ours, base), values(SPEED_AT_LARGEST, ours, base)
    saturated = "a larger batch does not give speed: the GPU is saturated already"
    if batch and speed:
        figures = f"batch x {max(batch):.2f}, tokens/s x {max(speed):.3f} at most"
        rows.append((saturated, _word(max(speed) < 1.08) if max(batch) > 1 else OPEN, figures))
    else:
        rows.append((saturated, OPEN, BATCH.source))
    losses = values(MVE_LOSS, ours, base) + values(CURVES, ours, base)
    figures = f"at most {max(losses):.4f} nats apart" if losses else CURVES.source
    rows.append(("CCE-Kahan loses precision in linear RNNs", _word(max(losses) > 0.01) if losses else OPEN, figures))
    memory, liger = values(MEMORY, ours, base), values(MEMORY, "liger", base)
    if memory and liger:
        captured = (1 - min(liger)) / (1 - min(memory)) if min(memory) < 1 else 1.0
        rows.append(
            (
                "Liger already captures most of the benefit",
                _word(captured >= 0.9),
                f"{captured:.0%} of the memory saved",
            )
        )
    else:
        rows.append(("Liger already captures most of the benefit", OPEN, "runs with loss=liger"))
    return rows


def _word(holds: bool) -> str:
    return "holds" if holds else "does not hold"
