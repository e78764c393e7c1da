"""`fla`: flash-linear-attention's FusedLinearCrossEntropyLoss (Triton; gradients made in the forward pass).

Source: flash-linear-attention 0.6.0, fla.modules.fused_linear_cross_entropy. Per-token losses, their sum
and the weight's gradient are fp32; logits are rounded to the compute dtype. Gradients are made in every
call, also under no_grad, so that validation costs as much as training.
"""

import torch
from torch import Tensor

from linrnn.config.schema import FlaLossConfig, LossConfig
from linrnn.losses.base import IGNORE_INDEX, LossBackend
from linrnn.losses.requirements import require_cuda, require_package, require_triton


class Fla(LossBackend):
    """At most `num_chunks` chunks over tokens; each rounds up to a power of two rows."""

    def __init__(self, config: FlaLossConfig, device: torch.device) -> None:
        from fla.modules import FusedLinearCrossEntropyLoss

        super().__init__(config, device)
        self._loss = FusedLinearCrossEntropyLoss(
            ignore_index=IGNORE_INDEX, num_chunks=config.num_chunks, reduction="sum"
        )

    @classmethod
    def check(cls, config: LossConfig, device: torch.device, dtype: torch.dtype | None) -> None:
        require_cuda(device, "loss=fla", "choose loss=cce_kahan, which is leaner and has a CPU path")
        require_triton("loss=fla")
        require_package("fla.modules", "flash-linear-attention", "loss=fla", "flash-linear-attention==0.6.0")

    def compute(self, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self._loss(hidden_ND, labels_N, weight_VD), {}
