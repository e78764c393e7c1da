"""`standard` (eager) and `compiled` (torch.compile of the same): logits in memory, cross-entropy in fp32.

Source: torch.nn.functional.linear and cross_entropy. Cost: N x V logits in the compute dtype and,
eagerly, three times in fp32 (logits, log-softmax, gradient); 6 N D V FLOPs forward and backward.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from linrnn.config.schema import LossConfig
from linrnn.core.errors import UnsupportedError
from linrnn.losses.base import LossBackend
from linrnn.losses.requirements import require_torch_compile


def linear_cross_entropy(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> Tensor:
    """Sum of -log softmax(hidden weightᵀ)[label]: the product in the inputs' dtype, the rest in fp32."""
    return F.cross_entropy(F.linear(hidden_ND, weight_VD).float(), labels_N, reduction="sum")


class Standard(LossBackend):
    """Eager torch with fp32 logits."""

    capturable = True

    @classmethod
    def check(cls, config: LossConfig, device: torch.device, dtype: torch.dtype | None) -> None:
        """It runs wherever torch does."""

    def compute(self, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return linear_cross_entropy(hidden_ND, weight_VD, labels_N), {}


class Compiled(LossBackend):
    """torch.compile of the same function, one graph per shape; it never falls back to eager silently."""

    capturable = True
    # A handful of kernels needs no pool of compiler processes.
    inductor_options: ClassVar[dict[str, Any]] = {"compile_threads": 1}

    def __init__(self, config: LossConfig, device: torch.device) -> None:
        from torch._dynamo.exc import FailOnRecompileLimitHit  # a second to import: only here

        super().__init__(config, device)
        self._limit_hit = FailOnRecompileLimitHit
        # fullgraph: what cannot be compiled, and a shape beyond the recompile limit, raises.
        self._compiled = torch.compile(
            linear_cross_entropy, dynamic=False, fullgraph=True, options=self.inductor_options
        )

    @classmethod
    def check(cls, config: LossConfig, device: torch.device, dtype: torch.dtype | None) -> None:
        require_torch_compile(device, f"loss={config.name}")

    def compute(self, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        try:
            return self._compiled(hidden_ND, weight_VD, labels_N), {}
        except self._limit_hit as error:
            limit = torch._dynamo.config.recompile_limit
            raise UnsupportedError(
                f"loss={self.config.name}: torch.compile has reached its limit of {limit} compiled shapes",
                "keep batch_size and seq_len constant, or choose loss=standard",
            ) from error
