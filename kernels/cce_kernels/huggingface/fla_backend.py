"""This package as a backend of flash-linear-attention's own fused linear cross-entropy (FLA 0.6.0).

FLA chooses a backend at every call of a registered function (fla/backends.py). It finds no backend by itself: somebody
must register one.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..module import FusedLinearCrossEntropyLoss
from .checks import imported


def register_in_fla() -> None:
    """Let FLA's FusedLinearCrossEntropyLoss compute with this package, in every model of this process.

    The environment variable FLA_CCE=0 switches the backend off, at any time. Calls with L2Warp stay FLA's own.

    Raises:
        ModuleNotFoundError: flash-linear-attention is missing, or too old to have backends.
        ValueError: the environment variable FLA_DISABLE_BACKEND_DISPATCH=1 keeps FLA from using any backend.
    """
    backends = imported("fla.backends", "flash-linear-attention")
    if backends._DISPATCH_DISABLED:
        raise ValueError("FLA_DISABLE_BACKEND_DISPATCH: is 1, so FLA uses no backend; unset it")
    of_fla = importlib.import_module("fla.modules.fused_linear_cross_entropy.ops")
    kind = type("CceBackend", (backends.BaseBackend,), {
        "backend_type": "cce", "package_name": "cce_kernels", "env_var": "FLA_CCE", "priority": 1,
    })  # fmt: skip
    backends.register(of_fla.fused_linear_cross_entropy_fwd, backend=kind, verifier=_accepts)(_loss_and_gradients)


def _accepts(*_: Any, use_l2warp: bool = False, **__: Any) -> tuple[bool, str | None]:
    """Whether this package computes a call of FLA's function; if not, why."""
    return (False, "cce_kernels has no L2Warp penalty") if use_l2warp else (True, None)


def _loss_and_gradients(
    x: Tensor, target: Tensor, weight: Tensor, bias: Tensor | None = None, *, num_chunks: int = 8,
    l2_penalty_factor: float = 1e-4, **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """In place of `fused_linear_cross_entropy_fwd`: the loss (fp32), and the gradients of x (N, D), weight (V, D)
    and bias (V,), which FLA scales and hands on later. num_chunks and l2_penalty_factor are not used here.
    """
    leaves = [y.detach().requires_grad_() for y in (x, weight, bias) if y is not None]
    with torch.enable_grad():
        loss = _module(**options)(leaves[0], target, *leaves[1:])
    gradients = torch.autograd.grad(loss, leaves)
    return loss.detach(), gradients[0], gradients[1], gradients[2] if bias is not None else None


@cache
def _module(**options: Any) -> FusedLinearCrossEntropyLoss:
    """Cached, because a module checks its options when it is made."""
    return FusedLinearCrossEntropyLoss(**options)
