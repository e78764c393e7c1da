"""What float8, compiled layers and shared projections change in the loss: runs with them beside runs without.

A pair is a run with a change, and a run without it, of the same loss, seed and text. Beside float8 and beside a shared
projection both compile their layers, or neither does. Compiled layers compute the same function, rounded otherwise.
"""

from collections.abc import Sequence

from linrnn.report.metrics import learnt
from linrnn.report.plots import named
from linrnn.report.runs import COURSE, Run
from linrnn.report.targets import Verdict, judge
from study.criteria import FINAL_LOSS, VALID_LOSS

FLOAT8, BF16 = "trainer.float8=blocks", "trainer.float8=none"
COMPILED, PLAIN = "trainer.compile=blocks", "trainer.compile=none"
SHARED = "shared_projection_rank="


def changes_of_loss(runs: Sequence[Run]) -> list[Verdict]:
    """Verdicts on the final and the validation loss of every run that has another without its change beside it."""
    names = {run.name: name for run, name in named(runs)}
    usable = [run for run in runs if run.finished and learnt(run, run)]
    bases = {(*_course(run), names[run.name]): run for run in usable if not _change(run)}
    pairs: dict[tuple[str, str, str, str], list[tuple[Run, Run]]] = {}
    for run in usable:
        change, against = _change(run), "full projections" if SHARED in run.summary["model"] else "bf16"
        without = {FLOAT8: BF16}
        if not change and COMPILED in _training(run):
            change, against, without = "compile=blocks", "plain blocks", {COMPILED: PLAIN}
        base = bases.get((*_course(run, without), names[run.name]))
        if base is not None and change:
            pairs.setdefault((base.summary["model"], names[run.name], change, against), []).append((run, base))
    found = []
    for criterion, key in ((FINAL_LOSS, "train_loss_nats"), (VALID_LOSS, "valid_loss_nats")):
        for (model, loss, change, against), both in pairs.items():
            values = [run.summary[key] - base.summary[key] for run, base in both if run.summary[key] is not None]
            found.append(judge(criterion, f"{model}, {change}", loss, f"{model}, {against}", values))
    return found


def _training(run: Run) -> list[str]:
    return (run.summary.get("training") or "").split()


def _change(run: Run) -> str:
    """`float8=blocks`, `shared_projection_rank=…` or both; empty for neither."""
    _, shared, rank = run.summary["model"].partition(f" {SHARED}")
    float8 = ["float8=blocks"] if FLOAT8 in _training(run) else []
    return ", ".join([*([f"{SHARED}{rank}"] if shared else []), *float8])


def _course(run: Run, without: dict[str, str] | None = None) -> tuple[object, ...]:
    """The seed, and what decides the course of a run, with full projections.

    Args:
        without: overrides that are replaced by others.
    """
    own = dict(zip(COURSE, run.course, strict=True))
    own["model"] = own["model"].partition(f" {SHARED}")[0]
    own["training"] = " ".join((without or {}).get(word, word) for word in (own["training"] or "").split())
    return (run.summary["seed"], *own.values())
