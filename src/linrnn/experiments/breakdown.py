"""Break a training step's memory and time down by component: measured figures beside formulas."""

import contextlib
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from linrnn import costs
from linrnn.config.schema import TrainerConfig
from linrnn.core.errors import ConfigError
from linrnn.core.garbage import collect_after, collected_at_known_points
from linrnn.core.machine import GIB
from linrnn.core.tables import Table, show
from linrnn.experiments.dry_run import kernel_flops
from linrnn.losses import LossOutput
from linrnn.losses.registry import FORMULAS_OF_LOSSES
from linrnn.models.architecture import Architecture
from linrnn.models.language_model import compute_dtype
from linrnn.profiling.components import PROJECTIONS, PartClock, SavedActivations
from linrnn.runs.environment import describe_environment
from linrnn.runs.intervals import Estimate
from linrnn.runs.step_parts import REST, seconds_of_steps, share_of_step
from linrnn.runs.summary import names_of_run
from linrnn.training.plan import Plan
from linrnn.training.runtime import device_name

# Parts of the time, and the components of the FLOPs that belong to each.
SCAN = "mixer/scan"  # all of a mixer but its linear layers: recurrence or attention, convolutions, gates, norms
FLOPS_OF = {
    "mixer": ("mixer_projections", "mixer_scan"),
    PROJECTIONS: ("mixer_projections",),
    SCAN: ("mixer_scan",),
    "mlp": ("mlp",),
    "loss": ("vocabulary",),
}
PASSES = ("forward", "backward", "recomputed")
TIMED = ("embedding", "norms", "mixer", "mlp", "loss")


@dataclass
class Breakdown:
    """Figures in bytes, seconds and FLOPs; null if a figure was not or cannot be measured.

    Attributes:
        run: what was measured, as in a run's summary.
        environment: versions, hardware, commit.
        memory: component -> {"measured", "formula"}; activations/… is what the graph saves, by the part that saves it.
        time: part -> {"forward", "backward", "recomputed"} seconds, medians; step, optimizer and host have "total".
            mixer/projections and mixer/scan are the two parts of mixer.
        flops: component -> {"forward", "backward", "recomputed"}, as the kernels compute them; "optimizer" has
            "update". Null: no formulas.
        traffic: part -> {"forward", "backward"} bytes of HBM by formula; "optimizer" has "total".
        mfu, mfu_6n: see :mod:`linrnn.costs.flops`.
        hardware_utilisation: share of the device's peak, counting everything that its kernels compute.
        peak_flops_per_second: the device's peak; null if unknown.
        steps: seconds of each timed step by part and pass ("mlp/forward", "step"), whose medians `time` holds; empty
            if the medians alone were kept.
    """

    run: dict[str, Any]
    environment: dict[str, Any]
    memory: dict[str, dict[str, int | None]]
    time: dict[str, dict[str, float | None]]
    flops: dict[str, dict[str, int]] | None
    traffic: dict[str, dict[str, int] | None]
    mfu: float | None
    mfu_6n: float | None
    hardware_utilisation: float | None
    peak_flops_per_second: float | None
    steps: list[dict[str, float]] = field(default_factory=list)


def measure(trainer: Any, name: str, warmup_steps: int, steps: int) -> Breakdown:
    """Measure training steps by component.

    After the warm-up, one step measures memory and one the saved activations. `steps` steps measure times. The last
    step measures the memory without a output layer.

    Args:
        trainer: a :class:`linrnn.training.trainer.Trainer` that has not run; its `train_step` is called.
        name: the run's name.
    """
    memory_observer = trainer.log.memory
    saved = SavedActivations(trainer.model)
    times = []
    with collected_at_known_points():
        for _ in range(warmup_steps):
            _step(trainer)
        memory_observer.start()
        _step(trainer)
        measured = memory_observer.report()
        _step(trainer, saved.watch())
        for _ in range(steps):
            clock = PartClock(trainer.model, trainer.optimizer, trainer.device)
            trainer.log.memory = clock
            _step(trainer, clock.watch())
            times.append(clock.seconds())
        trainer.log.memory = memory_observer
        trainer.loss = sum_of_inputs  # this step makes the weights meaningless, so it comes last
        memory_observer.start()
        _step(trainer)
        measured["without_loss_layer"] = memory_observer.report().get("peak")
    return assemble(trainer.plan, trainer.architecture, name, measured, dict(saved.bytes), times)


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


