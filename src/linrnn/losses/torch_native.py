"""`torch_native`: torch.nn.functional.linear_cross_entropy (torch >= 2.13), which chunks over tokens by itself.

In bf16 the function returns its loss in bf16 and adds the weight's gradient over the chunks in bf16. It takes the
upstream gradient in bf16, so the scale 1/tokens is off by up to 0.2 %. In fp32 both reductions are exact.

* `reduction: sum` also adds the scalar loss in bf16 over the chunks. A true 7.22 nats came out as 6.81 with chunks of
  64 rows. The gradients do not depend on this sum.
* `reduction: none` gives one bf16 loss per token, summed here in fp32. It recomputes the logits in the backward pass (4
  products rather than 3). Evaluation always uses `none`, which costs nothing there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from linrnn.config.schema import LossConfig, option
from linrnn.core.errors import UnsupportedError
from linrnn.losses.base import FP32, IGNORE_INDEX, Bytes, LossBackend, chunk_rows
from linrnn.losses.registry import register_loss

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass
class TorchNativeLossConfig(LossConfig):
    reduction: str = option(
        "none",
        "none (one loss per token; logits recomputed in the backward pass) | sum (faster; in bf16 the reported loss is "
        "summed in bf16 and several per cent too low, but gradients are not)",
        choices=("none", "sum"),
    )


@register_loss("torch_native", TorchNativeLossConfig)
class TorchNative(LossBackend):
    """torch.nn.functional.linear_cross_entropy (torch >= 2.13), which chunks over tokens by itself."""

    lacking: ClassVar = {
        **dict.fromkeys(("z_loss", "softcap"), "torch's function has no such argument"),
        "label_smoothing": "torch's function then leaves out its chunks and stores all logits",
    }

    def __init__(self, config: TorchNativeLossConfig, device: torch.device) -> None:
        import torch

        super().__init__(config, device)
        self._reduction = config.reduction
        self._options = torch.nn.LinearCrossEntropyOptions()

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
    def memory(cls, config: TorchNativeLossConfig, n_tokens: int, d: int, vocab: int, compute: int) -> Bytes:
        """fp32 logits of one chunk of tokens; dC in the compute dtype."""
        gradients = (n_tokens + vocab) * d * compute
        rows = min(max(1, chunk_rows(n_tokens, -(-vocab // d)) // 2), n_tokens)
        chunk = rows * vocab * FP32
        with_gradients = gradients + chunk + rows * d * (FP32 + compute)
        return (chunk, with_gradients) if config.reduction == "none" else (with_gradients, gradients)

    @classmethod
    def products(cls, config: TorchNativeLossConfig, *sizes: int) -> int:
        return 4 if config.reduction == "none" else 3

    def compute(self, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        import torch
        import torch.nn.functional as F

        reduction = self._reduction if torch.is_grad_enabled() else "none"
        options: dict[str, Any] = {"ignore_index": IGNORE_INDEX, "reduction": reduction, "options": self._options}
        return F.linear_cross_entropy(hidden_ND, weight_VD, labels_N, **options).float().sum(), {}
