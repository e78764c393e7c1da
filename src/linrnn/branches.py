"""The proposal's "if the hypothesis is wrong": which of its branches the verdicts bear out."""

from collections.abc import Sequence

from linrnn.verdicts import (
    BASELINES,
    BATCH,
    CURVES,
    MEMORY,
    MET,
    MISSED,
    MVE_LOSS,
    OPEN,
    SPEED,
    SPEED_AT_LARGEST,
    Criterion,
    Verdict,
)

EXACT = ("compiled", "standard", "liger", "fla", "torch_native")  # losses beside ours
Branch = tuple[str, str, str]
Setting = tuple[str, str]


def branches(found: Sequence[Verdict]) -> list[Branch]:
    """Each with holds | does not hold | open, and the figures."""
    measured = [v for v in found if v.value is not None]
    named = [v.backend for v in measured if v.backend.split()[0] == "cce_kahan"]
    ours = next((name for name in named if "accumulate=kahan" in name or "accumulate" not in name), "cce_kahan")
    base = next((b for b in BASELINES if any((v.backend, v.against) == (ours, b) for v in measured)), BASELINES[0])

    def values(criterion: Criterion, backend: str) -> dict[Setting, float]:
        """By model and setting."""
        kind = (criterion, backend, base)
        return {(v.model, v.remark): v.value or 0 for v in measured if (v.criterion, v.backend, v.against) == kind}

    curves = [v for v in measured if v.criterion in (MVE_LOSS, CURVES) and v.model != "transformer"]
    return [
        _saturated(values(BATCH, ours), values(SPEED_AT_LARGEST, ours)),
        _loses_precision(
            [v for v in curves if (v.backend, v.against) == (ours, base)],
            [v for v in curves if v.backend.split()[0] in EXACT and v.against == base],
        ),
        _liger_suffices(values(MEMORY, ours), values(MEMORY, "liger")),
    ]


def _saturated(batches: dict[Setting, float], speeds: dict[Setting, float]) -> Branch:
    """From searches that ended with a larger batch than the baseline's."""
    name = "a larger batch does not give speed: the GPU is saturated already"
    larger = [(speeds[setting], batch) for setting, batch in batches.items() if batch > 1 and setting in speeds]
    if not larger:
        return name, OPEN, "no search found a larger batch" if batches else BATCH.source
    speed, batch = max(larger)
    return name, _word(speed < SPEED.target), f"batch x {batch:.2f}, tokens/s x {speed:.3f} at most"


def _loses_precision(own: Sequence[Verdict], others: Sequence[Verdict]) -> Branch:
    """It does where other exact losses, whose rounding differs too, stay closer to the baseline."""
    name = "CCE-Kahan loses precision in linear RNNs"
    if not own:
        return name, OPEN, CURVES.source
    figures = [f"at most {max(v.value or 0 for v in own):.4f} nats apart"]
    figures += [f"other exact losses {max(v.value or 0 for v in others):.4f}"] if others else []
    figures += ["medians over seeds"] if any(v.seeds > 1 for v in own) else []
    beyond = False
    for v in own:
        rivals = [o.value or 0 for o in others if (o.model, o.criterion) == (v.model, v.criterion)]
        beyond |= v.verdict == MISSED and bool(rivals) and (v.value or 0) > max(rivals)
    word = _word(beyond) if beyond or all(v.verdict == MET for v in own) else OPEN
    return name, word, ", ".join(figures)


def _liger_suffices(own: dict[Setting, float], liger: dict[Setting, float]) -> Branch:
    """Whether it saves nine tenths of the memory that ours saves, wherever ours saves any."""
    name = "Liger already captures most of the benefit"
    shares = [(1 - liger[setting]) / (1 - ratio) for setting, ratio in own.items() if setting in liger and ratio < 1]
    if not shares:
        return name, OPEN, "runs with loss=liger"
    return name, _word(min(shares) >= 0.9), f"at least {min(shares):.0%} of the memory that ours saves"


def _word(holds: bool) -> str:
    return "holds" if holds else "does not hold"
