"""Compare runs paired by seed, and judge targets: reached, not reached, inconclusive or not measured."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isclose
from statistics import median
from typing import Any

from linrnn.report.curves import largest_difference
from linrnn.report.runs import SETTING, Run, backend_names, environment_of, without_horizon
from linrnn.report.targets import (
    BASELINES,
    COMPARISONS,
    INCONCLUSIVE,
    LEAST_MEASURED,
    LEAST_STEPS,
    Target,
    Verdict,
    judge,
)
from linrnn.runs.figures import by_wall_clock, host_decides
from linrnn.runs.intervals import AT_LEAST, LEAST_PAIRS, WITHIN, pairs_for
from linrnn.runs.origins import differing

CONTROL = "compiled_nudged"  # the noise-floor run: judged against compiled, on losses alone
EXACT = "cce_kahan"
SHARED = "not measured: the GPU was shared"
DEVICE_TIME = "by the device time of a step: to be measured again by wall clock"

# Two searches for the largest batch must share these.
ANSWER_SETTING = (
    *("accumulation_steps", "seq_len", "activation_checkpointing", "chunk_size", "vocab_size", "tie_embeddings"),
    *("precision", "memory_budget_gib", "parallel", "world_size"),
)


# ------------------------------------------------------------------------------------------------ comparing a pair
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


def _speed_ratio(run: Run, base: Run) -> Compared | None:
    """Ratio of tokens/s of two GPU runs; None if one is too short, or their clocks differ."""
    value, other = (one.summary.get("tokens_per_second") for one in (run, base))
    clock, same_clock = (by_wall_clock(one.summary) for one in (run, base))
    if not value or not other or not _timed(run, base) or clock != same_clock:
        return None
    least, most = free_loss_speed_up(run), free_loss_speed_up(base)
    return Compared(
        value / other,
        doubt="" if clock else DEVICE_TIME,
        note="CPU-bound" if host_decides(run.summary) or host_decides(base.summary) else "",
        limits=(1 / least, most) if least and most else None,
    )


def _speed_ratio_across_batches(run: Run, base: Run) -> Compared | None:
    """As :func:`_speed_ratio`, for runs that differ in more than the loss: without limits."""
    found = _speed_ratio(run, base)
    return found and replace(found, limits=None)


def _memory_ratio(run: Run, base: Run) -> Compared | None:
    """Ratio of the peaks allocated on the GPU. None on a CPU, where a process holds more than the step."""
    value, other = ((one.summary.get("memory_bytes") or {}).get("peak") for one in (run, base))
    return Compared(value / other) if value is not None and other else None


def _difference(key: str) -> Compare:
    """A comparison that returns the difference of `key` between two trained runs."""

    def compare(run: Run, base: Run) -> Compared | None:
        value, other = run.summary.get(key), base.summary.get(key)
        known = value is not None and other is not None and learnt(run, base)
        return Compared(value - other) if known else None  # type: ignore[operator]

    return compare


def _curve_difference(run: Run, base: Run) -> Compared | None:
    """The largest difference between two loss curves."""
    largest, every = largest_difference(run.losses, base.losses)
    if not learnt(run, base) or largest is None:
        return None
    return Compared(largest, note=f"every {every}th step logged" if every > 1 else "")


def _backward_speed_up(run: Run, base: Run) -> Compared | None:
    """Speed-up of the output layer's own backward kernels."""
    own, other = ((one.summary.get("loss_layer_ms") or {}).get("backward") for one in (run, base))
    return Compared(other / own) if own and other and _timed(run, base) else None


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


def _timed(run: Run, base: Run) -> bool:
    """Whether times can be compared. A median of a step or two says nothing. A CPU may be shared with others."""
    measured = min(one.summary["measured_steps"] or 0 for one in (run, base))  # none on a shared GPU
    return measured >= LEAST_MEASURED and run.on_gpu and base.on_gpu


PAIRED: dict[str, Compare] = {
    "peak_memory_bytes": _memory_ratio,
    "tokens_per_second": _speed_ratio,
    "train_loss_nats": _difference("train_loss_nats"),
    "valid_loss_nats": _difference("valid_loss_nats"),
    "valid_perplexity": _difference("valid_perplexity"),
    "curve_difference": _curve_difference,
    "backward_speed_up": _backward_speed_up,
}
OF_TIMES: tuple[Compare, ...] = (_speed_ratio, _speed_ratio_across_batches, _backward_speed_up)
AT_FASTEST = "tokens_per_second_at_fastest_batch"
BATCH, SPEED_AT_LARGEST = "max_sequences", "tokens_per_second_at_max_sequences"


# ------------------------------------------------------------------------------------------------- all the results
Settings = Mapping[tuple[Any, ...], Mapping[str, list[Run]]]  # runs by setting, then by backend
Rivals = Callable[[str, Iterable[str]], list[str]]  # a loss, and all losses -> further ones that it is compared with


