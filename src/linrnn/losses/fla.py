"""`fla`: flash-linear-attention's two losses (Triton).

Source: flash-linear-attention 0.6.0, fla.modules. Per-token losses and their sum are fp32. Logits are rounded to the
compute dtype.

* FusedLinearCrossEntropyLoss never stores all logits. The weight's gradient is summed in fp32. Every call computes
  gradients, also under no_grad, so that validation costs as much as training.
* FusedCrossEntropyLoss (`fuse_linear=false`) takes stored logits. FLA's models use it by default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from linrnn.config.schema import LossConfig, option
from linrnn.core.requirements import require_cuda, require_package, require_triton
from linrnn.losses.base import FP32, IGNORE_INDEX, Bytes, LossBackend, chunk_rows
from linrnn.losses.registry import register_loss
from linrnn.losses.standard import Compiled

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass
class FlaLossConfig(LossConfig):
    num_chunks: int = option(
        8, "maximum number of chunks of tokens; more chunks need less memory (8: the library's default)", minimum=1
    )
    fuse_linear: bool = option(True, "false: FLA's cross-entropy on stored logits, the default of its models")


@register_loss("fla", FlaLossConfig)
class Fla(LossBackend):
    """flash-linear-attention's fused linear cross-entropy (GPU only): gradients are computed in the forward pass.

    At most `num_chunks` chunks over tokens. The rows of a chunk are rounded up to a power of two.
    `loss.fuse_linear=false` stores all logits instead, as FLA's models do by default.
    """

    capturable = True

    def __init__(self, config: FlaLossConfig, device: torch.device) -> None:
        from linrnn.models.fla_import import import_fla

        super().__init__(config, device)
        modules = import_fla("fla.modules")
        self._on_logits = not config.fuse_linear
        options = {"label_smoothing": config.label_smoothing, "logit_softcapping": config.softcap}
        self._loss = (
            modules.FusedLinearCrossEntropyLoss(IGNORE_INDEX, num_chunks=config.num_chunks, reduction="sum", **options)
            if config.fuse_linear
            else modules.FusedCrossEntropyLoss(
                IGNORE_INDEX, reduction="sum", inplace_backward=True, lse_square_scale=config.z_loss, **options
            )
        )

    @classmethod
    def check(cls, config: LossConfig, device: torch.device, dtype: torch.dtype | None) -> None:
        from linrnn.models.fla_import import import_fla

        require_cuda(device, "loss=fla", "choose loss=cce_kahan, which has a CPU path")
        require_triton("loss=fla")
        require_package(
            "fla.modules", "flash-linear-attention", "loss=fla", "flash-linear-attention==0.6.0", import_fla
        )

    @classmethod
    def lacks(cls, config: LossConfig) -> dict[str, str]:
        assert isinstance(config, FlaLossConfig)
        return {"z_loss": "FLA's fused loss has none; loss.fuse_linear=false has it"} if config.fuse_linear else {}

    @classmethod
    def memory(cls, config: FlaLossConfig, n_tokens: int, d: int, vocab: int, compute: int) -> Bytes:
        """Fused: all in the forward pass, with logits in fp32 and in the compute dtype, and dC in fp32."""
        if not config.fuse_linear:  # the gradient overwrites the logits
            return Compiled.memory(config, n_tokens, d, vocab, compute)
        hidden, weight = n_tokens * d, vocab * d
        rows = chunk_rows(n_tokens, min(config.num_chunks, -(-vocab // d)))
        held = hidden * compute + weight * FP32 + 2 * rows * d * compute + rows * vocab * compute
        return held + max(rows * vocab * FP32, weight * compute), (hidden + weight) * compute

    def compute(self, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        if self._on_logits:
            return self._loss(hidden_ND @ weight_VD.T, labels_N), {}
        return self._loss(hidden_ND, labels_N, weight_VD), {}
