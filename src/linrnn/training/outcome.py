"""How a run ended: the status that an error means, why memory ran out, and the summary."""

from collections.abc import Callable
from statistics import fmean
from typing import Any

from linrnn.config.schema import Config
from linrnn.core.dates import utc_now
from linrnn.core.errors import (
    DivergedError,
    InterruptedRun,
    OutOfMemoryError,
    RankFailedError,
    ran_out_of_memory,
)
from linrnn.data import PreparedData
from linrnn.distributed import Ranks
from linrnn.models import explain_resources
from linrnn.models.architecture import Architecture
from linrnn.runs.environment import command_line
from linrnn.runs.figures import memory_of_run, speed_of_run
from linrnn.runs.summary import memory_lines, names_of_run, status_of
from linrnn.training.evaluation import Evaluation
from linrnn.training.measurements import Measurements, device_name
from linrnn.training.plan import Plan
from linrnn.training.session import Session
from linrnn.training.step import RunState


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def concerns_all_ranks(failure: BaseException | None) -> bool:
    """Whether every rank ends at this very step for the same reason."""
    return failure is None or isinstance(failure, InterruptedRun | DivergedError)


def explained(
    error: BaseException, config: Config, ranks: Ranks, out_of_memory: Callable[[BaseException], OutOfMemoryError]
) -> tuple[str, BaseException]:
    """The status of a run that ends with `error`, and the error that explains it best.

    Args:
        out_of_memory: returns the explanation if memory ran out.
    """
    if isinstance(error, InterruptedRun | KeyboardInterrupt):
        return "interrupted", error
    if isinstance(error, DivergedError):
        return "diverged", error
    failure = ranks.explain(error)
    if isinstance(failure, RankFailedError):
        return status_of(failure.exit_code), failure
    if ran_out_of_memory(error):
        return "out_of_memory", out_of_memory(error)
    if unsupported := explain_resources(error, config.model):
        return "unsupported", unsupported
    return "failed", failure


def explain_out_of_memory(
    error: BaseException,
    where: str,
    plan: Plan,
    architecture: Architecture,
    measured: dict[str, int],
    say: Callable[[str], None],
) -> OutOfMemoryError:
    """Print the measured components and the formulas' estimate. Return the error that names what to lower.

    Args:
        where: "at step 3".
        measured: bytes by component.
    """
    say("memory by component when it ran out:")
    for line in memory_lines(measured):
        say(line)
    say("memory that a whole step was foreseen to need:")
    estimate = plan.memory_estimate(architecture)
    foreseen = plan.training_state(architecture) if estimate is None else estimate.components()
    for line in memory_lines(foreseen) if estimate else [*memory_lines(foreseen), "  all else: unknown"]:
        say(line)
    config, trainer = plan.config, plan.config.trainer
    options = [
        f"trainer.batch_size={max(trainer.batch_size // 2, 1)} with "
        f"trainer.accumulation_steps={2 * trainer.accumulation_steps}"
        if trainer.batch_size > 1
        else "a shorter trainer.seq_len",
        "trainer.activation_checkpointing=full" if trainer.activation_checkpointing == "none" else None,
        "loss=cce_kahan" if not config.loss.name.startswith("cce") else None,
        "parallel=fsdp" if config.parallel.name == "ddp" else None,
    ]
    return OutOfMemoryError(
        f"out of memory {where}: {first_line(error)}",
        "try " + ", or ".join(option for option in options if option),
    )


def summary_of_run(
    status: str,
    failure: BaseException | None,
    evaluation: Evaluation | None,
    *,
    plan: Plan,
    session: Session,
    state: RunState,
    architecture: Architecture,
    data: PreparedData,
    measurements: Measurements,
    epochs: float,
) -> dict[str, Any]:
    """The content of summary.json, from the records of all processes of the run and this process's measurements."""
    records = session.records()
    here = measurements.memory_of_ranks() if concerns_all_ranks(failure) else measurements.memory.report()
    memory = memory_of_run(records)
    if measurements.began(state) or not memory:
        memory = {name: max(size, memory.get(name, 0)) for name, size in (memory | here).items()}
    speed = speed_of_run(records, plan.tokens_per_step)
    return {
        "status": status,
        "reason": failure and first_line(failure),
        **names_of_run(plan.config, session.name, plan.world_size),
        "n_parameters": architecture.n_parameters,
        "hidden_size": architecture.hidden_size,
        "world_size": plan.world_size,
        "vocab_size": architecture.vocab_size,
        "precision": plan.precision,
        "steps": state.step,
        "tokens": state.step * plan.tokens_per_step,
        "continues": state.continues,
        "epochs": epochs,
        "train_loss_nats": fmean(state.recent_losses) if state.recent_losses else None,
        "entropy_floor_nats": data.entropy_floor_nats,
        "valid_loss_nats": evaluation and evaluation.loss_nats,
        "valid_perplexity": evaluation and evaluation.perplexity,
        "valid_bits_per_byte": evaluation and evaluation.bits_per_byte,
        "peak_memory_bytes": memory.get("peak", memory.get("resident_peak")),
        "peak_memory_is": "allocated on the GPU" if "peak" in memory else "the process's resident set",
        "memory_bytes": memory,
        **speed,
        **measurements.mfu(speed["wall_step_ms"] and speed["wall_step_ms"] / 1e3),
        "wall_seconds": session.wall_seconds(),
        "started": session.started,
        "ended": utc_now(),
        "device": device_name(plan.device),
        "gpu_state": measurements.gpu_state,
        "data_fingerprint": data.fingerprint,
        "command": command_line(),
    }
