"""`cce_kahan` and `cce_filter`: this repository's own kernels, which never hold all logits of a large batch.

They run in Triton on a GPU and in blockwise torch on a CPU, with the same bound on memory. See
`cce_kernels.linear_cross_entropy`.

The formulas ask the kernels' planner for the scheme on a GPU with 132 multiprocessors:

* Three products: the exponentials of a chunk of token rows are kept.
* Four products: the backward pass computes the logits of a chunk of the vocabulary again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from linrnn.config.schema import LossConfig, option
from linrnn.core.errors import ConfigError
from linrnn.losses.base import BF16, FP32, IGNORE_INDEX, Bytes, LossBackend
from linrnn.losses.registry import register_loss
from linrnn.losses.requirements import require_own_kernels

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor

MIB = 2**20
WORKSPACE_MIB = 256  # of the filter's lists and blocks, if `loss.workspace_mib` is null
MULTIPROCESSORS = 132


@dataclass
class CceKahanLossConfig(LossConfig):
    accumulate: str = option(
        "kahan",
        "how gradients are summed over chunks: kahan (compensated) | fp32 | bf16 (plain)",
        choices=("kahan", "fp32", "bf16"),
    )
    workspace_mib: int | None = option(
        None,
        "MiB that the backward pass may take beyond inputs and gradients; more is faster; null: at most the logits in "
        "16 bits, in chunks of at most 2048; 256 for the lists and blocks of a filter",
        minimum=1,
    )


@dataclass
class CceFilterLossConfig(CceKahanLossConfig):
    filter_eps: float = option(
        2.0**-12,
        "softmax probability below which a gradient entry is filtered, above 0 and below 1; 2^-12",
        minimum=0,
        maximum=1,
    )
    filter_unbiased: bool = option(
        True,
        "true: smaller entries are estimated from a sample of columns and rows, so gradients are right on average; "
        "false: smaller entries are dropped, as in the CCE paper",
    )
    filter_mass: float | None = option(
        None,
        "largest softmax mass that may be dropped from a token, in [0, 1); a micro-step above it is exact; null: any",
        minimum=0,
        maximum=1,
    )
    filter_if_faster: bool = option(
        True,
        "true: every step is exact, as with cce_kahan, where the filter would not be faster (small problems, a CPU); "
        "false: always filter",
    )
    filter_c: bool = option(
        True,
        "true: the gradient of the head is filtered, too; false: it is exact, as in the CCE paper's cce_kahan_full_c, "
        "and the logits are computed once more",
    )


class Scheme(NamedTuple):
    """Three products with chunks of `rows` token rows, or (rows = 0) four with chunks of `columns` entries.

    filtered: whether a gradient entry may be left out.
    """

    rows: int
    columns: int
    filtered: bool = False


def filters(loss: CceKahanLossConfig) -> bool:
    """Whether a gradient entry may be left out. With `filter_mass` = 0 none may."""
    return isinstance(loss, CceFilterLossConfig) and loss.filter_mass != 0


def over_shards(loss: LossConfig) -> LossConfig:
    """`loss` as the kernels compute it if ranks share the vocabulary: exactly."""
    return replace(loss, filter_mass=0.0) if isinstance(loss, CceFilterLossConfig) else loss


def cce_scheme(loss: CceKahanLossConfig, n_tokens: int, d: int, vocab: int, compute: int) -> Scheme:
    """The scheme for a batch of `n_tokens`; hidden states and weight have `compute` bytes an element."""
    from cce_kernels.planner import COLUMN_MULTIPLE, WorkspaceTooSmall, plan  # imports torch: 2 s

    try:
        chosen = plan(*_planned(loss, n_tokens, d, vocab, compute))
    except WorkspaceTooSmall:  # a call refuses
        return Scheme(0, COLUMN_MULTIPLE, filters(loss))
    return Scheme(chosen.rows, 0) if chosen.rows else Scheme(0, chosen.columns, filters(loss) and not chosen.exact)


def _planned(loss: CceKahanLossConfig, n_tokens: int, d: int, vocab: int, compute: int) -> tuple:
    """The planner's arguments: problem, multiprocessors, options."""
    import torch
    from cce_kernels.options import Options
    from cce_kernels.planner import Problem

    dtype = torch.bfloat16 if compute == BF16 else torch.float32
    problem = Problem(n_tokens, d, vocab, dtype, dtype, dtype, main_grad=False, uniform=True, has_bias=False)
    keys = ["accumulate", "workspace_mib", "z_loss", "softcap", "label_smoothing"]
    keys += ["filter_eps", "filter_unbiased", "filter_c", "filter_if_faster"] if filters(loss) else []
    return problem, MULTIPROCESSORS, Options(**{key: getattr(loss, key) for key in keys})


def _on_one_gradient(loss: CceKahanLossConfig) -> bool:
    """Whether the gradient of the head is exact and that of the hidden states is not. Such a filter has no lists."""
    return isinstance(loss, CceFilterLossConfig) and not loss.filter_c


