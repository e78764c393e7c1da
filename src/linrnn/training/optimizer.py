"""The optimizer (AdamW or Muon, with decay groups), the learning rate of every step, and gradient clipping.

Parameters of a sharded model are DTensors. On a list of DTensors an operation describes every result anew: Python code,
for each parameter. So a step works on a rank's own rows, as plain tensors.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.adamw import adamw

from linrnn.config.schema import FallingConfig, MuonConfig, OptimizerConfig, ScheduleConfig, WsdConfig
from linrnn.core.errors import ConfigError
from linrnn.models.build import own_rows
from linrnn.models.decay import decays, layer_matrices

NO_DIVISION_BY_ZERO = 1e-6  # as in torch.nn.utils.clip_grad_norm_


# ---------------------------------------------------------------------------------------------------------- build
def decay_groups(model: nn.Module) -> dict[str, list[str]]:
    """Names of the trainable parameters with weight decay (`decay`) and without (`no_decay`).

    linrnn.models.decay has the rule. A tied parameter is listed once.
    """
    groups: dict[str, list[str]] = {"decay": [], "no_decay": []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups["decay" if decays(name, parameter) else "no_decay"].append(name)
    return groups


def build_optimizer(model: nn.Module, config: OptimizerConfig, device: torch.device) -> torch.optim.Optimizer:
    """The optimizer that `config` names, over the trainable parameters of `model` (fp32 or bf16, on `device`).

    AdamW is fused on CPU and CUDA. Its moments, and Muon's momentum, have the parameters' dtype. A group's `name` is
    that of :func:`decay_groups`. With Muon the group `matrices` has the matrices of `model.blocks` that decay, and
    AdamW has all other parameters.

    Raises:
        ConfigError: a momentum of 1, a clipping norm of 0, or nothing to train.
    """
    for key in ("beta1", "beta2", "momentum"):
        if getattr(config, key, 0) >= 1:
            raise ConfigError(f"optimizer.{key}=1 never forgets", f"use optimizer.{key} below 1")
    if config.max_grad_norm == 0:
        remedy = "use optimizer.max_grad_norm=null to not clip"
        raise ConfigError("optimizer.max_grad_norm=0 erases every gradient", remedy)
    parameters, names = dict(model.named_parameters()), decay_groups(model)
    if isinstance(config, MuonConfig):  # a layer's matrices: neither embedding nor head, no convolution, no vector
        layers = {id(parameter) for parameter in layer_matrices(model.blocks)}  # type: ignore[arg-type]
        matrices = [name for name in names["decay"] if id(parameters[name]) in layers]
        names = {"matrices": matrices, **names, "decay": [name for name in names["decay"] if name not in matrices]}
    groups: dict[str, dict[str, Any]] = {
        group: {
            "params": [parameters[name] for name in members],
            "weight_decay": 0.0 if group == "no_decay" else config.weight_decay,
            "name": group,
        }
        for group, members in names.items()
        if members
    }
    if not groups:
        raise ConfigError("no parameter of the model requires a gradient", "unfreeze some of its parameters")
    of_muon, parts = groups.pop("matrices", None), list[torch.optim.Optimizer]()
    if of_muon and isinstance(config, MuonConfig):
        # Nesterov's momentum. An update is multiplied by 0.2 √max(rows, columns), which gives it the size of AdamW's,
        # so that both share one rate (Liu et al. 2025, arXiv:2502.16982, section 2.2).
        momentum: dict[str, Any] = {"momentum": config.momentum, "ns_steps": config.ns_steps}
        parts.append(Muon([of_muon], lr=config.lr, adjust_lr_fn="match_rms_adamw", **momentum))
    if groups:
        fused, betas = device.type in ("cpu", "cuda"), (config.beta1, config.beta2)
        parts.append(AdamW([*groups.values()], lr=config.lr, betas=betas, eps=config.eps, fused=fused))
    return MuonAndAdamW(parts) if of_muon else parts[0]


class MuonAndAdamW(torch.optim.Optimizer):
    """Two optimizers with one state, one list of groups and one `step`: Muon's groups first, then AdamW's.

    Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) keeps a running mean of a matrix's gradients. It makes
    this mean nearly orthogonal by Newton-Schulz iterations in bf16, and takes the result as the update.

    Args:
        parts: Muon for the matrices, and AdamW for all other parameters, if there are others.
    """

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self._parts, self._lengths = parts, [len(part.param_groups) for part in parts]
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for part in self._parts:
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As for every optimizer of torch."""
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        """Give both optimizers this one's state and their own part of its groups."""
        first = 0
        for part, length in zip(self._parts, self._lengths, strict=True):
            part.state = self.state
            part.param_groups = self.param_groups[first : first + length]
            first += length


