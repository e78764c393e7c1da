"""Break a training step's memory and time down by component: measured figures beside formulas."""

import contextlib
import statistics
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from linrnn.config.schema import TrainerConfig
from linrnn.core.errors import ConfigError
from linrnn.core.garbage import collect_after, collected_at_known_points
from linrnn.core.machine import GIB
from linrnn.core.tables import Table, show
from linrnn.losses import LossOutput
from linrnn.models.architecture import Architecture
from linrnn.profiling.components import PROJECTIONS, PartClock
from linrnn.runs.environment import describe_environment
from linrnn.runs.intervals import Estimate, estimate
from linrnn.runs.summary import names_of_run
from linrnn.training.plan import Plan
from linrnn.training.runtime import device_name

SCAN = "mixer/scan"  # all of a mixer but its linear layers: recurrence or attention, convolutions, gates, norms
PASSES = ("forward", "backward", "recomputed")
TIMED = ("embedding", "norms", "mixer", "mlp", "loss")
STEP, HOST, REST = "step", "host", "the rest"  # the first two are no parts of a step
STATE = ("parameters", "gradients", "optimizer", "activations")


def measure(trainer: Any, warmup_steps: int, steps: int) -> dict[str, Any]:
    """Measure training steps by component. In bytes, which stand beside the formulas', and seconds; None: not measured.

    After the warm-up, one step measures memory and `steps` steps measure times. The last step measures the memory
    without an output layer.

    Args:
        trainer: a :class:`linrnn.training.trainer.Trainer` that has not run; its `train_step` is called.

    Returns:
        run, environment: what was measured, as in a run's summary, and where.
        memory: component -> {"measured", "formula"}; the parts of the activations, activations/…, by formula alone.
        time: part -> {"forward", "backward", "recomputed"}, medians; step, optimizer and host have "total".
        steps: seconds of each timed step by part and pass ("mlp/forward", "step"), whose medians `time` holds.
    """
    memory_observer = trainer.log.memory
    times: list[dict[str, float]] = []
    with collected_at_known_points():
        for _ in range(warmup_steps):
            _step(trainer)
        memory_observer.start()
        _step(trainer)
        measured = memory_observer.report()
        for _ in range(steps):
            clock = PartClock(trainer.model, trainer.optimizer, trainer.device)
            trainer.log.memory = clock
            _step(trainer, clock.watch())
            times.append(with_scan(clock.seconds()))
        trainer.log.memory = memory_observer
        trainer.loss = sum_of_inputs  # this step makes the weights meaningless, so it comes last
        memory_observer.start()
        _step(trainer)
        measured["without_loss_layer"] = memory_observer.report().get("peak")
    plan, arch = trainer.plan, trainer.architecture
    return {
        "run": {
            **names_of_run(plan.config),
            "optimizer": plan.config.optimizer.name,
            "precision": plan.precision,
            "device": device_name(plan.device),
            "vocab_size": arch.vocab_size,
        },
        "environment": describe_environment(),
        "memory": _memory(plan, arch, measured),
        "time": {
            **{part: {one: median(times, f"{part}/{one}") for one in PASSES} for part in (*TIMED, PROJECTIONS, SCAN)},
            **{part: {"total": median(times, part)} for part in ("optimizer", "step", "host")},
        },
        "steps": times,
    }


def _step(trainer: Any, watched: contextlib.AbstractContextManager[None] | None = None) -> None:
    """A training step, with Python's garbage collected after it, as in a run."""
    with watched or contextlib.nullcontext():
        trainer.train_step()
    collect_after(trainer.steps_here)


def check_parts(config: TrainerConfig) -> None:
    """Reject a run whose steps do not call its modules one by one: hooks on the modules would see nothing.

    Raises:
        ConfigError: it replays a CUDA graph, or compiles blocks.
    """
    remedy = "benchmarks/steps.py measures whole steps of such a run"
    if config.cuda_graph:
        raise ConfigError("trainer.cuda_graph=true: a replayed graph calls no module that could be timed", remedy)
    if config.compile != "none":
        raise ConfigError(f"trainer.compile={config.compile}: compiled blocks have no parts to time", remedy)


