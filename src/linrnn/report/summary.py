"""What a report opens with: three plain sentences. What ran, what differs, and by how much."""

import math
from collections import Counter
from collections.abc import Sequence

from linrnn.core.machine import GIB
from linrnn.models.facts import model_in_words
from linrnn.report.runs import SETTING, Run, backend_names, environment_of
from linrnn.report.targets import LEAST_STEPS, Verdict
from linrnn.report.verdicts import CONTROL, EXACT

SAME_SPEED = 0.02  # an interval of tokens/s that stays within this of 1 is called the same speed
SAME_MEMORY = 0.01  # two ratios of memory that are this near are called the same
MOST = 4  # values of a key that the second sentence names
FOLLOWING = (
    "data_fingerprint",
    "n_parameters",
    "steps",
    "horizon",
    "training",
    "origin",
)  # from other keys, or unnamed


def sentences(runs: Sequence[Run], compared: Sequence[Verdict]) -> list[str]:
    """What ran, what differs among the runs, and how far the most memory-efficient loss is from the baseline.

    Args:
        compared: comparisons without targets.
    """
    several = len(set(backend_names([run.summary for run in runs]))) > 1
    chosen = _leanest(compared) if several else {}
    return [_what_ran(runs), _what_differs(runs), _by_how_much(runs, chosen) if chosen else _of_one_loss(runs)]


def _what_ran(runs: Sequence[Run]) -> str:
    models = list(dict.fromkeys((run.summary["model"], run.summary["size"]) for run in runs))
    named = [f"{model_in_words(model)} ({size})" for model, size in models]
    of = " and ".join(named) if len(named) < 3 else f"{len(named)} models"
    environment = environment_of(runs)
    gpus = list(dict.fromkeys(gpu["name"] for gpu in environment.get("gpus", [])))
    cpu = all(run.summary.get("device") == "cpu" for run in runs)
    where = " on a CPU" if cpu else f" on {' and '.join(gpus)}" if gpus else ""
    found = Counter(run.summary["status"] for run in runs)
    others = ", ".join(f"{n} {status.replace('_', ' ')}" for status, n in found.items() if status != "finished")
    ended = f"{found['finished']} finished, {others}" if others else "all finished" if len(runs) > 1 else "finished"
    return f"{len(runs)} run{'s' * (len(runs) > 1)} of {of}{where}: {ended}."


def _what_differs(runs: Sequence[Run]) -> str:
    """The losses, the seeds, and the keys of the setting in which runs differ."""
    if len(runs) == 1:
        return f"loss={runs[0].summary['loss']}; there is no other run to compare it with."
    values = {"loss": backend_names([run.summary for run in runs]), "seed": [run.summary["seed"] for run in runs]}
    values |= {key: [dict(zip(SETTING, run.setting, strict=True))[key] for run in runs] for key in SETTING}
    differing = {key: list(dict.fromkeys(own)) for key, own in values.items() if key not in FOLLOWING}
    words = [
        f"{key} ({', '.join(map(str, own)) if len(own) <= MOST else f'{len(own)} values'})"
        for key, own in differing.items()
        if len(own) > 1
    ]
    return f"They differ in {'; '.join(words)}." if words else "They do not differ in loss, seed or setting."


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


def _by_how_much(runs: Sequence[Run], own: dict[str, Verdict]) -> str:
    first = next(iter(own.values()))
    memory, speed = _value(own, "peak_memory_bytes"), own.get("tokens_per_second")
    several = len({run.summary["model"] for run in runs}) > 1
    where = f"With {model_in_words(first.model)}, " if several else ""
    if memory is None and (speed is None or speed.value is None):
        told = f"{where}{first.backend} beside {first.against}: memory and speed are compared on a GPU alone"
    else:
        used = "of unmeasured memory runs beside" if memory is None else f"uses {_share(memory)}"
        told = f"{where}{first.backend} {used} {first.against} {_speed(speed)}"
    return f"{told}; {_losses(own)}."


def _share(ratio: float) -> str:
    if abs(ratio - 1) < SAME_MEMORY:
        return "as much memory as"
    return f"{abs(1 - ratio) * 100:.0f} % {'less' if ratio < 1 else 'more'} memory than"


def _speed(v: Verdict | None) -> str:
    """The speed beside the baseline's, as words that follow its name."""
    if v is None or v.value is None:
        return "(speed not compared)"
    if v.low is None or v.high is None:
        return f"at {v.value:.3f} times its speed (one pair)"
    apart = max(abs(v.low - 1), abs(v.high - 1))
    interval = f"90 % interval {v.low:.3f} to {v.high:.3f}, {v.n} pairs"
    if apart <= SAME_SPEED:
        return f"at the same speed (within {max(math.ceil(apart * 100), 1)} %)"
    if v.low <= 1 <= v.high:
        return f"at {v.value:.3f} times its speed, which may be chance ({interval})"
    return f"at {v.value:.3f} times its speed ({interval})"


def _losses(own: dict[str, Verdict]) -> str:
    for metric, words in (("valid_loss_nats", "validation"), ("train_loss_nats", "training")):
        if (v := own.get(metric)) is not None and v.value is not None:
            told = f"its final {words} loss is {abs(v.value):.4f} nats {'higher' if v.value > 0 else 'lower'}"
            if v.low is None or v.high is None:
                return f"{told} (one pair)"
            chance = ", which may be chance" if v.low <= 0 <= v.high else ""
            return f"{told}{chance} (90 % interval {v.low:+.4f} to {v.high:+.4f}, {v.n} pairs)"
    return f"final losses are not compared, which takes runs with one seed and {LEAST_STEPS} steps or more"


def _of_one_loss(runs: Sequence[Run]) -> str:
    """The best run of a group without two losses to compare."""
    best = min((run for run in runs if run.finished), key=lambda run: run.summary["train_loss_nats"], default=None)
    if best is None:
        return "There is nothing to compare, because no run finished."
    s = best.summary
    figures = [f"a training loss of {s['train_loss_nats']:.4f} nats"] if s["train_loss_nats"] is not None else []
    figures += [f"{s['peak_memory_bytes'] / GIB:.2f} GiB at its peak"] if s["peak_memory_bytes"] else []
    figures += [f"{s['tokens_per_second']:,.0f} tokens/s"] if s["tokens_per_second"] else []
    return f"{best.name} reached {', '.join(figures) or 'its last step'}."


def _value(own: dict[str, Verdict], metric: str) -> float | None:
    return own[metric].value if metric in own else None
