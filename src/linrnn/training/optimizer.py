"""AdamW with decay groups, a learning rate that is a pure function of the step, and gradient clipping."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from linrnn.config.schema import OptimizerConfig
from linrnn.core.errors import ConfigError

NO_DECAY_SUFFIXES = ("bias", "A_log", "dt_bias")


def decay_groups(model: nn.Module) -> dict[str, list[str]]:
    """Names of the trainable parameters with weight decay (`decay`) and without (`no_decay`).

    Vectors and scalars (norm weights, biases, A_log, dt_bias) have no decay, nor has any parameter with FLA's mark
    `_no_weight_decay`. Embeddings and the output head decay like every other matrix, as in GPT-2 and Llama. A tied
    parameter is listed once.
    """
    groups: dict[str, list[str]] = {"decay": [], "no_decay": []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups["decay" if _decays(name, parameter) else "no_decay"].append(name)
    return groups


def _decays(name: str, parameter: nn.Parameter) -> bool:
    marked = getattr(parameter, "_no_weight_decay", False)
    return parameter.ndim >= 2 and not marked and not name.endswith(NO_DECAY_SUFFIXES)


def build_optimizer(model: nn.Module, config: OptimizerConfig, device: torch.device) -> torch.optim.AdamW:
    """AdamW, fused on CPU and CUDA, over the trainable parameters of `model` (fp32 or bf16, on `device`).

    The moments have the parameters' dtype. A group's `name` is that of :func:`decay_groups`.

    Raises:
        ConfigError: a momentum of 1, a clipping norm of 0, or nothing to train.
    """
    for key in ("beta1", "beta2"):
        if getattr(config, key) >= 1:
            raise ConfigError(f"optimizer.{key}=1 never forgets", f"use optimizer.{key} below 1")
    if config.max_grad_norm == 0:
        remedy = "use optimizer.max_grad_norm=null to not clip"
        raise ConfigError("optimizer.max_grad_norm=0 erases every gradient", remedy)
    parameters = dict(model.named_parameters())
    weight_decays = {"decay": config.weight_decay, "no_decay": 0.0}
    groups = [
        {"params": [parameters[name] for name in names], "weight_decay": weight_decays[group], "name": group}
        for group, names in decay_groups(model).items()
        if names
    ]
    if not groups:
        raise ConfigError("no parameter of the model requires a gradient", "unfreeze some of its parameters")
    return torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=device.type in ("cpu", "cuda"),
    )


class Schedule:
    """The learning rate of every step of a run. It has no state, so a resumed run simply continues.

    Warm-up step s (0-based) of W gets (s + 1) / W of the peak. After the warm-up, let m = min_lr_ratio. Let x be the
    share of the remaining steps (cosine) or of the decay steps (WSD: Hu et al. 2024, arXiv:2404.06395, linear here)
    already done:

        cosine  m + (1 - m) (1 + cos πx) / 2;    WSD  1 - (1 - m) x;    constant  1

    Args:
        optimizer: :meth:`apply` sets the rate of its groups.
        config: peak, shape, warm-up and decay.
        horizon: the step at which the schedule ends. A run may stop before it. Beyond it, only `constant` has a rate.

    Raises:
        ConfigError: the warm-up (and the WSD decay) do not fit into the schedule.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, config: OptimizerConfig, horizon: int) -> None:
        self.optimizer = optimizer
        self.config = config
        self.horizon = horizon
        self.warmup_steps = horizon // 10 if config.warmup_steps is None else config.warmup_steps
        self.decay_steps = round(config.decay_fraction * horizon) if config.schedule == "wsd" else 0
        if self.warmup_steps > horizon:
            raise ConfigError(
                f"optimizer.warmup_steps={self.warmup_steps} exceeds the schedule's {horizon} steps",
                "lower optimizer.warmup_steps (null: a tenth of the schedule) or raise trainer.max_steps",
            )
        if self.warmup_steps + self.decay_steps > horizon:
            raise ConfigError(
                f"{self.warmup_steps} warm-up + {self.decay_steps} decay steps exceed {horizon} steps",
                "lower optimizer.warmup_steps or optimizer.decay_fraction, or raise trainer.max_steps",
            )

    def describe(self) -> dict[str, Any]:
        """Everything that decides the learning rate of every step, JSON-ready, for a checkpoint."""
        config = self.config
        return {
            "schedule": config.schedule,
            "horizon": self.horizon,
            "lr": config.lr,
            "warmup_steps": self.warmup_steps,
            "decay_steps": self.decay_steps,
            "min_lr_ratio": config.min_lr_ratio,
        }

    def lr_multiplier(self, step: int) -> float:
        """Learning rate of step `step` (0-based) / peak learning rate."""
        config = self.config
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if config.schedule == "cosine":
            progress = _share(step - self.warmup_steps, self.horizon - self.warmup_steps)
            return config.min_lr_ratio + (1 - config.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
        if config.schedule == "wsd":
            progress = _share(step - (self.horizon - self.decay_steps), self.decay_steps)
            return 1 - (1 - config.min_lr_ratio) * progress
        return 1.0

    def apply(self, step: int) -> float:
        """Set the learning rate of step `step` (0-based) in every group, and return it."""
        lr = self.config.lr * self.lr_multiplier(step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr


def build_schedule(optimizer: torch.optim.Optimizer, config: OptimizerConfig, horizon: int) -> Schedule:
    """The schedule that `config` names, ending at step `horizon`."""
    return Schedule(optimizer, config, horizon)


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None) -> torch.Tensor:
    """Scale all gradients so that their global L2 norm is at most `max_norm` (None: leave them).

    Gradients may be sharded (DTensors of one mesh). Returns the norm before clipping, a scalar on the gradients'
    device. The host does not wait for it.
    """
    if max_norm is None:
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    else:
        norm = nn.utils.clip_grad_norm_(parameters, max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _share(done: int, of: int) -> float:
    return min(1.0, max(0.0, done / of)) if of > 0 else 0.0
