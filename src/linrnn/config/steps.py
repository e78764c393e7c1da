"""The length of a run, computed from its configuration alone."""

from linrnn.config.schema import Config
from linrnn.core.errors import ConfigError


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
            "give one of them",
        )
    tokens = tokens_per_step(config, world_size)
    limits = [limit for limit in (max_steps, max_tokens and max_tokens // tokens) if limit is not None]
    if min(limits) < 1:
        raise ConfigError(
            f"trainer.max_tokens={max_tokens} is less than one step of {tokens} tokens",
            "raise trainer.max_tokens, or lower trainer.batch_size, seq_len or accumulation_steps",
        )
    return min(limits)


def horizon(config: Config, world_size: int = 1) -> int:
    """The step at which the learning-rate schedule ends: `schedule.steps`, or the run's last step.

    Raises:
        ConfigError: as :func:`last_step`, or the run outlasts a schedule that is not constant.
    """
    last, schedule_steps = last_step(config, world_size), config.schedule.steps
    if schedule_steps is None:
        return last
    if last > schedule_steps and config.schedule.name != "constant":
        raise ConfigError(
            f"the run's {last} steps go beyond schedule.steps={schedule_steps}, "
            f"the end of its {config.schedule.name} schedule",
            "lower trainer.max_steps or trainer.max_tokens, raise schedule.steps, or use schedule=constant",
        )
    return schedule_steps