def verdicts(
    runs: Sequence[Run],
    targets: Sequence[Target] = (),
    max_batches: Sequence[dict[str, Any]] = (),
    rivals: Rivals = lambda backend, backends: [],
) -> list[Verdict]:
    """Every target for every model and loss of `runs`, for each kind of activation checkpointing and execution.

    Each result is about the setting that most losses share. Runs that mix several origins are left out.

    Args:
        targets: empty: what every report compares, with the baseline that was run.
        max_batches: as :mod:`linrnn.report.runs` reads them. Those of another origin are left out, and the result
            says so.
        rivals: losses beside a target's own baselines, for comparisons of losses with enough pairs.
    """
    if not targets:
        targets = [replace(target, of=(baseline_of(runs),)) for target in COMPARISONS]
    names = backend_names([run.summary for run in runs])
    kinds: dict[tuple[str, ...], dict[tuple[Any, ...], dict[str, list[Run]]]] = defaultdict(lambda: defaultdict(dict))
    for run, name in zip(runs, names, strict=True):
        if run.finished and not run.mixture:
            s = run.summary
            own_kind = (s["model"], s["activation_checkpointing"], run.execution, run.origin)
            kinds[own_kind][run.setting].setdefault(name, []).append(run)
    environment = environment_of(runs)
    found: list[Verdict] = []
    for kind, by_setting in kinds.items():
        setting = max(by_setting, key=lambda one: (len(by_setting[one]), sum(map(len, by_setting[one].values()))))
        where = _where(kind, _telling(setting, by_setting), kinds)
        for backend, own in by_setting[setting].items():
            first = own[0].summary
            about = [target for target in targets if target.is_about(first["loss"], first["size"])]
            of_losses = [target for target in about if target.metric.of_losses]
            if backend == CONTROL:
                found += _against(of_losses, own, backend, BASELINES[0], by_setting, setting, where)
                continue
            for against in rivals(backend, by_setting[setting]):
                if len(_seeds(own) & _seeds(by_setting[setting][against])) >= LEAST_PAIRS:
                    found += _against(of_losses, own, backend, against, by_setting, setting, where)
            for against in dict.fromkeys(name for target in about for name in target.of if name != backend):
                asked = [target for target in about if against in target.of]
                found += _against(asked, own, backend, against, by_setting, setting, where)
                found += _largest_batches(asked, own[0], backend, against, max_batches, environment)
            found += _shares(about, backend, own, where)
    return found


def baseline_of(runs: Sequence[Run]) -> str:
    """The loss that ratios refer to: compiled if it was run, else eager, else our exact loss."""
    losses = {run.summary["loss"] for run in runs if run.finished and not run.mixture}
    return next((name for name in (*BASELINES, EXACT) if name in losses), BASELINES[0])


def _where(kind: tuple[str, ...], telling: str, kinds: Iterable[tuple[str, ...]]) -> str:
    """What tells a kind of runs from others of its model, in words."""
    model, checkpointing, execution, origin = kind
    checkpointings, executions = (len({other[i] for other in kinds if other[0] == model}) for i in (1, 2))
    words = [
        telling,
        f"checkpointing {checkpointing}" if checkpointings > 1 and "checkpointing=" not in telling else "",
        execution if executions > 1 else "",
        f"origin {origin}" if origin and "origin=" not in telling else "",
    ]
    return ", ".join(filter(None, words))


def _seeds(runs: Sequence[Run]) -> set[int]:
    return {run.summary["seed"] for run in runs}


def _against(
    targets: Sequence[Target],
    own: list[Run],
    backend: str,
    against: str,
    by_setting: Settings,
    setting: tuple[Any, ...],
    where: str,
) -> list[Verdict]:
    """The results of one loss's runs against one baseline."""
    base = by_setting[setting].get(against, [])
    remark = "" if base else f"{against} has no finished run in this setting"
    names = own[0].summary["model"], backend, against
    found = [
        _paired(target, PAIRED[target.metric.name], names, own, base, where, remark)
        for target in targets
        if target.metric.name in PAIRED
    ]
    fastest = [target for target in targets if target.metric.name == AT_FASTEST]
    return found + [_fastest_batches(target, own[0], backend, against, by_setting) for target in fastest]