@register_loss("cce_kahan", CceKahanLossConfig)
class CceKahan(LossBackend):
    """This repository's exact kernel: never all logits of a large batch in memory, no filter. Triton, or torch on CPU.

    Every gradient entry is computed. `accumulate` says how sums over chunks are kept.
    """

    config: CceKahanLossConfig
    capturable = True
    vocabulary_parallel = True
    lacking: ClassVar = {}

    def __init__(self, config: CceKahanLossConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._kernels = import_module("cce_kernels")
        self._options = {
            "ignore_index": IGNORE_INDEX,
            "reduction": "sum",
            "accumulate": config.accumulate,
            "workspace_mib": config.workspace_mib,
            **self.objective,
        }
        self._loss = partial(self._kernels.linear_cross_entropy, **self._options)
        self._spread = False
        self._agreed: set[tuple[Any, ...]] = set()  # calls that the ranks have compared with each other

    def spread(self, group: dist.ProcessGroup, shards: list[int]) -> None:
        function = self._kernels.vocabulary_parallel_linear_cross_entropy
        self._loss = partial(function, group=group, shards=shards, rows="own", **self._options)
        self._spread = True

    @property
    def compiles_ahead(self) -> bool:
        """Not with a vocabulary over several ranks, which compare their calls."""
        return not self._spread

    @classmethod
    def check(cls, config: LossConfig, device: torch.device, dtype: torch.dtype | None) -> None:
        require_own_kernels(device, f"loss={config.name}")

    @classmethod
    def memory(cls, config: CceKahanLossConfig, n_tokens: int, d: int, vocab: int, compute: int) -> Bytes:
        from cce_kernels.planner import copied_bytes, stored_bytes

        scheme = cce_scheme(config, n_tokens, d, vocab, compute)
        hidden = n_tokens * d
        gradients = (hidden + vocab * d) * compute
        copies = copied_bytes(n_tokens, d, vocab) if compute == BF16 else 0
        if scheme.filtered and compute == BF16 and not _on_one_gradient(config):
            # forward: lists and exponentials; backward: lists and products
            budget = (config.workspace_mib or WORKSPACE_MIB) * MIB
            return copies + budget, copies + gradients + budget
        if not scheme.rows:  # dlogits of the chunk's columns; the compensation of dE's rounding
            lost = {"kahan": 1, "fp32": FP32, "bf16": 0}[config.accumulate] if compute < FP32 else 0
            return copies, copies + gradients + hidden * lost + n_tokens * scheme.columns * compute
        problem, multiprocessors, options = _planned(config, n_tokens, d, vocab, compute)
        held = copies + sum(stored_bytes(problem, scheme.rows, multiprocessors, options))
        apart = config.accumulate == "fp32" and scheme.rows < n_tokens  # else the gradients' own memory holds the sums
        return held + (0 if apart else gradients), held + gradients

    @classmethod
    def products(cls, config: CceKahanLossConfig, *sizes: int) -> int:
        scheme = cce_scheme(config, *sizes)
        return 3 if scheme.rows else 4 + (scheme.filtered and _on_one_gradient(config))  # logits of either threshold

    def compute(self, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self._call(hidden_ND, weight_VD, labels_N), {}

    def _call(self, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, **options: Any) -> Any:
        """Call the kernels. Only here is the batch's shape known, and with it the workspace that it needs.

        Raises:
            ConfigError: `workspace_mib` is too small for the batch.
        """
        if self._spread:
            tensors = hidden_ND, weight_VD
            call = tuple((tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tensors)
            options["agreed"] = call in self._agreed
            self._agreed.add(call)
        try:
            return self._loss(hidden_ND, weight_VD, labels_N, **options)
        except self._kernels.WorkspaceTooSmall as error:
            (n_rows, dim), vocab = hidden_ND.shape, weight_VD.shape[0]
            raise ConfigError(
                f"loss.workspace_mib={self.config.workspace_mib} is too small for {n_rows} tokens "
                f"of width {dim} and {vocab} classes",
                f"use loss.workspace_mib={error.least_mib} or more, or null for the default",
            ) from error


@register_loss("cce_filter", CceFilterLossConfig)
class CceFilter(CceKahan):
    """cce_kahan with a gradient filter: small entries are estimated from a sample, or dropped (harms pretraining).

    A step is exact where the filter would not be faster, unless `filter_if_faster` is false.

    Its statistics are the share of kept entries, whether the call was exact (1 or 0), and the mean, 99th percentile and
    maximum of a row's dropped softmax mass. They are device scalars: NaN until the backward pass fills them in.
    """

    config: CceFilterLossConfig
    lacking: ClassVar = {
        "label_smoothing": "smoothing gives every entry a gradient, and a filter leaves small ones out"
    }

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
        keys = ("filter_eps", "filter_unbiased", "filter_c", "filter_mass", "filter_if_faster")
        options = {key: getattr(self.config, key) for key in keys}
        return self._call(hidden_ND, weight_VD, labels_N, return_stats=True, **options)
