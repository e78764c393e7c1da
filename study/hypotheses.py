"""The proposal's section "if the hypothesis is wrong": which of its branches the verdicts support."""

from collections.abc import Sequence

from linrnn.report.targets import BASELINES, INCONCLUSIVE, NOT_MEASURED, NOT_REACHED, REACHED, Target, Verdict
from linrnn.runs.intervals import LEAST_PAIRS
from study.criteria import BATCH, CURVES, MEMORY, MVE_LOSS, SPEED, SPEED_AT_LARGEST

OTHER_EXACT = ("compiled", "standard", "liger", "fla", "torch_native")  # exact losses other than ours
Branch = tuple[str, str, str]
Setting = tuple[str, str]


def branches(found: Sequence[Verdict]) -> list[Branch]:
    """Every branch with holds | does not hold | inconclusive | not measured, and its figures."""
    measured = [v for v in found if v.value is not None]
    named = [v.backend for v in measured if v.backend.split()[0] == "cce_kahan"]
    ours = next((name for name in named if "accumulate=kahan" in name or "accumulate" not in name), "cce_kahan")
    base = next((b for b in BASELINES if any((v.backend, v.against) == (ours, b) for v in measured)), BASELINES[0])

    def of(criterion: Target, backend: str) -> dict[Setting, Verdict]:
        """Verdicts on a criterion, by model and setting."""
        kind = (criterion, backend, base)
        return {(v.model, v.setting): v for v in measured if (v.target, v.backend, v.against) == kind}

    curves = [v for v in measured if v.target in (MVE_LOSS, CURVES) and v.model != "transformer"]
    return [
        _saturated(of(BATCH, ours), of(SPEED_AT_LARGEST, ours)),
        _loses_precision(
            [v for v in curves if (v.backend, v.against) == (ours, base)],
            [v for v in curves if v.backend.split()[0] in OTHER_EXACT and v.against == base],
        ),
        _liger_suffices(of(MEMORY, ours), of(MEMORY, "liger")),
    ]


def _saturated(batches: dict[Setting, Verdict], speeds: dict[Setting, Verdict]) -> Branch:
    """Judged from searches that found a larger batch than the baseline's."""
    name = "a larger batch does not give speed: the GPU is saturated already"
    larger = {setting: _value(v) for setting, v in batches.items() if _value(v) > 1 and setting in speeds}
    if not larger:
        return name, NOT_MEASURED, "no search found a larger batch" if batches else BATCH.metric.needs
    best = max(larger, key=lambda setting: _value(speeds[setting]))
    figures = f"batch x {larger[best]:.2f}, tokens/s x {_value(speeds[best]):.3f} at most, n = {speeds[best].n}"
    decided = [v for setting in larger if (v := speeds[setting]).n >= LEAST_PAIRS and v.low is not None]
    if any(v.low is not None and v.low >= SPEED.bound for v in decided):
        return name, _word(False), figures
    slow = len(decided) == len(larger) and all(v.high is not None and v.high < SPEED.bound for v in decided)
    return name, _word(True) if slow else INCONCLUSIVE, figures


def _loses_precision(own: Sequence[Verdict], others: Sequence[Verdict]) -> Branch:
    """It holds if other exact losses, whose rounding also differs, stay closer to the baseline."""
    name = "CCE-Kahan loses precision in linear RNNs"
    if not own:
        return name, NOT_MEASURED, CURVES.metric.needs
    figures = [f"at most {max(map(_distance, own)):.4f} nats apart"]
    figures += [f"other exact losses {max(map(_distance, others)):.4f}"] if others else []
    figures.append(f"n = {min(v.n for v in own)}")
    beyond = False
    for v in own:
        rivals = [_distance(o) for o in others if (o.model, o.target) == (v.model, v.target)]
        beyond |= v.verdict == NOT_REACHED and bool(rivals) and _nearest(v) > max(rivals)
    word = _word(beyond) if beyond or all(v.verdict == REACHED for v in own) else INCONCLUSIVE
    return name, word, ", ".join(figures)


def _liger_suffices(own: dict[Setting, Verdict], liger: dict[Setting, Verdict]) -> Branch:
    """It holds if Liger saves nine tenths of our saving in memory wherever we save any."""
    name = "Liger already captures most of the benefit"
    shares = [
        (1 - _value(liger[setting])) / (1 - _value(v))
        for setting, v in own.items()
        if setting in liger and _value(v) < 1
    ]
    if not shares:
        return name, NOT_MEASURED, "runs with loss=liger"
    return name, _word(min(shares) >= 0.9), f"at least {min(shares):.0%} of the memory that ours saves"


def _value(verdict: Verdict) -> float:
    return verdict.value or 0


def _distance(verdict: Verdict) -> float:
    """Distance from the baseline, in either direction."""
    return abs(_value(verdict))


def _nearest(verdict: Verdict) -> float:
    """The smallest distance from the baseline within the interval of a verdict that excludes zero."""
    return min(abs(_value(verdict) if bound is None else bound) for bound in (verdict.low, verdict.high))


def _word(holds: bool) -> str:
    return "holds" if holds else "does not hold"
