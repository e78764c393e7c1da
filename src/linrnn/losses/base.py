"""The interface of every loss backend: three tensors in, the summed loss and the number of tokens out.

The files of the losses import torch inside functions. A loss's options are part of every command line, and errors in a
command line are reported before torch is imported.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from linrnn.config.schema import LossConfig

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor

IGNORE_INDEX = -100
FP32, BF16 = 4, 2  # bytes
Bytes = tuple[int, int]  # of the forward pass, of the backward pass
OBJECTIVE = ("z_loss", "softcap", "label_smoothing")  # keys of every loss that change what is minimised


@dataclass(frozen=True)
class LossOutput:
    """The result of a backend.

    Attributes:
        sum_nats: fp32 scalar, the loss summed over all labels that are not ignored. A backend never averages: the
            trainer divides by the tokens of the whole step (all ranks, all accumulation steps).
        n_tokens: int64 scalar on the tensors' device (no host synchronisation), the number of labels that are not
            ignored.
        stats: scalars that the backend reports in addition, by metric name; empty for most backends.
    """

    sum_nats: Tensor
    n_tokens: Tensor
    stats: dict[str, Tensor] = field(default_factory=dict)


class LossBackend(ABC):
    """The last linear layer and cross-entropy as one differentiable function of hidden states and weight.

    A subclass defines `compute`; `check` if it cannot run everywhere; `memory` and `products` if they are known. Its
    constructor is called after `check` has passed and may import its library.

    Attributes:
        capturable: forward and backward pass never wait for the device, so a CUDA graph can hold them.
        vocabulary_parallel: it has `shard_vocabulary`: ranks can share the rows of the weight.
        lacking: the keys of :data:`OBJECTIVE` that it cannot compute, each with the reason.
    """

    capturable: ClassVar[bool] = False
    vocabulary_parallel: ClassVar[bool] = False
    lacking: ClassVar[Mapping[str, str]] = dict.fromkeys(OBJECTIVE, "it computes plain cross-entropy alone")

    def __init__(self, config: LossConfig, device: torch.device) -> None:
        self.config = config
        self.device = device

    @classmethod  # noqa: B027  not abstract: most losses of plain torch need no check
    def check(cls, config: LossConfig, device: torch.device, dtype: torch.dtype | None) -> None:
        """Raise UnsupportedError if this backend cannot run here; `dtype` is None while it is unknown.

        A backend without its own check runs wherever torch does.
        """

    @classmethod
    def lacks(cls, config: LossConfig) -> Mapping[str, str]:
        """As `lacking`, with the options of `config`."""
        return cls.lacking

    @classmethod
    def memory(cls, config: Any, n_tokens: int, d: int, vocab: int, compute: int) -> Bytes | None:
        """Peak bytes of the two passes beyond hidden states, weight and labels, with both gradients; None: unknown.

        Scalars per token are left out.

        Args:
            compute: bytes of an element of hidden states, weight and logits.
        """
        return None

    @classmethod
    def products(cls, config: Any, n_tokens: int, d: int, vocab: int, compute: int) -> int:
        """N x D x V products of both passes: 3, and 1 for every time that logits are computed again.

        Exact for losses that do not filter; a filter skips a share that depends on the data.
        """
        return 3

    @abstractmethod
    def compute(self, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The summed loss (a scalar, any floating dtype) and the statistics."""

    @property
    def objective(self) -> dict[str, float]:
        """The values of :data:`OBJECTIVE` that are not the default, which is plain cross-entropy."""
        return {key: value for key in OBJECTIVE if (value := getattr(self.config, key))}

    @property
    def compiles_ahead(self) -> bool:
        """Whether its first call compiles its kernels on all cores. A run then makes one before its first step."""
        return False

    def shard_vocabulary(self, group: dist.ProcessGroup, shards: list[int]) -> None:
        """From now on the weight is this rank's `shards[rank]` rows of a matrix that the ranks of `group` share.

        Labels index the whole matrix. All ranks call the loss together, each with its own hidden states and labels.
        Only for backends with `vocabulary_parallel`.
        """
        raise NotImplementedError(f"loss={self.config.name} is not vocabulary-parallel")

    def __call__(self, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> LossOutput:
        """Evaluate the loss.

        Args:
            hidden_ND: final hidden states, already in the compute dtype; any strides.
            weight_VD: the output embedding in the same dtype.
            labels_N: int64 classes in [0, V), shifted by the caller; -100 is ignored.

        Raises:
            ValueError: shapes, dtypes or devices do not match.
        """
        import torch

        _check_tensors(hidden_ND, weight_VD, labels_N)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            loss, stats = self.compute(hidden_ND, weight_VD, labels_N)
        return LossOutput(loss.float(), (labels_N != IGNORE_INDEX).sum(), stats)


def chunk_rows(n_tokens: int, chunks: int) -> int:
    """Token rows of each of so many chunks, rounded up to a power of two."""
    return 1 << (-(-n_tokens // chunks) - 1).bit_length()


def _check_tensors(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> None:
    import torch

    if hidden_ND.ndim != 2 or weight_VD.ndim != 2 or hidden_ND.shape[1] != weight_VD.shape[1]:
        raise ValueError(f"hidden must be (N, D) and weight (V, D): {tuple(hidden_ND.shape)}, {tuple(weight_VD.shape)}")
    if labels_N.shape != hidden_ND.shape[:1] or labels_N.dtype != torch.int64:
        raise ValueError(f"labels must be ({hidden_ND.shape[0]},) int64: {tuple(labels_N.shape)} {labels_N.dtype}")
    if hidden_ND.dtype != weight_VD.dtype:
        raise ValueError(f"hidden and weight must share the compute dtype: {hidden_ND.dtype}, {weight_VD.dtype}")
    if not hidden_ND.device == weight_VD.device == labels_N.device:
        devices = ", ".join(str(tensor.device) for tensor in (hidden_ND, weight_VD, labels_N))
        raise ValueError(f"hidden, weight and labels must be on one device: {devices}")
