"""`fla`: flash-linear-attention's FusedLinearCrossEntropyLoss (Triton; gradients are computed in the forward pass).

Source: flash-linear-attention 0.6.0, fla.modules.fused_linear_cross_entropy. Per-token losses, their sum and the
weight's gradient are fp32. Logits are rounded to the compute dtype. Every call computes gradients, also under no_grad.
Validation therefore costs as much as training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from linrnn.config.schema import LossConfig, option
from linrnn.losses.base import IGNORE_INDEX, LossBackend
from linrnn.losses.formulas import (
    FP32,
    Bytes,
    LossFormulas,
    ceil_division,
    power_of_two_from,
    traffic_in_chunks_of_tokens,
)
from linrnn.losses.registry import register_loss
from linrnn.losses.requirements import require_cuda, require_package, require_triton

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass
class FlaLossConfig(LossConfig):
    num_chunks: int = option(
        8, "maximum number of chunks of tokens; more chunks need less memory (8: the library's default)", minimum=1
    )


def _memory(loss: FlaLossConfig, n_tokens: int, d: int, vocab: int, compute: int) -> Bytes:
    """Everything happens in the forward pass: logits in fp32 and in the compute dtype; dC in fp32."""
    hidden, weight = n_tokens * d, vocab * d
    rows = power_of_two_from(ceil_division(n_tokens, min(loss.num_chunks, ceil_division(vocab, d))))
    held = hidden * compute + weight * FP32 + 2 * rows * d * compute + rows * vocab * compute
    return held + max(rows * vocab * FP32, weight * compute), (hidden + weight) * compute


def _traffic(loss: FlaLossConfig, n_tokens: int, d: int, vocab: int, compute: int) -> Bytes:
    chunks = min(ceil_division(vocab, d), n_tokens, loss.num_chunks)
    return traffic_in_chunks_of_tokens(chunks, True, n_tokens, d, vocab, compute)


@register_loss("fla", options=FlaLossConfig, formulas=LossFormulas(_memory, _traffic, freed="inputs"))
class Fla(LossBackend):
    """flash-linear-attention's fused linear cross-entropy (GPU only): gradients are computed in the forward pass.

    At most `num_chunks` chunks over tokens. The rows of a chunk are rounded up to a power of two.
    """

    capturable = True

    def __init__(self, config: FlaLossConfig, device: torch.device) -> None:
        from linrnn.models.fla_import import import_fla

        super().__init__(config, device)
        self._loss = import_fla("fla.modules").FusedLinearCrossEntropyLoss(
            ignore_index=IGNORE_INDEX, num_chunks=config.num_chunks, reduction="sum"
        )

    @classmethod
    def check(cls, config: LossConfig, device: torch.device, dtype: torch.dtype | None) -> None:
        from linrnn.models.fla_import import import_fla

        require_cuda(device, "loss=fla", "choose loss=cce_kahan, which has a CPU path")
        require_triton("loss=fla")
        require_package(
            "fla.modules", "flash-linear-attention", "loss=fla", "flash-linear-attention==0.6.0", import_fla
        )

    def compute(self, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self._loss(hidden_ND, labels_N, weight_VD), {}
