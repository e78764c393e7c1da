"""From where a run goes on, whether it may, and whether its checkpoints will fit on the disk."""

import math
from pathlib import Path
from typing import Any

from linrnn.core.errors import ConfigError
from linrnn.runs.directory import RunDirectory, differences
from linrnn.training import checkpoint
from linrnn.training.plan import Plan


def newest_checkpoint(directory: RunDirectory) -> Path | None:
    """The newest sound checkpoint of the run; None where there is none or the run begins anew."""
    return None if directory.begins_anew else checkpoint.newest(directory.checkpoints)


def progress_to_resume(
    newest: Path, plan: Plan, directory: RunDirectory, schedule: dict[str, Any]
) -> checkpoint.Progress:
    """Where the run stood at its newest checkpoint.

    Args:
        schedule: this run's, as `Schedule.describe` says it.

    Raises:
        ConfigError: the run has gone further than this command asks for, or was trained under another schedule.
    """
    progress = checkpoint.read_progress(newest)
    check_not_beyond(progress.step, plan, directory)
    if changed := differences(progress.schedule, schedule):
        raise ConfigError(
            f"{newest} was trained under another schedule ({'; '.join(changed)})",
            "continue_from= trains on under a new schedule, in a run of its own",
        )
    return progress


def check_not_beyond(step: int, plan: Plan, directory: RunDirectory) -> None:
    """Raises ConfigError: the run has gone further than this command asks for."""
    if step > plan.total_steps:
        raise ConfigError(
            f"{directory.path} holds a run of {step} steps, and this command stops at {plan.total_steps}",
            "raise trainer.max_steps (or max_tokens), or choose another run_name or group",
        )


def checkpoints_planned(plan: Plan, directory: RunDirectory, model: Any, step: int) -> str | None:
    """When checkpoints will be written, and whether the disk can hold them; None for a run without checkpoints.

    Args:
        model: whose state a checkpoint holds.
        step: from which the run goes on.

    Raises:
        StorageError: the disk cannot hold them.
    """
    trainer = plan.config.trainer
    if trainer.checkpoint_every == 0:
        return None
    every, left = trainer.checkpoint_every or plan.total_steps, plan.total_steps - step
    facts = checkpoint.check_room(
        directory.path,
        checkpoint.foreseen_bytes(model),
        there=0 if directory.begins_anew else len(checkpoint.found(directory.checkpoints)),
        keep=trainer.keep_checkpoints,
        writes=math.ceil(left / every),
        by_clock=trainer.checkpoint_minutes is not None,
    )
    times = [f"every {trainer.checkpoint_every} steps"] if trainer.checkpoint_every else []
    times += [f"every {trainer.checkpoint_minutes:g} minutes"] if trainer.checkpoint_minutes is not None else []
    return f"checkpoints {', '.join([*times, 'and at the end'])}: {facts}"
