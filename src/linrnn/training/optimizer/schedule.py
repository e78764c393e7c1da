"""The learning rate of every step, a pure function of the step."""

import math
from typing import Any

import torch

from linrnn.config.schema import FallingConfig, ScheduleConfig, WsdConfig
from linrnn.core.errors import ConfigError


class Schedule:
    """The learning rate of every step of a run. It has no state, so a resumed run simply continues.

    Warm-up step s (0-based) of W gets (s + 1) / W of the peak. After the warm-up, let m = min_lr_ratio. Let x be the
    share of the remaining steps (cosine, linear) or of the decay steps (WSD: Hu et al. 2024, arXiv:2404.06395, linear
    here) already done:

        cosine  m + (1 - m) (1 + cos πx) / 2;    linear, WSD  1 - (1 - m) x;    constant  1

    Args:
        optimizer: :meth:`apply` sets the rate of its groups.
        config: shape, warm-up and decay.
        lr: the peak.
        horizon: the step at which the schedule ends. A run may stop before it. `constant` has no end of its own.

    Raises:
        ConfigError: the warm-up (and the WSD decay) do not fit into a schedule that falls.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, config: ScheduleConfig, lr: float, horizon: int) -> None:
        self.optimizer = optimizer
        self.config = config
        self.lr = lr
        self.horizon = horizon
        falls = isinstance(config, FallingConfig)
        a_tenth = (horizon if falls else config.steps or 0) // 10  # a constant schedule has no end of its own
        self.warmup_steps = a_tenth if config.warmup_steps is None else config.warmup_steps
        self.decay_steps = round(config.decay_fraction * horizon) if isinstance(config, WsdConfig) else 0
        if falls and self.warmup_steps + self.decay_steps > horizon:
            decay = f" and {self.decay_steps} decay steps" if self.decay_steps else ""
            longer = "a smaller schedule.decay_fraction" if decay else f"schedule.steps={self.warmup_steps} or more"
            raise ConfigError(
                f"schedule.warmup_steps={self.warmup_steps}{decay} exceed the schedule's {horizon} steps",
                f"lower it to schedule.warmup_steps={horizon - self.decay_steps} or less, or use {longer}",
            )

    def describe(self) -> dict[str, Any]:
        """Everything that decides the learning rate of every step, JSON-ready, for a checkpoint."""
        config = self.config
        return {
            "schedule": config.name,
            "lr": self.lr,
            "warmup_steps": self.warmup_steps,
            "decay_steps": self.decay_steps,
            **(
                {"horizon": self.horizon, "min_lr_ratio": config.min_lr_ratio}
                if isinstance(config, FallingConfig)
                else {}
            ),
        }

    def lr_multiplier(self, step: int) -> float:
        """Learning rate of step `step` (0-based) / peak learning rate."""
        config = self.config
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if not isinstance(config, FallingConfig):
            return 1.0
        steps = self.decay_steps if isinstance(config, WsdConfig) else self.horizon - self.warmup_steps
        progress = _share(step - (self.horizon - steps), steps)
        if config.name == "cosine":
            return config.min_lr_ratio + (1 - config.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
        return 1 - (1 - config.min_lr_ratio) * progress

    def apply(self, step: int) -> float:
        """Set the learning rate of step `step` (0-based) in every group, and return it."""
        lr = self.lr * self.lr_multiplier(step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr


def _share(done: int, of: int) -> float:
    return min(1.0, max(0.0, done / of)) if of > 0 else 0.0