class Muon(torch.optim.Muon):
    """torch.optim.Muon that also takes matrices whose rows the ranks share (DTensors, as their means).

    Newton-Schulz multiplies a matrix by itself. So every rank gathers each update's input, in bf16 as the iterations
    take it, computes the whole update, and keeps its own rows of it: what one rank computes for the same gradients.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. Ranks that share matrices call it together."""
        if not any(isinstance(parameter, DTensor) for group in self.param_groups for parameter in group["params"]):
            super().step(closure)
            return
        for group in self.param_groups:
            # Torch's own step takes one whole matrix after another. Mean and decay need a rank's own rows alone.
            matrix = nn.Parameter(torch.zeros(0, 0))
            settings = {key: group[key] for key in ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
            of_whole = torch.optim.Muon([matrix], momentum=0.0, nesterov=False, weight_decay=0.0, **settings)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter.grad)
                gradient, mean = own_rows(parameter.grad), own_rows(state["momentum_buffer"])
                mean.lerp_(gradient, 1 - group["momentum"])
                nesterov = gradient.lerp(mean, group["momentum"]).bfloat16()
                shape = {"shape": parameter.shape, "stride": parameter.stride()}
                place = parameter.device_mesh, parameter.placements
                whole = DTensor.from_local(nesterov, *place, **shape).full_tensor().float()
                matrix.data, matrix.grad = torch.zeros_like(whole), whole
                of_whole.state.clear()
                of_whole.step()
                everywhere = [Replicate()] * parameter.device_mesh.ndim
                update = DTensor.from_local(matrix.detach(), place[0], everywhere).redistribute(*place)
                own_rows(parameter).mul_(1 - group["lr"] * group["weight_decay"]).add_(own_rows(update))


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW that updates a rank's own rows. The moments of a DTensor are DTensors, as in torch's."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                if not (state := self.state[parameter]):
                    state["step"] = torch.zeros((), device=own_rows(parameter).device if group["fused"] else "cpu")
                    state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(parameter) for _ in range(2))
            states = [self.state[parameter] for parameter in parameters]
            adamw(
                [own_rows(parameter) for parameter in parameters],
                [own_rows(parameter.grad) for parameter in parameters],
                [own_rows(state["exp_avg"]) for state in states],
                [own_rows(state["exp_avg_sq"]) for state in states],
                [],
                [state["step"] for state in states],
                fused=group["fused"],
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


# -------------------------------------------------------------------------------------------------- learning rate
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
        self.optimizer, self.config, self.lr, self.horizon = optimizer, config, lr, horizon
        falls = isinstance(config, FallingConfig)
        a_tenth = (horizon if falls else config.steps or 0) // 10
        self.warmup_steps = a_tenth if config.warmup_steps is None else config.warmup_steps
        self.decay_steps = round(config.decay_fraction * horizon) if isinstance(config, WsdConfig) else 0
        if falls and self.warmup_steps + self.decay_steps > horizon:
            decay = f" and {self.decay_steps} decay steps" if self.decay_steps else ""
            longer = "a smaller schedule.decay_fraction" if decay else f"schedule.steps={self.warmup_steps} or more"
            raise ConfigError(
                f"schedule.warmup_steps={self.warmup_steps}{decay} exceed the schedule's {horizon} steps",
                f"lower it to schedule.warmup_steps={horizon - self.decay_steps} or less, or use {longer}",
            )

    def lr_multiplier(self, step: int) -> float:
        """Learning rate of step `step` (0-based) / peak learning rate."""
        config = self.config
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if not isinstance(config, FallingConfig):
            return 1.0
        steps = self.decay_steps if isinstance(config, WsdConfig) else self.horizon - self.warmup_steps
        done = min(max((step - self.horizon + steps) / steps, 0.0), 1.0) if steps > 0 else 0.0
        if config.name == "cosine":
            return config.min_lr_ratio + (1 - config.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * done))
        return 1 - (1 - config.min_lr_ratio) * done

    def apply(self, step: int) -> float:
        """Set the learning rate of step `step` (0-based) in every group, and return it."""
        lr = self.lr * self.lr_multiplier(step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr


# ------------------------------------------------------------------------------------------------------- clipping
@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None) -> Tensor:
    """Scale all gradients so that their global L2 norm is at most `max_norm` (None: leave them).

    Gradients may be sharded (DTensors of one mesh). Returns the norm before clipping, a scalar on the gradients'
    device. The host does not wait for a GPU. A model that is not sharded gets what torch.nn.utils.clip_grad_norm_
    gives, bit for bit.

    Raises:
        TypeError: some gradients are sharded, and others are not.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    sharded = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
    if sharded and len(sharded) < len(gradients):
        raise TypeError("some gradients are sharded, and others are whole: their norms cannot be added")
    rows = [own_rows(gradient) for gradient in gradients]
    norm = nn.utils.get_total_norm(rows)
    if sharded:
        norm = norm.square()
        dist.all_reduce(norm, group=sharded[0].device_mesh.get_group("shard"))
        norm = norm.sqrt()
    if max_norm is not None:
        scale = (max_norm / (norm + NO_DIVISION_BY_ZERO)).clamp(max=1)
        for dtype in {row.dtype for row in rows}:  # one list of one dtype is one kernel
            torch._foreach_mul_([row for row in rows if row.dtype == dtype], scale)
    return norm
