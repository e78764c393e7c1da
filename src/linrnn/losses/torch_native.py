"""`torch_native`: torch.nn.functional.linear_cross_entropy (torch >= 2.13), which chunks over tokens by itself.

In bf16 the function returns one bf16 loss per token, summed here in fp32. It adds the weight's gradient over the
chunks in bf16, and takes the upstream gradient in bf16, so the scale 1/tokens is off by up to 0.2 %. The backward pass
computes the logits again (4 products rather than 3). Its faster `reduction="sum"` is not used: it adds the loss itself
in bf16, and a true 7.22 nats came out as 6.81 with chunks of 64 rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from linrnn.config.schema import LossConfig
from linrnn.core.errors import UnsupportedError
from linrnn.losses.base import FP32, IGNORE_INDEX, Bytes, LossBackend, chunk_rows
from linrnn.losses.registry import register_loss

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@register_loss("torch_native")
class TorchNative(LossBackend):
    """torch.nn.functional.linear_cross_entropy (torch >= 2.13), which chunks over tokens by itself."""

    lacking: ClassVar = {
        **dict.fromkeys(("z_loss", "softcap"), "torch's function has no such argument"),
        "label_smoothing": "torch's function then leaves out its chunks and stores all logits",
    }

    @classmethod
    def check(cls, config: LossConfig, device: torch.device, dtype: torch.dtype | None) -> None:
        import torch
        import torch.nn.functional as F

        if not hasattr(F, "linear_cross_entropy") or not hasattr(torch.nn, "LinearCrossEntropyOptions"):
            raise UnsupportedError(
                f"loss=torch_native needs torch >= 2.13 (this is {torch.__version__})",
                'pip install "torch>=2.13,<2.14", or choose loss=compiled',
            )

    @classmethod
    def memory(cls, config: LossConfig, n_tokens: int, d: int, vocab: int, compute: int) -> Bytes:
        """fp32 logits of one chunk of tokens; dC in the compute dtype."""
        rows = min(max(1, chunk_rows(n_tokens, -(-vocab // d)) // 2), n_tokens)
        chunk = rows * vocab * FP32
        return chunk, (n_tokens + vocab) * d * compute + chunk + rows * d * (FP32 + compute)

    @classmethod
    def products(cls, config: LossConfig, *sizes: int) -> int:
        return 4

    def compute(self, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        import torch
        import torch.nn.functional as F

        losses_N = F.linear_cross_entropy(
            hidden_ND,
            weight_VD,
            labels_N,
            ignore_index=IGNORE_INDEX,
            reduction="none",
            options=torch.nn.LinearCrossEntropyOptions(),
        )
        return losses_N.float().sum(), {}