def assemble(
    plan: Plan,
    arch: Architecture,
    name: str,
    measured: dict[str, int | None],
    saved: dict[str, int],
    times: Sequence[dict[str, float]],
) -> Breakdown:
    """The measured figures beside the formulas.

    Args:
        measured: :meth:`linrnn.profiling.MemoryByComponent.report`, and `without_loss_layer`: the peak of a step with
            :func:`sum_of_inputs`.
        saved: :attr:`linrnn.profiling.components.SavedActivations.bytes` of one step.
        times: :meth:`linrnn.profiling.components.PartClock.seconds` of every timed step.
    """
    config, trainer = plan.config, plan.config.trainer
    compute = compute_dtype(plan.precision).itemsize
    n_tokens = trainer.batch_size * trainer.seq_len
    step = median(times, "step")
    flops = kernel_flops(plan, arch)
    device = device_name(plan.device)
    peak = costs.peak_flops_per_second(device, plan.precision)
    traffic = costs.loss_traffic(config.loss, n_tokens, arch.hidden_size, arch.vocab_size, compute)
    times = [with_scan(seconds) for seconds in times]
    return Breakdown(
        run={
            **names_of_run(config, name, world_size=1),
            "optimizer": config.optimizer.name,
            "precision": plan.precision,
            "device": device,
            "vocab_size": arch.vocab_size,
        },
        environment=describe_environment(),
        memory=_memory(plan, arch, measured, saved, compute),
        time={
            **{
                part: {pass_: median(times, f"{part}/{pass_}") for pass_ in PASSES}
                for part in (*TIMED, PROJECTIONS, SCAN)
            },
            **{name: {"total": median(times, name)} for name in ("optimizer", "step", "host")},
        },
        flops=None
        if flops is None
        else {
            component: {
                "forward": flops.forward[component],
                "backward": flops.backward[component],
                "recomputed": flops.recomputed.get(component, 0),
            }
            for component in flops.forward
        }
        | {"optimizer": {"update": flops.update}},
        traffic={
            "loss": traffic
            and {pass_: trainer.accumulation_steps * size for pass_, size in zip(PASSES[:2], traffic, strict=True)},
            "optimizer": _total(costs.optimizer_traffic(arch, config.optimizer, plan.precision)),
        },
        **costs.mfu(
            arch,
            seq_len=trainer.seq_len,
            tokens_per_second=step and plan.sequences_of_rank * trainer.accumulation_steps * trainer.seq_len / step,
            device_name=device,
            precision=plan.precision,
        ),
        hardware_utilisation=flops.total / (step * peak) if flops and step and peak else None,
        peak_flops_per_second=peak,
        steps=times,
    )


def with_scan(seconds: dict[str, float]) -> dict[str, float]:
    """The times of one step, and what is left of each pass of the mixers without their projections."""
    left = {
        f"{SCAN}/{pass_}": seconds[f"mixer/{pass_}"] - seconds.get(f"{PROJECTIONS}/{pass_}", 0.0)
        for pass_ in PASSES
        if f"mixer/{pass_}" in seconds
    }
    return seconds | left


def _total(size: int | None) -> dict[str, int] | None:
    return None if size is None else {"total": size}


def median(times: Iterable[dict[str, float]], name: str) -> float | None:
    """The median over the steps that have `name`; None if no step has it."""
    values = [entry[name] for entry in times if name in entry]
    return statistics.median(values) if values else None


