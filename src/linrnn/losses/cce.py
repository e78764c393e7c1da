"""`cce_kahan` and `cce_filter`: this repository's own kernels, which never hold the N x V logits.

Triton on a GPU; on CPU blockwise torch with the same memory bound. See
`cce_kernels.linear_cross_entropy`.
"""

from importlib import import_module

import torch
from torch import Tensor

from linrnn.config.schema import CceFilterLossConfig, CceKahanLossConfig, LossConfig
from linrnn.losses.base import IGNORE_INDEX, LossBackend
from linrnn.losses.requirements import require_package, require_triton


class _Cce(LossBackend):
    config: CceKahanLossConfig

    def __init__(self, config: CceKahanLossConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._loss = import_module("cce_kernels").linear_cross_entropy

    @classmethod
    def check(cls, config: LossConfig, device: torch.device, dtype: torch.dtype | None) -> None:
        require_package("cce_kernels", "linrnn", f"loss={config.name}", "./kernels")
        if device.type == "cuda":
            require_triton(f"loss={config.name}")

    def compute(
        self, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss = self._loss(
            hidden_ND,
            weight_VD,
            labels_N,
            ignore_index=IGNORE_INDEX,
            reduction="sum",
            accumulate=self.config.accumulate,
            workspace_mib=self.config.workspace_mib,
            **self.filter_options(),
        )
        return loss, {}

    def filter_options(self) -> dict[str, float | None]:
        return {"filter_eps": None}


class CceKahan(_Cce):
    """Exact: no gradient entry is dropped; sums over blocks are compensated or kept in fp32."""


class CceFilter(_Cce):
    """Drops gradient entries whose softmax is below `filter_eps`: for fine-tuning, not for pretraining."""

    config: CceFilterLossConfig

    def filter_options(self) -> dict[str, float | None]:
        return {"filter_eps": self.config.filter_eps}