def sum_of_inputs(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> LossOutput:
    """A stand-in for a loss: both inputs get gradients, whose memory every loss needs. It holds nothing else."""
    return LossOutput(hidden_ND.sum(dtype=torch.float32) + weight_VD.sum(dtype=torch.float32), labels_N.new_ones(()))


def with_scan(seconds: dict[str, float]) -> dict[str, float]:
    """The times of one step, and what is left of each pass of the mixers without their projections."""
    left = {
        f"{SCAN}/{pass_}": seconds[f"mixer/{pass_}"] - seconds.get(f"{PROJECTIONS}/{pass_}", 0.0)
        for pass_ in PASSES
        if f"mixer/{pass_}" in seconds
    }
    return seconds | left


def median(times: Iterable[dict[str, float]], name: str) -> float | None:
    """The median over the steps that have `name`; None if no step has it."""
    values = [entry[name] for entry in times if name in entry]
    return statistics.median(values) if values else None


def seconds_of_steps(timed: Iterable[dict[str, float]]) -> list[dict[str, float]]:
    """Seconds by part of every timed step, all passes together, with what no part holds."""
    found = []
    for step in timed:
        seconds: dict[str, float] = defaultdict(float)
        for name, value in step.items():  # `part/pass`
            seconds[name.rpartition("/")[0] or name] += value
        found.append({**seconds, REST: parts_of(seconds)[REST]})
    return found


def parts_of(times: dict[str, float]) -> dict[str, float]:
    """Seconds by part, which do not overlap: of the mixers their projections and their scan, where these are there."""
    divided = {name.split("/")[0] for name in times if "/" in name}
    parts = {name: seconds for name, seconds in times.items() if name not in {STEP, HOST, REST} | divided}
    return {**parts, REST: times[STEP] - sum(parts.values())}


def share_of_step(steps: list[dict[str, float]], part: str) -> Estimate:
    """A part's share of :func:`seconds_of_steps`: the median over the steps, and its 90 % interval."""
    return estimate([seconds[part] / seconds[STEP] for seconds in steps], ratios=False)


def _memory(plan: Plan, arch: Architecture, measured: dict[str, int | None]) -> dict[str, dict[str, int | None]]:
    estimate = plan.memory_estimate(arch)
    formula = dict[str, int | None](plan.training_state(arch) if estimate is None else estimate.components())
    measured = {**measured, "peak/without_loss_layer": measured["without_loss_layer"]}
    names = [*dict.fromkeys([*STATE, *formula, "loss_forward", "loss_backward", "peak", "peak/without_loss_layer"])]
    names += ["resident_peak"] * ("resident_peak" in measured)
    return {name: {"measured": measured.get(name), "formula": formula.get(name)} for name in names}


# ------------------------------------------------------------------------------------------------------- for people
def markdown(b: dict[str, Any]) -> str:
    """The breakdown as Markdown tables."""
    run = b["run"]
    return f"""# {run["run_name"]}: where memory and time go

{run["device"]}, {run["precision"]}, B = {run["batch_size"]}, T = {run["seq_len"]}, V = {run["vocab_size"]:,}, \
activation checkpointing {run["activation_checkpointing"]}, optimizer {run["optimizer"]}

{_memory_table(b)}

loss_forward, loss_backward: the most that the output layer's passes add, gradients of hidden states and head \
included. peak/without_loss_layer: of a step whose loss is the sum of hidden states and head. The formulas are a GPU's.

{_time_table(b)}

Shares: the median over {len(b["steps"])} steps of one process, and Student's 90 % interval of the mean, which one \
slow step widens. A part's time is the device's between entering and leaving it, gaps included.

projections: the mixers' linear layers. scan: everything else in the mixers (recurrence or attention, convolutions, \
gates, norms). host: until the CPU had given the device all work of the step. Where that is close to the whole step, \
the parts hold gaps in which the device waits.

"""


def _memory_table(b: dict[str, Any]) -> str:
    rows, peak = [], b["memory"]["peak"]["measured"]
    for name, row in b["memory"].items():
        share = row["measured"] / peak if peak and row["measured"] is not None else None
        rows.append((name, show(row["measured"], ".3f", GIB), show(row["formula"], ".3f", GIB), show(share, ".1%")))
    columns = ("memory", "measured, GiB", "formula, GiB", "share of the measured peak")
    return "\n".join(Table(columns, rows, words=("memory",)).markdown())


def _time_table(b: dict[str, Any]) -> str:
    timed = seconds_of_steps(b["steps"])

    def share(part: str) -> str:
        """Of the step, with the 90 % interval over the timed steps where there is one."""
        if part not in timed[0]:
            return "-"
        found = share_of_step(timed, part)
        interval = "" if found.low is None or part == "step" else f" ({found.low:.1%} to {found.high:.1%})"
        return f"{found.value:.1%}{interval}"

    rows: list[tuple[str, ...]] = []
    for part in ("embedding", "norms", "mixer", PROJECTIONS, SCAN, "mlp", "loss"):
        name = part if part in TIMED else f"of it {part.removeprefix('mixer/')}"
        rows.append((name, *(show(b["time"][part][pass_], ".2f", 1e-3) for pass_ in PASSES), share(part)))
    for name in ("optimizer", REST, "step", "host"):
        rows.append((name, "", "", "", f"{show(median(timed, name), '.2f', 1e-3)} ms, {share(name)}"))
    columns = ("time", *(f"{pass_}, ms" for pass_ in PASSES), "share of the step")
    return "\n".join(Table(columns, rows, words=("time",)).markdown())