def _memory(
    plan: Plan, arch: Architecture, measured: dict[str, int | None], saved: dict[str, int], compute: int
) -> dict[str, dict[str, int | None]]:
    estimate, trainer = plan.memory_estimate(arch), plan.config.trainer
    formula = dict[str, int | None](plan.training_state(arch) if estimate is None else estimate.components())
    per_layer = costs.recurrent_state_bytes(arch, trainer.batch_size, trainer.seq_len, compute)
    rows: dict[str, tuple[int | None, int | None]] = {
        name: (measured.get(name), formula.get(name))
        for name in ("parameters", "gradients", "optimizer", "activations")
    }
    residual = saved.get("norms", 0) + saved.get("other", 0)
    rows |= {
        "activations/workspaces": (None, formula.get("activations/workspaces")),
        "activations/weight_copies": (saved.get("weight_copies", 0), formula.get("activations/weight_copies")),
        "activations/embedding": (saved.get("embedding", 0), None),
        "activations/mixer": (saved.get("mixer", 0), formula.get("activations/mixer")),
        "activations/mlp": (saved.get("mlp", 0), formula.get("activations/mlp")),
        "activations/norms_and_residual": (residual, formula.get("activations/residual")),
        "activations/loss_inputs": (None, formula.get("activations/loss_inputs")),
        "recurrent_states/one_layer": (None, per_layer),
        "loss_saved": (saved.get("loss", 0), None),
        "loss_forward": (measured.get("loss_forward"), formula.get("loss_forward")),
        "loss_backward": (measured.get("loss_backward"), formula.get("loss_backward")),
        "peak": (measured.get("peak"), formula.get("peak")),
        "peak/without_loss_layer": (measured.get("without_loss_layer"), None),
    }
    if "resident_peak" in measured:
        rows["resident_peak"] = (measured["resident_peak"], None)
    return {name: {"measured": found, "formula": expected} for name, (found, expected) in rows.items()}


# ------------------------------------------------------------------------------------------------------- for people
def markdown(b: Breakdown) -> str:
    """The breakdown as Markdown tables."""
    lines = [*_heading(b), *_memory_lines(b), *_time_lines(b), *_flops_and_traffic_lines(b)]
    return "\n".join(lines) + "\n"


def _heading(b: Breakdown) -> list[str]:
    run = b.run
    return [
        f"# {run['run_name']}: where memory and time go",
        "",
        f"{run['device']}, {run['precision']}, B = {run['batch_size']}, T = {run['seq_len']}, "
        f"V = {run['vocab_size']:,}, activation checkpointing {run['activation_checkpointing']}, "
        f"optimizer {run['optimizer']}",
        "",
    ]


def _memory_lines(b: Breakdown) -> list[str]:
    rows = []
    peak = b.memory["peak"]["measured"]
    for name, row in b.memory.items():
        share = row["measured"] / peak if peak and row["measured"] is not None else None
        rows.append((name, show(row["measured"], ".3f", GIB), show(row["formula"], ".3f", GIB), show(share, ".1%")))
    columns = ("memory", "measured, GiB", "formula, GiB", "share of the measured peak")
    return [
        *Table(columns, rows, words=("memory",)).markdown(),
        "",
        "Activations in parts: what the autograd graph keeps, by the part that keeps it. loss_forward, loss_backward: "
        "the most that the output layer's passes add, gradients of hidden states and head included. "
        "peak/without_loss_layer: of a step whose loss is the sum of hidden states and head. The formulas are a GPU's.",
        "",
    ]


def _time_lines(b: Breakdown) -> list[str]:
    rows = []
    step = b.time["step"]["total"]
    timed = seconds_of_steps({"time": b.time, "steps": b.steps})
    shares = {part: share_of_step(timed, part) for part in (*b.time, REST) if part in timed[0] and part != "step"}
    for part in TIMED:
        rows.append(_time_cells(b, part, part, shares))
        inner = [name for name in (PROJECTIONS, SCAN) if part == "mixer" and name in b.time]
        rows += [_time_cells(b, name, f"of it {name.removeprefix('mixer/')}", shares) for name in inner]
    totals = {"optimizer": b.time["optimizer"]["total"], REST: median(timed, REST), "step": step}
    if "host" in b.time:
        totals["host"] = b.time["host"]["total"]
    for name, spent in totals.items():
        share = spent / step if step and spent is not None else None
        rows.append((name, "", "", "", f"{show(spent, '.2f', 1e-3)} ms, {_share(shares, name, share)}", "", ""))
    columns = (
        *("time", "forward, ms", "backward, ms", "recomputed, ms", "share of the step", "TFLOP/s"),
        "share of the peak rate",
    )
    return [
        *Table(columns, rows, words=("time",)).markdown(),
        "",
        f"MFU {show(b.mfu, '.1%')} (the products that the model's definition needs), {show(b.mfu_6n, '.1%')} by 6N, "
        f"{show(b.hardware_utilisation, '.1%')} with all that the kernels compute. "
        "A part's time is the device's between entering and leaving it, gaps included; what the CPU "
        "does between steps is in none of these times."
        + (
            f" Shares with an interval: the median over {len(b.steps)} steps of one process, and Student's 90 % "
            "interval of the mean, which one slow step widens."
            if len(b.steps) > 1
            else ""
        ),
        *_remarks_on_time(b),
        "",
    ]


