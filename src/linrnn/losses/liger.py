"""`liger`: Liger-Kernel's LigerFusedLinearCrossEntropyLoss (Triton; gradients made in the forward pass).

Source: Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training", 2024. Per-token losses and
their sum are fp32; logits are rounded to the compute dtype. The weight's gradient is added over the
chunks in its own dtype (`accumulate: native`; in bf16 its error is about three times that of one product)
or in fp32 (`accumulate: fp32`, V x D x 4 bytes more). Each call waits for the device once, to count
labels.
"""

import torch
from torch import Tensor

from linrnn.config.schema import LigerLossConfig, LossConfig
from linrnn.losses.base import IGNORE_INDEX, LossBackend
from linrnn.losses.requirements import require_cuda, require_package, require_triton

_ACCUMULATE = {"native": None, "fp32": torch.float32}


class Liger(LossBackend):
    """Chunks over tokens, sized so that a chunk's logits take about the memory of the hidden states."""

    def __init__(self, config: LigerLossConfig, device: torch.device) -> None:
        from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

        super().__init__(config, device)
        self._loss = LigerFusedLinearCrossEntropyLoss(
            ignore_index=IGNORE_INDEX, reduction="sum", accum_dtype=_ACCUMULATE[config.accumulate]
        )

    @classmethod
    def check(cls, config: LossConfig, device: torch.device, dtype: torch.dtype | None) -> None:
        require_cuda(device, "loss=liger", "choose loss=cce_kahan, which is as lean and has a CPU path")
        require_triton("loss=liger")
        require_package("liger_kernel.transformers", "liger-kernel", "loss=liger", "liger-kernel==0.8.5")

    def compute(self, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        if torch.is_grad_enabled() and weight_VD.requires_grad and not hidden_ND.requires_grad:
            # Liger makes the weight's gradient only together with that of the hidden states.
            hidden_ND = hidden_ND.detach().requires_grad_()
        return self._loss(weight_VD, hidden_ND, labels_N), {}
