"""AdamW or Muon with decay groups."""

from typing import Any

import torch
from torch import nn

from linrnn.config.schema import MuonConfig, OptimizerConfig
from linrnn.core.errors import ConfigError
from linrnn.models.decay import decays, layer_matrices
from linrnn.training.optimizer.muon import MuonAndAdamW
from linrnn.training.optimizer.shards import AdamW


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
    parameters = dict(model.named_parameters())
    names = decay_groups(model)
    matrices = _layer_matrices(model, names["decay"]) if isinstance(config, MuonConfig) else []
    names["decay"] = [name for name in names["decay"] if name not in matrices]
    weight_decays = {"matrices": config.weight_decay, "decay": config.weight_decay, "no_decay": 0.0}
    groups: list[dict[str, Any]] = [
        {"params": [parameters[name] for name in members], "weight_decay": weight_decays[group], "name": group}
        for group, members in {"matrices": matrices, **names}.items()
        if members
    ]
    if not groups:
        raise ConfigError("no parameter of the model requires a gradient", "unfreeze some of its parameters")
    if isinstance(config, MuonConfig) and matrices:
        return MuonAndAdamW(_muon(groups[:1], config), _adamw(groups[1:], config, device) if groups[1:] else None)
    return _adamw(groups, config, device)


def _layer_matrices(model: nn.Module, names: list[str]) -> list[str]:
    """Those of `names` that are matrices of a layer: neither embedding nor head, no convolution, no vector."""
    matrices = {id(parameter) for parameter in layer_matrices(model.blocks)}  # type: ignore[arg-type]
    parameters = dict(model.named_parameters())
    return [name for name in names if id(parameters[name]) in matrices]


def _adamw(groups: list[dict[str, Any]], config: OptimizerConfig, device: torch.device) -> AdamW:
    return AdamW(
        groups,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=device.type in ("cpu", "cuda"),
    )


def _muon(groups: list[dict[str, Any]], config: MuonConfig) -> torch.optim.Muon:
    """Muon with Nesterov's momentum. `match_rms_adamw` gives an update the size of AdamW's, so both share one rate.

    Source: Liu et al. 2025, arXiv:2502.16982, section 2.2. An update is multiplied by 0.2 √max(rows, columns).
    """
    return torch.optim.Muon(
        groups, lr=config.lr, momentum=config.momentum, ns_steps=config.ns_steps, adjust_lr_fn="match_rms_adamw"
    )
