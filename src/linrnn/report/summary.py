"""What a report opens with: three plain sentences, from the comparisons of its runs with their baseline."""

import math
from collections import Counter
from collections.abc import Sequence

from linrnn.core.machine import GIB
from linrnn.models.facts import model_in_words
from linrnn.report.runs import Run, backend_names
from linrnn.report.targets import INCONCLUSIVE, LEAST_STEPS, NOT_MEASURED, NOT_REACHED, REACHED, Verdict
from linrnn.report.verdicts import CONTROL, EXACT

SAME_SPEED = 0.02  # an interval of tokens/s that stays within this of 1 is called the same speed
SAME_MEMORY = 0.01  # two ratios of memory that are this near are called the same


def sentences(runs: Sequence[Run], compared: Sequence[Verdict], judged: Sequence[Verdict]) -> list[str]:
    """Memory and speed of the leanest loss, how its loss ended, and the targets, or how the runs ended.

    Args:
        compared: comparisons without targets.
        judged: verdicts on the targets; empty if there are none.
    """
    chosen = _leanest(compared) if len(set(backend_names([run.summary for run in runs]))) > 1 else {}
    first = _of_one_loss(runs) if not chosen else [_memory_and_speed(runs, chosen), _losses(chosen)]
    return [*first, _targets(judged) if judged else _ends(runs)]


def _leanest(compared: Sequence[Verdict]) -> dict[str, Verdict]:
    """By metric the comparisons of the loss with the lowest peak of memory; of several within SAME_MEMORY the fastest.

    They are of the model and setting with most pairs. Where neither was measured: our exact loss, or the
    first.
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


def _memory_and_speed(runs: Sequence[Run], own: dict[str, Verdict]) -> str:
    first = next(iter(own.values()))
    memory, speed = _value(own, "peak_memory_bytes"), own.get("tokens_per_second")
    pairs = max(v.n for v in own.values())
    several = len({run.summary["model"] for run in runs}) > 1
    where = f"With {model_in_words(first.model)}, across" if several else "Across"
    across = f"{where} {2 * pairs} runs" if pairs else f"In {len(runs)} runs"
    if memory is None and (speed is None or speed.value is None):
        device = " on a CPU" if all(run.summary.get("device") == "cpu" for run in runs) else ""
        return (
            f"{across}{device}, {first.backend} stands beside {first.against}; memory and speed are compared on a GPU "
            "alone."
        )
    used = "its memory was not measured" if memory is None else f"{first.backend} used {_share(memory)}"
    return f"{across}, {used} {first.against} {_speed(speed)}."


def _share(ratio: float) -> str:
    if abs(ratio - 1) < SAME_MEMORY:
        return "as much memory as"
    return f"{abs(1 - ratio) * 100:.0f} % {'less' if ratio < 1 else 'more'} memory than"


def _speed(v: Verdict | None) -> str:
    """The speed beside the baseline's, as words that follow its name."""
    if v is None or v.value is None:
        return "(its speed was not compared)"
    if v.low is None or v.high is None:
        return f"at {v.value:.3f} times its speed (one pair)"
    apart = max(abs(v.low - 1), abs(v.high - 1))
    interval = f"90 % interval {v.low:.3f} to {v.high:.3f}, {v.n} pairs"
    if apart <= SAME_SPEED:
        return f"at the same speed (within {max(math.ceil(apart * 100), 1)} %)"
    if v.low <= 1 <= v.high:
        return f"at a speed that does not differ for certain ({v.value:.3f} times, {interval})"
    return f"at {v.value:.3f} times its speed ({interval})"


def _losses(own: dict[str, Verdict]) -> str:
    for metric, words in (("valid_loss_nats", "validation"), ("train_loss_nats", "training")):
        if (v := own.get(metric)) is not None and v.value is not None:
            side = "above" if v.value > 0 else "below"
            told = f"Its final {words} loss lies {abs(v.value):.4f} nats {side} {v.against}'s"
            if v.low is None or v.high is None:
                return f"{told} in the one pair that there is."
            chance = " (no difference for certain)" if v.low <= 0 <= v.high else ""
            return f"{told}{chance}: 90 % interval {v.low:+.4f} to {v.high:+.4f} nats, {v.n} pairs."
    return f"Losses are not compared: that takes a run of each loss with one seed, of {LEAST_STEPS} steps or more."


def _of_one_loss(runs: Sequence[Run]) -> list[str]:
    """Of a group without two losses to compare."""
    losses = list(dict.fromkeys(run.summary["loss"] for run in runs))
    told = f"{len(runs)} run{'s' * (len(runs) > 1)} with loss={', '.join(losses)}: nothing to compare with."
    best = min((run for run in runs if run.finished), key=lambda run: run.summary["train_loss_nats"], default=None)
    if best is None:
        return [told, "None of them finished."]
    s = best.summary
    figures = [f"a training loss of {s['train_loss_nats']:.4f} nats"] if s["train_loss_nats"] is not None else []
    figures += [f"{s['peak_memory_bytes'] / GIB:.2f} GiB at its peak"] if s["peak_memory_bytes"] else []
    figures += [f"{s['tokens_per_second']:,.0f} tokens/s"] if s["tokens_per_second"] else []
    return [told, f"{best.name} reached {', '.join(figures) or 'its last step'}."]


def _targets(judged: Sequence[Verdict]) -> str:
    """How many targets came to which answer. Those of the control are not counted: it is no loss that is judged."""
    found = Counter(v.verdict for v in judged if v.backend != CONTROL)
    words = [f"{found[word]} {word}" for word in (REACHED, NOT_REACHED, INCONCLUSIVE, NOT_MEASURED) if found[word]]
    return f"The sweep's targets: {', '.join(words)}."


def _ends(runs: Sequence[Run]) -> str:
    found = Counter(run.summary["status"] for run in runs)
    if set(found) == {"finished"}:
        return "Every run finished."
    others = ", ".join(f"{n} {status.replace('_', ' ')}" for status, n in found.items() if status != "finished")
    return f"{found['finished']} of {len(runs)} runs finished; the others: {others}."


def _value(own: dict[str, Verdict], metric: str) -> float | None:
    return own[metric].value if metric in own else None
