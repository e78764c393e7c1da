"""`torch_native`: torch.nn.functional.linear_cross_entropy, chunked over tokens as torch chooses (>= 2.13).

In bf16 the function returns its loss in bf16, adds the weight's gradient over the chunks in bf16, and
takes the upstream gradient in bf16 (so that the scale 1/tokens is off by up to 0.2 %). With `reduction:
sum` the scalar loss, too, is added in bf16 over the chunks: a true 7.22 nats came out as 6.81 with chunks
of 64 rows, although the gradients do not depend on it. `reduction: none` gives one bf16 loss per token,
summed here in fp32, and recomputes the logits in the backward pass (4 products rather than 3). Evaluation
always takes `none`, which costs nothing there. In fp32 both are exact.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from linrnn.config.schema import LossConfig, TorchNativeLossConfig
from linrnn.core.errors import UnsupportedError
from linrnn.losses.base import IGNORE_INDEX, LossBackend


class TorchNative(LossBackend):
    """PyTorch's own chunked loss."""

    def __init__(self, config: TorchNativeLossConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._reduction = config.reduction
        self._options = torch.nn.LinearCrossEntropyOptions()

    @classmethod
    def check(cls, config: LossConfig, device: torch.device, dtype: torch.dtype | None) -> None:
        if not hasattr(F, "linear_cross_entropy") or not hasattr(torch.nn, "LinearCrossEntropyOptions"):
            raise UnsupportedError(
                f"loss=torch_native needs torch >= 2.13 (this is {torch.__version__})",
                'pip install "torch>=2.13,<2.14", or choose loss=compiled',
            )

    def compute(self, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        reduction = self._reduction if torch.is_grad_enabled() else "none"
        loss = F.linear_cross_entropy(
            hidden_ND,
            weight_VD,
            labels_N,
            ignore_index=IGNORE_INDEX,
            reduction=reduction,
            options=self._options,
        )
        return loss.float().sum(), {}