def _telling(setting: tuple[Any, ...], others: Iterable[tuple[Any, ...]]) -> str:
    """The part of a setting in which it differs from others, as `vocab_size=32000`, without implied keys.

    The horizon has the name of its configuration key. It is implied where it follows from the batch.
    """
    every, own = [dict(zip(SETTING, other, strict=True)) for other in others], dict(zip(SETTING, setting, strict=True))

    def varying(*keys: str) -> int:
        return len({tuple(one[key] for key in keys) for one in every})

    implied = {"n_parameters", "data_fingerprint", "steps", "training"}
    if varying("batch_size", "seq_len", "horizon") == varying("batch_size", "seq_len"):
        implied.add("horizon")
    told = [key for key in SETTING if key not in implied and varying(key) > 1]
    return ", ".join(f"{'schedule.steps' if key == 'horizon' else key}={own[key]}" for key in told)


def _paired(
    target: Target,
    compare: Compare,
    names: tuple[str, str, str],
    own: Sequence[Run],
    base: Sequence[Run],
    where: str,
    remark: str,
) -> Verdict:
    """Compare seed by seed. If a seed was run several times, its value is the median."""
    values, limits, doubts, notes = [], [], [], []
    for seed in dict.fromkeys(run.summary["seed"] for run in own):
        pairs = ((run, other) for run in own for other in base if run.summary["seed"] == other.summary["seed"] == seed)
        if found := [one for run, other in pairs if (one := compare(run, other)) is not None]:
            values.append(median(one.value for one in found))
            limits += [one.limits for one in found if one.limits]
            doubts += [one.doubt for one in found if one.doubt]
            notes += [one.note for one in found if one.note]
    notes += _shared([*own, *base] if compare in OF_TIMES else [])
    if values and limits:
        least, most = (median(bounds) for bounds in zip(*limits, strict=True))
        doubts += _noise(median(values), least, most)
    words = "; ".join(dict.fromkeys([*([remark] if remark else []), *notes]))
    verdict = judge(target, *names, values, setting=where, remark=words, doubts=list(dict.fromkeys(doubts)))
    if target.rule == WITHIN and verdict.verdict == INCONCLUSIVE and verdict.n >= target.pairs:
        needed, margin = pairs_for(values, target.bound), f"±{target.bound:g}"
        words = f"{margin} needs about {needed:,} pairs at this scatter" if needed > len(values) else ""
        return replace(verdict, remark="; ".join(filter(None, [verdict.remark, words])))
    return verdict


def _shared(runs: Sequence[Run]) -> list[str]:
    """What is said of runs whose times are left out."""
    count = sum(run.gpu_shared for run in runs)
    if not count:
        return []
    return [SHARED if count == len(runs) else f"{count} of {len(runs)} runs left out: their GPU was shared"]


def _noise(ratio: float, least: float, most: float) -> list[str]:
    """A ratio beyond these limits cannot come from the loss alone."""
    if ratio > most:
        return [f"beyond what a free loss would give ({most:.3f}): noise"]
    if ratio < least:
        return [f"below {least:.3f}, what a free loss would give the baseline: noise"]
    return []


def _fastest_batches(target: Target, run: Run, backend: str, against: str, by_setting: Settings) -> Verdict:
    """Compare each loss at its fastest batch (by median speed over seeds), among the batches that both ran.

    Only runs like `run` count: they may differ in the batch, and have about as many tokens.
    """
    own, base = (_by_batch(run, name, by_setting) for name in (backend, against))
    names = (run.summary["model"], backend, against)
    common = sorted(own.keys() & base.keys())
    alone = [
        f"{name} alone has B = {', '.join(map(str, surplus))}"
        for name, surplus in ((backend, sorted(own.keys() - base.keys())), (against, sorted(base.keys() - own.keys())))
        if surplus
    ]
    if len(common) < 2:
        needs = _shared([run]) or [f"not measured: needs {target.metric.needs}"]
        return judge(target, *names, [], remark="; ".join([*needs, *alone]))
    fastest, other = (_fastest(side, common) for side in (own, base))
    words = "; ".join([f"B = {fastest} against {other}, of {', '.join(map(str, common))}", *alone])
    return _paired(target, _speed_ratio_across_batches, names, own[fastest], base[other], "", words)


def _fastest(by_batch: Mapping[int, list[Run]], batches: Sequence[int]) -> int:
    speeds = {batch: median(one.summary["tokens_per_second"] for one in by_batch[batch]) for batch in batches}
    return max(speeds, key=lambda batch: speeds[batch])


def _by_batch(run: Run, backend: str, by_setting: Settings) -> dict[int, list[Run]]:
    """The comparable runs by batch. They differ from `run` in loss, seed and what follows from the batch."""
    kind = [key for key in SETTING if key not in ("batch_size", "steps", "horizon")]

    found: dict[int, list[Run]] = defaultdict(list)
    for backends in by_setting.values():
        for one in backends.get(backend, []):
            equal_tokens = isclose(one.summary["tokens"], run.summary["tokens"], rel_tol=0.1)
            same = one.values(kind) == run.values(kind) and equal_tokens
            if same and _timed(one, one) and one.summary["tokens_per_second"]:
                found[one.summary["batch_size"]].append(one)
    return found


