"""Where a run continues, whether it may, and whether its checkpoints will fit on the disk."""

import math
from pathlib import Path
from typing import Any

from linrnn.core.errors import ConfigError
from linrnn.runs.directory import RunDirectory, differences
from linrnn.training import checkpoint
from linrnn.training.plan import Plan


def newest_checkpoint(directory: RunDirectory) -> Path | None:
    """The newest undamaged checkpoint of the run; None if there is none or the run starts again."""
    return None if directory.begins_anew else checkpoint.newest(directory.checkpoints)


def progress_to_resume(
    newest: Path, plan: Plan, directory: RunDirectory, schedule: dict[str, Any]
) -> checkpoint.Progress:
    """The run's progress at its newest checkpoint.

    Args:
        schedule: this run's schedule, as `Schedule.describe` returns it.

    Raises:
        ConfigError: the run has more steps than this command asks for, or was trained under another schedule.
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
    """Check that the run at `step` does not have more steps than this command asks for.

    Raises:
        ConfigError: it has more.
    """
    if step > plan.total_steps:
        raise ConfigError(
            f"{directory.path} holds a run of {step} steps, and this command stops at {plan.total_steps}",
            "raise trainer.max_steps (or max_tokens), or choose another run_name or group",
        )


def checkpoints_planned(plan: Plan, directory: RunDirectory, model: Any, step: int) -> str | None:
    """A line that says when checkpoints are written and how much room the disk has; None without checkpoints.

    Args:
        model: the model that checkpoints will hold.
        step: the step from which the run continues.

    Raises:
        StorageError: the disk has too little room.
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
