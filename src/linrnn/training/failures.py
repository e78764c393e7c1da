"""How a run ends that does not finish: the status that an error means, and the error that says what to do about it.

| what came | status | who says so |
|---|---|---|
| a signal (Ctrl-C, SIGTERM, …) | interrupted | `Trainer._heed`, with a checkpoint: :func:`interrupted` |
| a second signal | interrupted | KeyboardInterrupt, at once |
| a loss or a gradient that is not finite | diverged | `RunLog.write`, `Evaluation.check_finite` |
| memory ran out | out_of_memory | :func:`out_of_memory_error`, before the run :func:`while_built` |
| a model or its kernels cannot run here | unsupported | `linrnn.models.explain_refusal` |
| another rank failed | that rank's | `Ranks.explain`, `linrnn.distributed.watch` |
| all else, such as a full disk | failed | the error itself |
"""

import contextlib
from collections.abc import Iterator

from linrnn.config.schema import Config
from linrnn.core.errors import (
    DivergedError,
    InterruptedRun,
    LinrnnError,
    OutOfMemoryError,
    RankFailedError,
    SharedGpuFullError,
    accessed_illegally,
    first_line,
    out_of_memory,
    ran_out_of_memory,
)
from linrnn.distributed import Ranks
from linrnn.models import explain_refusal
from linrnn.models.architecture import Architecture
from linrnn.runs.summary import memory_lines, status_of
from linrnn.training.plan import Plan, lighter
from linrnn.training.run_log import RunLog


def concerns_all_ranks(failure: BaseException | None) -> bool:
    """Whether every rank ends at this very step for the same reason."""
    return failure is None or isinstance(failure, InterruptedRun | DivergedError)


def interrupted(step: int, plan: Plan, signal_number: int, *, in_validation: bool) -> InterruptedRun:
    """The error of a run that a signal has stopped, after its checkpoint is written."""
    where = "in the validation after" if in_validation else "at"
    return InterruptedRun(
        f"interrupted {where} step {step} of {plan.total_steps}; checkpoint written",
        "run the same command again to continue",
        signal_number,
    )


@contextlib.contextmanager
def while_built(config: Config) -> Iterator[None]:
    """Name what to lower if memory runs out inside the block, in which the model is built.

    Raises:
        OutOfMemoryError: memory ran out; SharedGpuFullError where other runs share the GPU.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not ran_out_of_memory(error):
            raise
        budget = "" if config.memory_budget_gib is None else ", or a larger memory_budget_gib"
        raise out_of_memory(
            f"out of memory while the model was built: {first_line(error)}",
            f"use a smaller size or size.vocab_size{budget}",
        ) from error


def explained(
    error: BaseException, where: str, ranks: Ranks, plan: Plan, architecture: Architecture, log: RunLog
) -> tuple[str, BaseException]:
    """The status of a run that ends with `error`, and the error that explains it best.

    Args:
        where: "at step 3".
        log: prints the components of the memory where it ran out.
    """
    if isinstance(error, InterruptedRun | KeyboardInterrupt):
        return "interrupted", error
    if isinstance(error, DivergedError):
        return "diverged", error
    failure = ranks.explain(error)
    if not isinstance(failure, RankFailedError):
        if ran_out_of_memory(error):
            failure = out_of_memory_error(error, where, plan, architecture, log)
        elif unsupported := explain_refusal(error, plan.config.model):
            return "unsupported", unsupported
        elif failure is error and accessed_illegally(error):
            failure = illegal_access(error, where)
        else:
            return "failed", failure
    assert isinstance(failure, LinrnnError)
    return status_of(failure.exit_code), failure


def illegal_access(error: BaseException, where: str) -> LinrnnError:
    """The error that says how to find the kernel. CUDA reports the access at a later call."""
    explanation = LinrnnError(
        f"a GPU kernel accessed memory that is not its own, {where} or just before ({first_line(error)})",
        "CUDA_LAUNCH_BLOCKING=1 HYDRA_FULL_ERROR=1 shows the call; scripts/check_recurrence.py compares FLA's kernels "
        "with plain torch; try another version of Triton or larger heads",
    )
    explanation.__cause__ = error
    return explanation


def out_of_memory_error(
    error: BaseException, where: str, plan: Plan, architecture: Architecture, log: RunLog
) -> OutOfMemoryError | SharedGpuFullError:
    """Print the measured components and the formulas' estimate. Return the error that names what to lower."""
    estimate = plan.memory_estimate(architecture)
    foreseen = plan.training_state(architecture) if estimate is None else estimate.components()
    for line in (
        "memory by component when it ran out:",
        *memory_lines(log.memory.report()),
        "memory that a whole step was estimated to need:",
        *memory_lines(foreseen),
        *([] if estimate else ["  all else: unknown"]),
    ):
        log.line(line)
    return out_of_memory(f"out of memory {where}: {first_line(error)}", f"try {lighter(plan.config)}")