def _largest_batches(
    targets: Sequence[Target],
    run: Run,
    backend: str,
    against: str,
    answers: Sequence[dict[str, Any]],
    environment: dict[str, Any],
) -> list[Verdict]:
    """The verdicts on searches for the largest batch of runs like `run`."""
    targets = [target for target in targets if target.metric.name in (BATCH, SPEED_AT_LARGEST)]
    if not targets:
        return []
    names = (run.summary["model"], backend, against)
    found: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = defaultdict(dict)
    left_out: list[str] = []
    for answer, name in zip(answers, backend_names(answers), strict=True):
        if (answer["model"], answer["size"]) != (run.summary["model"], run.summary["size"]):
            continue
        if answer["activation_checkpointing"] != run.summary["activation_checkpointing"]:
            continue
        if not answer["environment"].get("gpus"):
            continue
        if others := differing([environment, answer["environment"]]):
            left_out = others
            continue
        key = (*(answer.get(k) for k in ANSWER_SETTING), without_horizon(answer["training"]))
        # Names tell losses apart by the options that differ among the runs, or among the answers: not always the same.
        same_loss = all((answer.get(k) or {}) == (run.summary.get(k) or {}) for k in ("loss", "loss_options"))
        found[key][backend if same_loss else name] = answer
    pairs = [(both[backend], both[against]) for both in found.values() if backend in both and against in both]
    reason = f"measured elsewhere: another {', '.join(left_out)}" if left_out else ""
    if not pairs:
        where = f"checkpointing {run.summary['activation_checkpointing']}"
        return [judge(one, *names, [], setting=where, remark=reason) for one in targets]
    return [_searched(target, own, base, names) for own, base in pairs for target in targets]


def _searched(target: Target, own: dict[str, Any], base: dict[str, Any], names: tuple[str, str, str]) -> Verdict:
    """A result from two searches for the largest batch.

    A search that did not end exactly gives a lower bound. If it is the judged loss's, it can show that enough fits; it
    decides nothing else.
    """
    where = (
        f"{own['max_sequences']} against {base['max_sequences']} sequences, T = {own['seq_len']}, "
        f"checkpointing {own['activation_checkpointing']}, {own['memory_budget_gib']:g} GiB"
    )
    if (ranks := own["world_size"]) > 1:
        where += f" on each of {ranks} ranks ({own['parallel']})"
    inexact = "" if own["exact"] and base["exact"] else "a search did not end exact"
    if target.metric.name == BATCH:
        unknown = not own["max_sequences"] and not own["exact"]  # no probe fitted, but smaller batches were not tried
        batches = [own["max_sequences"] / base["max_sequences"]] if base["max_sequences"] and not unknown else []
        enough = base["exact"] and bool(batches) and target.rule == AT_LEAST and batches[0] >= target.bound
        doubts = [] if enough or not inexact else [inexact]
        return judge(target, *names, batches, setting=where, remark="" if doubts else inexact, doubts=doubts)
    probes = [_best_probe(answer) for answer in (own, base)]
    speeds = [probe.get("tokens_per_second") for probe in probes]
    ratio = [speeds[0] / speeds[1]] if speeds[0] and speeds[1] else []
    clock = "" if all(map(by_wall_clock, probes)) else DEVICE_TIME
    return judge(target, *names, ratio, setting=where, doubts=[one for one in (inexact, clock) if one])


def _best_probe(answer: dict[str, Any]) -> dict[str, Any]:
    """The probe at the largest batch; empty if none fitted."""
    return next((p for p in answer["probes"] if p["batch"] == answer["max_sequences"] and p["fits"]), {})


def _shares(targets: Sequence[Target], backend: str, runs: Sequence[Run], where: str) -> list[Verdict]:
    """The output layer's share of the peak: with the gradients that it returns, and without them."""
    shares: dict[str, dict[int, float]] = defaultdict(dict)
    for run in runs:
        s, memory = run.summary, run.summary.get("memory_bytes") or {}
        if "loss_backward" not in memory or "peak" not in memory:
            continue
        compute = 4 if s["precision"] == "fp32" else 2
        gradients = compute * s["hidden_size"] * (s["batch_size"] * s["seq_len"] + s["vocab_size"])
        whole, without = memory["loss_backward"], max(memory["loss_backward"] - gradients, 0)
        shares["loss_layer_share"][s["seed"]] = max(memory["loss_forward"], whole) / memory["peak"]
        shares["loss_layer_share_without_gradients"][s["seed"]] = max(memory["loss_forward"], without) / memory["peak"]
    return [
        judge(target, runs[0].summary["model"], backend, None, list(shares[target.metric.name].values()), setting=where)
        for target in targets
        if target.metric.alone
    ]