def _remarks_on_time(b: Breakdown) -> list[str]:
    """What the parts of a mixer are, and what the host's time is. Older breakdowns have neither."""
    if "host" not in b.time:
        return []
    return [
        "",
        "projections: the mixers' linear layers. scan: everything else in the mixers, which is the recurrence or the "
        "attention, convolutions, gates and norms. host: until the CPU had given the device all work of the step. "
        "Where that is close to the whole step, the parts hold gaps in which the device waits.",
    ]


def _share(shares: dict[str, Estimate], part: str, otherwise: float | None) -> str:
    """A part's share of the step with its 90 % interval over the timed steps, or another figure without one."""
    share = shares.get(part)
    if share is None or share.low is None:
        return show(otherwise, ".1%")
    return f"{share.value:.1%} ({share.low:.1%} to {share.high:.1%})"


def _time_cells(b: Breakdown, part: str, title: str, shares: dict[str, Estimate]) -> tuple[str, ...]:
    """A part's line: its title, its passes in ms, its share of the step, its rate."""
    step, row = b.time["step"]["total"], b.time[part]
    total = sum(value or 0 for value in row.values())
    rate = _rate(b, part, total)
    cells = [show(row[pass_], ".2f", 1e-3) for pass_ in PASSES]
    cells += [
        _share(shares, part, total / step if step else None),
        "-" if rate is None else _digits(rate / 1e12),
    ]
    cells.append(show(rate / b.peak_flops_per_second if rate and b.peak_flops_per_second else None, ".1%"))
    return (title, *cells)


def _flops_and_traffic_lines(b: Breakdown) -> list[str]:
    of_parts = b.flops or {}
    total_flops = sum(sum(row.values()) for row in of_parts.values())
    rows = [
        (component, *(f"{flops[pass_]:.3e}" for pass_ in PASSES), f"{sum(flops.values()) / total_flops:.1%}")
        for component, flops in of_parts.items()
        if component != "optimizer"
    ]
    if update := of_parts.get("optimizer", {}).get("update"):
        rows.append((f"optimizer: {update:.3e}", "", "", "", f"{update / total_flops:.1%}"))
    if b.flops is None:
        rows.append(("unknown: no formulas for this model or loss", "", "", "", ""))
    columns = ("FLOPs of a step that the kernels compute", "forward", "backward", "computed again", "share")
    loss = b.traffic["loss"]
    unknown = "depends on the data" if b.run["loss"] in FORMULAS_OF_LOSSES else "unknown: no formulas"
    cells = [_digits(loss[pass_] / 1e9) if loss else unknown for pass_ in PASSES[:2]]
    moved = b.traffic["optimizer"]
    traffic = [("loss", *cells), ("optimizer", "", _digits(moved["total"] / 1e9) if moved else "unknown: no formulas")]
    by_formula = "HBM traffic by formula"
    return [
        *Table(columns, rows, words=columns[:1]).markdown(),
        "",
        *Table((by_formula, "forward, GB", "backward, GB"), traffic, words=(by_formula,)).markdown(),
        "",
        "Traffic is not measured: the counters for it need Nsight Compute and permission to read them.",
        "",
    ]


def _digits(value: float) -> str:
    """Two decimals, or three digits if a small model's figure would be 0.00."""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3g}"


def to_json(b: Breakdown) -> dict[str, Any]:
    """The whole breakdown, JSON-ready."""
    return asdict(b)


def _rate(b: Breakdown, part: str, seconds: float) -> float | None:
    """FLOP/s of a part, including what it computes again."""
    if b.flops is None or part not in FLOPS_OF or not seconds:
        return None
    return sum(sum(b.flops[component].values()) for component in FLOPS_OF[part]) / seconds
