"""`liger`: Liger-Kernel's LigerFusedLinearCrossEntropyLoss (Triton; gradients are computed in the forward pass).

Source: Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training", 2024. Per-token losses and their sum are
fp32. Logits are rounded to the compute dtype. The weight's gradient is summed over chunks:

* `accumulate: native`: in the weight's dtype. In bf16 its error is about three times that of one product.
* `accumulate: fp32`: in fp32, which takes V x D x 4 bytes more.

Each call waits for the device once, to count labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from linrnn.config.schema import LossConfig, option
from linrnn.core.requirements import require_cuda, require_package, require_triton
from linrnn.losses.base import FP32, IGNORE_INDEX, Bytes, LossBackend, chunk_rows
from linrnn.losses.registry import register_loss

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass
class LigerLossConfig(LossConfig):
    accumulate: str = option(
        "native",
        "sum of the weight's gradient over chunks: native (compute dtype, the library's default) | fp32",
        choices=("native", "fp32"),
    )


@register_loss("liger", LigerLossConfig)
class Liger(LossBackend):
    """Liger-Kernel's fused linear cross-entropy (GPU only): gradients are computed in the forward pass.

    Chunks over tokens. A chunk's logits take about the memory of the hidden states.
    """

    lacking: ClassVar = {}

    def __init__(self, config: LigerLossConfig, device: torch.device) -> None:
        import torch
        from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

        super().__init__(config, device)
        self._loss = LigerFusedLinearCrossEntropyLoss(
            ignore_index=IGNORE_INDEX,
            reduction="sum",
            accum_dtype={"native": None, "fp32": torch.float32}[config.accumulate],
            lse_square_scale=config.z_loss,
            softcap=config.softcap,
            label_smoothing=config.label_smoothing,
        )

    @classmethod
    def check(cls, config: LossConfig, device: torch.device, dtype: torch.dtype | None) -> None:
        require_cuda(device, "loss=liger", "choose loss=cce_kahan, which has a CPU path")
        require_triton("loss=liger")
        require_package("liger_kernel.transformers", "liger-kernel", "loss=liger", "liger-kernel==0.8.5")

    @classmethod
    def memory(cls, config: LigerLossConfig, n_tokens: int, d: int, vocab: int, compute: int) -> Bytes:
        """All in the forward pass, in V / D chunks of tokens. The logits' gradient overwrites the logits."""
        hidden, weight = n_tokens * d, vocab * d
        gradients = (hidden + weight) * compute
        chunk = min(chunk_rows(n_tokens, -(-vocab // d)), n_tokens) * vocab * compute
        if config.accumulate == "fp32":  # dC in fp32, rounded at the end
            return max(hidden * compute + weight * FP32 + chunk, gradients + weight * FP32), gradients
        return gradients + chunk, gradients

    def compute(self, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        if torch.is_grad_enabled() and weight_VD.requires_grad and not hidden_ND.requires_grad:
            # Liger computes the weight's gradient only if the hidden states need one too.
            hidden_ND = hidden_ND.detach().requires_grad_()
        return self._loss(weight_VD, hidden_ND, labels_N), {}
