"""Compare runs paired by seed, and judge targets: reached, not reached, inconclusive or not measured."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isclose
from statistics import median
from typing import Any

from linrnn.report.metrics import (
    AT_FASTEST,
    AT_LARGEST,
    BATCH,
    DEVICE_TIME,
    OF_TIMES,
    Compare,
    speed_ratio_across_batches,
    timed,
)
from linrnn.report.runs import SETTING, Run, backend_names, environment_of, without_horizon
from linrnn.report.targets import BASELINES, COMPARISONS, INCONCLUSIVE, Target, Verdict, judge
from linrnn.runs.figures import by_wall_clock
from linrnn.runs.intervals import AT_LEAST, LEAST_PAIRS, WITHIN, pairs_for
from linrnn.runs.origins import differing

CONTROL = "compiled_nudged"  # the noise-floor run: judged against compiled, on losses alone
EXACT = "cce_kahan"
SHARED = "not measured: the GPU was shared"

# Two searches for the largest batch must share these.
ANSWER_SETTING = (
    *("accumulation_steps", "seq_len", "activation_checkpointing", "chunk_size", "vocab_size", "tie_embeddings"),
    *("precision", "memory_budget_gib", "parallel", "world_size"),
)


Settings = Mapping[tuple[Any, ...], Mapping[str, list[Run]]]  # runs by setting, then by backend


@dataclass(frozen=True)
class _Pair:
    """The runs of a loss and of the baseline, of one model and setting.

    Attributes:
        backend, against: the names of both losses.
        where: what tells the setting from others, in words.
    """

    own: Sequence[Run]
    base: Sequence[Run]
    backend: str
    against: str
    where: str = ""

    @property
    def names(self) -> tuple[str, str, str]:
        """The model and both losses, as `judge` takes them."""
        return self.own[0].summary["model"], self.backend, self.against


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
        losses = by_setting[setting]
        for backend, own in losses.items():
            first = own[0].summary
            about = [target for target in targets if target.is_about(first["loss"], first["size"])]
            of_losses = [target for target in about if target.metric.of_losses]
            if backend == CONTROL:
                base = losses.get(BASELINES[0], [])
                found += _against(of_losses, _Pair(own, base, backend, BASELINES[0], where), by_setting)
                continue
            for against in rivals(backend, losses):
                if len(_seeds(own) & _seeds(losses[against])) >= LEAST_PAIRS:
                    found += _against(of_losses, _Pair(own, losses[against], backend, against, where), by_setting)
            for against in dict.fromkeys(name for target in about for name in target.of if name != backend):
                asked = [target for target in about if against in target.of]
                pair = _Pair(own, losses.get(against, []), backend, against, where)
                found += _against(asked, pair, by_setting) + _largest_batches(asked, pair, max_batches, environment)
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


def _against(targets: Sequence[Target], pair: _Pair, by_setting: Settings) -> list[Verdict]:
    """The results of comparing runs, first those of equal settings."""
    remark = "" if pair.base else f"{pair.against} has no finished run in this setting"
    compared = [(target, compare) for target in targets if (compare := target.metric.compare) is not None]
    fastest = [target for target in targets if target.metric.name == AT_FASTEST]
    return [
        *(_paired(target, compare, pair, remark) for target, compare in compared),
        *(_fastest_batches(target, pair, by_setting) for target in fastest),
    ]


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


def _paired(target: Target, compare: Compare, pair: _Pair, remark: str) -> Verdict:
    """Compare seed by seed. If a seed was run several times, its value is the median."""
    values, limits, doubts, notes = [], [], [], []
    own, base = pair.own, pair.base
    for seed in dict.fromkeys(run.summary["seed"] for run in own):
        pairs = ((run, other) for run in own for other in base if run.summary["seed"] == other.summary["seed"] == seed)
        if found := [one for run, other in pairs if (one := compare(run, other)) is not None]:
            values.append(median(one.value for one in found))
            limits += [one.limits for one in found if one.limits]
            doubts += [one.doubt for one in found if one.doubt]
            notes += [one.note for one in found if one.note]
    notes += _shared([*own, *base] if compare in OF_TIMES else [])
    if values and limits:  # a ratio beyond them cannot come from the loss alone
        value, (least, most) = median(values), (median(bounds) for bounds in zip(*limits, strict=True))
        if value > most:
            doubts.append(f"beyond what a free loss would give ({most:.3f}): noise")
        elif value < least:
            doubts.append(f"below {least:.3f}, what a free loss would give the baseline: noise")
    words = "; ".join(dict.fromkeys([*([remark] if remark else []), *notes]))
    verdict = judge(target, *pair.names, values, setting=pair.where, remark=words, doubts=list(dict.fromkeys(doubts)))
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


def _fastest_batches(target: Target, pair: _Pair, by_setting: Settings) -> Verdict:
    """Compare each loss at its fastest batch (by median speed over seeds), among the batches that both ran.

    Only runs like the pair's first count: they may differ in the batch, and have about as many tokens.
    """
    run = pair.own[0]
    own, base = (_by_batch(run, name, by_setting) for name in (pair.backend, pair.against))
    common = sorted(own.keys() & base.keys())
    surplus = {pair.backend: sorted(own.keys() - base.keys()), pair.against: sorted(base.keys() - own.keys())}
    alone = [f"{name} alone has B = {', '.join(map(str, batches))}" for name, batches in surplus.items() if batches]
    if len(common) < 2:
        needs = _shared([run]) or [f"not measured: needs {target.metric.needs}"]
        return judge(target, *pair.names, [], remark="; ".join([*needs, *alone]))

    def speed(by_batch: Mapping[int, list[Run]], batch: int) -> float:
        return median(one.summary["tokens_per_second"] for one in by_batch[batch])

    fastest, other = (max(common, key=lambda batch: speed(side, batch)) for side in (own, base))
    words = "; ".join([f"B = {fastest} against {other}, of {', '.join(map(str, common))}", *alone])
    fastest_runs = replace(pair, own=own[fastest], base=base[other], where="")
    return _paired(target, speed_ratio_across_batches, fastest_runs, words)


def _by_batch(run: Run, backend: str, by_setting: Settings) -> dict[int, list[Run]]:
    """The comparable runs by batch. They differ from `run` in loss, seed and what follows from the batch."""
    kind = [key for key in SETTING if key not in ("batch_size", "steps", "horizon")]
    found: dict[int, list[Run]] = defaultdict(list)
    for backends in by_setting.values():
        for one in backends.get(backend, []):
            equal_tokens = isclose(one.summary["tokens"], run.summary["tokens"], rel_tol=0.1)
            same = one.values(kind) == run.values(kind) and equal_tokens
            if same and timed(one, one) and one.summary["tokens_per_second"]:
                found[one.summary["batch_size"]].append(one)
    return found


def _largest_batches(
    targets: Sequence[Target], pair: _Pair, answers: Sequence[dict[str, Any]], environment: dict[str, Any]
) -> list[Verdict]:
    """The verdicts on searches for the largest batch of runs like the pair's own."""
    targets = [target for target in targets if target.metric.name in (BATCH, AT_LARGEST)]
    run, backend, against = pair.own[0], pair.backend, pair.against
    found: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = defaultdict(dict)
    left_out: list[str] = []
    for answer, name in zip(answers, backend_names(answers), strict=True):
        like = all(answer[key] == run.summary[key] for key in ("model", "size", "activation_checkpointing"))
        if not like or not answer["environment"].get("gpus"):
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
        return [judge(one, *pair.names, [], setting=where, remark=reason) for one in targets]
    return [_searched(target, own, base, pair.names) for own, base in pairs for target in targets]


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
    probes: list[dict[str, Any]] = [  # at the largest batch; empty if none fitted
        next((p for p in answer["probes"] if p["batch"] == answer["max_sequences"] and p["fits"]), {})
        for answer in (own, base)
    ]
    speeds = [probe.get("tokens_per_second") for probe in probes]
    ratio = [speeds[0] / speeds[1]] if speeds[0] and speeds[1] else []
    clock = "" if all(map(by_wall_clock, probes)) else DEVICE_TIME
    return judge(target, *names, ratio, setting=where, doubts=[one for one in (inexact, clock) if one])


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
