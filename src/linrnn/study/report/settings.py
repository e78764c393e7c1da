"""What float8 blocks and shared projections change in the loss: runs with them beside runs without, all else equal."""

from collections.abc import Sequence

from linrnn.study.criteria import FINAL_LOSS, VALID_LOSS, Verdict, judge
from linrnn.study.plots.select import named
from linrnn.study.results import COURSE, Run
from linrnn.study.verdicts import learnt

FLOAT8, BF16 = "trainer.float8=blocks", "trainer.float8=none"
SHARED = "shared_projection_rank="
RULES = (
    "A pair is a run with float8 blocks or a shared projection, and a run with neither. Both have the same loss, seed, "
    "text and compiled blocks. The value is the first run's loss minus the second's. Verdicts follow the rules above."
)


def changes_of_loss(runs: Sequence[Run]) -> list[Verdict]:
    """Verdicts on the final and the validation loss of every run that has another with neither change beside it."""
    names = {run.name: name for run, name in named(runs)}
    usable = [run for run in runs if run.finished and not run.mixture and learnt(run, run)]
    plain = {(*_without(run), names[run.name]): run for run in usable if not _change(run)}
    pairs: dict[tuple[str, str, str], list[tuple[Run, Run]]] = {}
    for run in usable:
        base = plain.get((*_without(run), names[run.name]))
        if base is not None and (change := _change(run)):
            pairs.setdefault((base.summary["model"], names[run.name], change), []).append((run, base))
    found = []
    for criterion, key in ((FINAL_LOSS, "train_loss_nats"), (VALID_LOSS, "valid_loss_nats")):
        for (model, loss, change), both in pairs.items():
            values = [run.summary[key] - base.summary[key] for run, base in both if run.summary[key] is not None]
            against = f"{model}, full projections" if change.startswith(SHARED) else f"{model}, bf16"
            found.append(judge(criterion, f"{model}, {change}", loss, against, values))
    return found


def _change(run: Run) -> str:
    """`float8=blocks`, `shared_projection_rank=…` or both; empty for neither."""
    _, shared, rank = run.summary["model"].partition(f" {SHARED}")
    float8 = ["float8=blocks"] if FLOAT8 in (run.summary.get("training") or "").split() else []
    return ", ".join([*([f"{SHARED}{rank}"] if shared else []), *float8])


def _without(run: Run) -> tuple[object, ...]:
    """The seed, and what decides the course of a run, without the two changes."""
    own = dict(zip(COURSE, run.course, strict=True))
    own["model"] = own["model"].partition(f" {SHARED}")[0]
    own["training"] = (own["training"] or "").replace(FLOAT8, BF16)
    return (run.summary["seed"], *own.values())
