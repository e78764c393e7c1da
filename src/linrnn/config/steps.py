"""The length of a run, computed from its configuration alone."""

from linrnn.config.schema import Config
from linrnn.core.errors import ConfigError

CONSTANT = "constant"  # the schedule that has no end


def sequences_of_rank(config: Config, world_size: int = 1) -> int:
    """Sequences in one micro-step of one rank."""
    return config.trainer.batch_size * config.parallel.data_ranks(world_size) // world_size


def sequences_per_step(config: Config, world_size: int = 1) -> int:
    """Sequences in one optimizer step, over all ranks and micro-steps."""
    trainer = config.trainer
    return trainer.batch_size * trainer.accumulation_steps * config.parallel.data_ranks(world_size)


def tokens_per_step(config: Config, world_size: int = 1) -> int:
    """Tokens in one optimizer step, over all ranks and micro-steps. Ignored labels count."""
    return sequences_per_step(config, world_size) * config.trainer.seq_len


def last_step(config: Config, world_size: int) -> int:
    """The number of optimizer steps: the lower of `max_steps` and what `max_tokens` allows, without a partial step.

    Raises:
        ConfigError: there is no limit, or `max_tokens` is less than one step takes.
    """
    max_steps, max_tokens = config.trainer.max_steps, config.trainer.max_tokens
    if max_steps is None and max_tokens is None:
        raise ConfigError(
            "trainer.max_steps and trainer.max_tokens are both null: the run would have no end",
            "give one of them, as trainer.max_steps=200",
        )
    tokens = tokens_per_step(config, world_size)
    limits = [limit for limit in (max_steps, max_tokens and max_tokens // tokens) if limit is not None]
    if min(limits) < 1:
        raise ConfigError(
            f"trainer.max_tokens={max_tokens} is less than one step of {tokens} tokens",
            f"raise trainer.max_tokens, to trainer.max_tokens={tokens} or more, or lower trainer.batch_size, "
            "trainer.seq_len or trainer.accumulation_steps",
        )
    return min(limits)


def ending_at(step: int, config: Config) -> str:
    """The override or overrides with which a run of this configuration ends at `step`."""
    return f"trainer.max_steps={step}" + (" trainer.max_tokens=null" if config.trainer.max_tokens else "")


def horizon(config: Config, world_size: int = 1) -> int:
    """The step at which the learning-rate schedule ends: `schedule.steps`, or the run's last step.

    A constant schedule ends with the run. With it `schedule.steps` decides only the default warm-up.

    Raises:
        ConfigError: as :func:`last_step`, or the run outlasts a schedule that is not constant.
    """
    last, schedule_steps = last_step(config, world_size), config.schedule.steps
    if schedule_steps is None or config.schedule.name == CONSTANT:
        return last
    if last > schedule_steps:
        raise ConfigError(
            f"the run's {last} steps go beyond schedule.steps={schedule_steps}, "
            f"the end of its {config.schedule.name} schedule",
            f"use trainer.max_steps={schedule_steps}, schedule.steps={last} (another run), or schedule=constant "
            "(another run)",
        )
    return schedule_steps
