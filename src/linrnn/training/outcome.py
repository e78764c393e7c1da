"""How a run ended: the status that an error means, why memory ran out, and the summary."""

from statistics import fmean
from typing import Any

from linrnn.core.dates import utc_now
from linrnn.core.errors import (
    DivergedError,
    InterruptedRun,
    LinrnnError,
    OutOfMemoryError,
    RankFailedError,
    SharedGpuFullError,
    StorageError,
    accessed_illegally,
    first_line,
    out_of_memory,
    ran_out_of_memory,
)
from linrnn.models import explain_refusal
from linrnn.runs.environment import command_line
from linrnn.runs.figures import NOT_MEASURED, memory_of_run, speed_of_run
from linrnn.runs.metrics import finite
from linrnn.runs.summary import memory_lines, names_of_run, status_of
from linrnn.training.build import BuiltRun
from linrnn.training.evaluation import Evaluation
from linrnn.training.plan import lighter
from linrnn.training.runtime import device_name


def concerns_all_ranks(failure: BaseException | None) -> bool:
    """Whether every rank ends at this very step for the same reason."""
    return failure is None or isinstance(failure, InterruptedRun | DivergedError)


def explained(run: BuiltRun, error: BaseException, where: str) -> tuple[str, BaseException]:
    """The status of a run that ends with `error`, and the error that explains it best.

    Args:
        where: "at step 3".
    """
    if isinstance(error, InterruptedRun | KeyboardInterrupt):
        return "interrupted", error
    if isinstance(error, DivergedError):
        return "diverged", error
    failure = run.ranks.explain(error)
    if isinstance(failure, RankFailedError):
        return status_of(failure.exit_code), failure
    if ran_out_of_memory(error):
        explanation = explain_out_of_memory(run, error, where)
        return status_of(explanation.exit_code), explanation
    if unsupported := explain_refusal(error, run.config.model):
        return "unsupported", unsupported
    if failure is error and accessed_illegally(error):
        return "failed", explain_illegal_access(error, where)
    return "failed", failure


def explain_illegal_access(error: BaseException, where: str) -> LinrnnError:
    """The error that says how to find the kernel. CUDA reports the access at a later call."""
    explanation = LinrnnError(
        f"a GPU kernel accessed memory that is not its own, {where} or just before ({first_line(error)})",
        "CUDA_LAUNCH_BLOCKING=1 HYDRA_FULL_ERROR=1 shows the call; scripts/check_recurrence.py compares FLA's kernels "
        "with plain torch; try another version of Triton or larger heads",
    )
    explanation.__cause__ = error
    return explanation


def explain_out_of_memory(run: BuiltRun, error: BaseException, where: str) -> OutOfMemoryError | SharedGpuFullError:
    """Print the measured components and the formulas' estimate. Return the error that names what to lower."""
    measured, say = run.measurements.memory.report(), run.session.console.line
    say("memory by component when it ran out:")
    for line in memory_lines(measured):
        say(line)
    say("memory that a whole step was estimated to need:")
    estimate = run.plan.memory_estimate(run.architecture)
    foreseen = run.plan.training_state(run.architecture) if estimate is None else estimate.components()
    for line in memory_lines(foreseen) if estimate else [*memory_lines(foreseen), "  all else: unknown"]:
        say(line)
    return out_of_memory(f"out of memory {where}: {first_line(error)}", f"try {lighter(run.config)}")


def conclude(
    run: BuiltRun, status: str, failure: BaseException | None, evaluation: Evaluation | None
) -> tuple[dict[str, Any], BaseException | None]:
    """Wait for the last checkpoint and write the summary. Returns the summary and the failure, if any."""
    if concerns_all_ranks(failure) or (run.ranks.world_size == 1 and not isinstance(failure, KeyboardInterrupt)):
        try:
            run.saver.wait()  # the last good checkpoint may still be being written
        except StorageError as error:
            run.session.console.line(f"error: {error.cause}")
    summary = summary_of_run(run, status, failure, evaluation)
    if concerns_all_ranks(failure):
        run.ranks.end_together()
    try:
        run.session.write_summary(run.step, summary)
    except StorageError as error:
        failure = failure or error
    return summary, failure


def summary_of_run(
    run: BuiltRun, status: str, failure: BaseException | None, evaluation: Evaluation | None
) -> dict[str, Any]:
    """The content of summary.json, from the records of all processes of the run and this process's measurements."""
    plan, session, state, measurements = run.plan, run.session, run.state, run.measurements
    records = session.records()
    here = measurements.memory_of_ranks() if concerns_all_ranks(failure) else measurements.memory.report()
    memory = memory_of_run(records)
    if measurements.began(state) or not memory:
        memory = {name: max(size, memory.get(name, 0)) for name, size in (memory | here).items()}
    shared = measurements.gpu_shared
    speed = speed_of_run([] if shared else records, plan.tokens_per_step)
    if shared:
        speed["tokens_per_second_is"] = NOT_MEASURED
    return {
        "status": status,
        "reason": failure and first_line(failure),
        **names_of_run(plan.config, session.name, plan.world_size),
        "n_parameters": run.architecture.n_parameters,
        "hidden_size": run.architecture.hidden_size,
        "world_size": plan.world_size,
        "vocab_size": run.architecture.vocab_size,
        "precision": plan.precision,
        "steps": state.step,
        "tokens": state.step * plan.tokens_per_step,
        "continues": state.continues,
        "epochs": run.epochs(state.step),
        "train_loss_nats": fmean(state.recent_losses) if state.recent_losses else None,
        "entropy_floor_nats": run.data.entropy_floor_nats,
        **_validated(evaluation),
        "peak_memory_bytes": memory.get("peak", memory.get("resident_peak")),
        "peak_memory_is": "allocated on the GPU" if "peak" in memory else "the process's resident set",
        "memory_bytes": memory,
        "gpu_shared": shared,
        **speed,
        **measurements.mfu(speed["wall_step_ms"] and speed["wall_step_ms"] / 1e3),
        "wall_seconds": session.wall_seconds(),
        "started": session.started,
        "ended": utc_now(),
        "device": device_name(plan.device),
        "gpu_state": measurements.gpu_state,
        "compiled": run.compiled,
        "data_fingerprint": run.data.fingerprint,
        "command": command_line(),
    }


def _validated(evaluation: Evaluation | None) -> dict[str, float | None]:
    """The summary's figures of the last validation. They are null where they are not finite, or not there."""
    metrics = evaluation.metrics() if evaluation else {}
    return {
        f"valid_{name}": finite(metrics.get(f"valid/{name}")) for name in ("loss_nats", "perplexity", "bits_per_byte")
    }
