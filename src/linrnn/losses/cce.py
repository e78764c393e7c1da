"""`cce_kahan` and `cce_filter`: this repository's own kernels, which never hold the N x V logits.

Triton on a GPU; on CPU blockwise torch with the same memory bound. See
`cce_kernels.linear_cross_entropy`.
"""

from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from linrnn.config.schema import CceFilterLossConfig, CceKahanLossConfig, LossConfig
from linrnn.core.errors import ConfigError
from linrnn.losses.base import IGNORE_INDEX, LossBackend
from linrnn.losses.requirements import require_own_kernels


class CceKahan(LossBackend):
    """Exact: no gradient entry is dropped; sums over blocks are compensated or kept in fp32."""

    config: CceKahanLossConfig
    autocasts = True
    capturable = True
    vocabulary_parallel = True

    def __init__(self, config: CceKahanLossConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._kernels = import_module("cce_kernels")
        self._options = {
            "ignore_index": IGNORE_INDEX,
            "reduction": "sum",
            "accumulate": config.accumulate,
            "workspace_mib": config.workspace_mib,
        }
        self._loss = partial(self._kernels.linear_cross_entropy, **self._options)

    def spread(self, group: dist.ProcessGroup, shards: list[int]) -> None:
        function = self._kernels.vocabulary_parallel_linear_cross_entropy
        self._loss = partial(function, group=group, shards=shards, rows="own", **self._options)

    @classmethod
    def check(cls, config: LossConfig, device: torch.device, dtype: torch.dtype | None) -> None:
        require_own_kernels(device, f"loss={config.name}")

    def compute(self, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self._call(hidden_ND, weight_VD, labels_N), {}

    def _call(self, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, **options: Any) -> Any:
        """The kernels' function; how much workspace a batch takes shows only here, with its shape.

        Raises:
            ConfigError: `workspace_mib` is too small for the batch.
        """
        try:
            return self._loss(hidden_ND, weight_VD, labels_N, **options)
        except self._kernels.WorkspaceTooSmall as error:
            (n_rows, dim), vocab = hidden_ND.shape, weight_VD.shape[0]
            raise ConfigError(
                f"loss.workspace_mib={self.config.workspace_mib} is too small for {n_rows} tokens "
                f"of width {dim} and {vocab} classes",
                f"use loss.workspace_mib={error.least_mib} or more, or null for the default",
            ) from error


class CceFilter(CceKahan):
    """Estimates gradient entries whose softmax is below `filter_eps` from a sample, or drops them (for fine-tuning).

    Its statistics (shares of entries kept and of exact rows; softmax mass dropped per row: mean, 99th percentile and
    largest) are device scalars that the backward pass fills in; they are NaN before it.
    """

    config: CceFilterLossConfig

    @classmethod
    def check(cls, config: LossConfig, device: torch.device, dtype: torch.dtype | None) -> None:
        super().check(config, device, dtype)
        assert isinstance(config, CceFilterLossConfig)
        if not 0 < config.filter_eps < 1:
            raise ConfigError(
                f"loss.filter_eps={config.filter_eps:g} is not between 0 and 1",
                "use 2.44140625e-4 (2^-12), or loss=cce_kahan for no filter",
            )
        if config.filter_mass is not None and not config.filter_mass < 1:
            raise ConfigError(
                f"loss.filter_mass={config.filter_mass:g} is not below 1", "use null to let any mass be dropped"
            )

    def compute(self, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self._call(
            hidden_ND, weight_VD, labels_N, filter_eps=self.config.filter_eps, return_stats=True,
            filter_unbiased=self.config.filter_unbiased, filter_mass=self.config.filter_mass,
        )  # fmt: skip
