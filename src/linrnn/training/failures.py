"""How a run ends that does not finish: the status that an error means, and the error that says what to do about it.

| what came | status | who says so |
|---|---|---|
| a signal (Ctrl-C, SIGTERM, …) | interrupted | `Trainer._handle_requests`, with a checkpoint |
| a second signal | interrupted | KeyboardInterrupt, at once |
| a loss or a gradient that is not finite | diverged | `RunLog.write`, `Evaluation.check_finite` |
| memory ran out | out_of_memory | :func:`explained`, before the run `linrnn.config.cli` |
| a model or its kernels cannot run here | unsupported | `linrnn.models.explain_refusal` |
| another rank failed | that rank's | `Ranks.explain`, `linrnn.distributed.watch` |
| all else, such as a full disk | failed | the error itself |
"""

from linrnn.core.errors import (
    DivergedError,
    InterruptedRun,
    LinrnnError,
    RankFailedError,
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


def explained(
    error: BaseException, where: str, ranks: Ranks, plan: Plan, architecture: Architecture, log: RunLog
) -> tuple[str, BaseException]:
    """The status of a run that ends with `error`, and the error that explains it best.

    Args:
        where: "at step 3".
        log: prints the components of the memory where it ran out, measured and by formulas.
    """
    if isinstance(error, InterruptedRun | KeyboardInterrupt):
        return "interrupted", error
    if isinstance(error, DivergedError):
        return "diverged", error
    failure = ranks.explain(error)
    if isinstance(failure, RankFailedError):
        return status_of(failure.exit_code), failure
    if ran_out_of_memory(error):
        estimate = plan.memory_estimate(architecture)
        lines = ["memory by component when it ran out:", *memory_lines(log.memory.report())]
        if estimate:
            lines += ["memory that a whole step was estimated to need:", *memory_lines(estimate.components())]
        for line in lines:
            log.line(line)
        full = out_of_memory(f"out of memory {where}: {first_line(error)}", f"try {lighter(plan.config)}")
        return status_of(full.exit_code), full
    if unsupported := explain_refusal(error, plan.config.model):
        return "unsupported", unsupported
    if failure is error and accessed_illegally(error):
        failure = LinrnnError(  # CUDA reports the access at a later call
            f"a GPU kernel accessed memory that is not its own, {where} or just before ({first_line(error)})",
            "CUDA_LAUNCH_BLOCKING=1 HYDRA_FULL_ERROR=1 shows the call; docs/models.md has a check of FLA's kernels; "
            "try another version of Triton or larger heads",
        )
        failure.__cause__ = error
    return "failed", failure
