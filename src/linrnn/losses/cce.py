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
from typing import TYPE_CHECKING, Any, ClassVar

from linrnn.config.schema import LossConfig, option
from linrnn.core.errors import ConfigError
from linrnn.core.requirements import require_package, require_triton
from linrnn.losses.base import BF16, FP32, IGNORE_INDEX, OBJECTIVE, Bytes, LossBackend
from linrnn.losses.registry import register_loss

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from cce_kernels.options import Options
    from cce_kernels.planner import Plan, Problem
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


def filters(loss: CceKahanLossConfig) -> bool:
    """Whether a gradient entry may be left out. With `filter_mass` = 0 none may."""
    return isinstance(loss, CceFilterLossConfig) and loss.filter_mass != 0


def over_shards(loss: LossConfig) -> LossConfig:
    """`loss` as the kernels compute it if ranks share the vocabulary: exactly."""
    return replace(loss, filter_mass=0.0) if isinstance(loss, CceFilterLossConfig) else loss


def kernel_options(loss: CceKahanLossConfig) -> dict[str, Any]:
    """The options of `linear_cross_entropy` that the loss sets."""
    of_filter = ("filter_eps", "filter_unbiased", "filter_mass", "filter_if_faster", "filter_c")
    keys = ("accumulate", "workspace_mib", *OBJECTIVE, *(of_filter if isinstance(loss, CceFilterLossConfig) else ()))
    return {key: getattr(loss, key) for key in keys}


def _options(loss: CceKahanLossConfig) -> Options:
    """The same as the kernels keep them."""
    from cce_kernels.options import Options

    given = kernel_options(loss)
    options = Options(**{**given, "filter_mass": given.get("filter_mass") or None})
    return options if filters(loss) else options.without_filter()


def planned(loss: CceKahanLossConfig, n_tokens: int, d: int, vocab: int, compute: int) -> tuple[Problem, Plan, bool]:
    """How the kernels see a batch of `n_tokens`, their plan for it, and whether a gradient entry may be left out.

    Args:
        compute: bytes of an element of hidden states and weight.
    """
    import torch
    from cce_kernels.planner import COLUMN_MULTIPLE, Plan, Problem, WorkspaceTooSmall, plan

    dtype = torch.bfloat16 if compute == BF16 else torch.float32
    problem = Problem(n_tokens, d, vocab, dtype, dtype, dtype, main_grad=False, uniform=True, has_bias=False)
    try:
        found = plan(problem, MULTIPROCESSORS, _options(loss))
    except WorkspaceTooSmall:  # a call refuses
        found = Plan(0, COLUMN_MULTIPLE)
    return problem, found, filters(loss) and not (found.rows or found.exact)


def _on_one_gradient(loss: CceKahanLossConfig) -> bool:
    """Whether the gradient of the head is exact and that of the hidden states is not. Such a filter has no lists."""
    return isinstance(loss, CceFilterLossConfig) and not loss.filter_c


def require_own_kernels(device: torch.device, what: str) -> None:
    """Require this repository's kernels, and on a GPU what Triton needs."""
    require_package("cce_kernels", "linrnn", what, "./kernels")
    if device.type == "cuda":
        require_triton(what)


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
        self._options = {"ignore_index": IGNORE_INDEX, "reduction": "sum", **kernel_options(config)}
        self._loss = partial(self._kernels.linear_cross_entropy, **self._options)
        self._sharded = False
        self._agreed: set[tuple[Any, ...]] = set()  # calls that the ranks have compared with each other

    def shard_vocabulary(self, group: dist.ProcessGroup, shards: list[int]) -> None:
        function = self._kernels.vocabulary_parallel_linear_cross_entropy
        self._loss = partial(function, group=group, shards=shards, rows="own", **self._options)
        self._sharded = True

    @property
    def compiles_ahead(self) -> bool:
        """Not with a vocabulary over several ranks, which compare their calls."""
        return not self._sharded

    @classmethod
    def check(cls, config: LossConfig, device: torch.device, dtype: torch.dtype | None) -> None:
        require_own_kernels(device, f"loss={config.name}")

    @classmethod
    def memory(cls, config: CceKahanLossConfig, n_tokens: int, d: int, vocab: int, compute: int) -> Bytes:
        from cce_kernels.planner import copied_bytes, stored_bytes

        problem, plan, filtered = planned(config, n_tokens, d, vocab, compute)
        hidden = n_tokens * d
        gradients = (hidden + vocab * d) * compute
        copies = copied_bytes(n_tokens, d, vocab) if compute == BF16 else 0
        if filtered and compute == BF16 and not _on_one_gradient(config):
            # forward: lists and exponentials; backward: lists and products
            budget = (config.workspace_mib or WORKSPACE_MIB) * MIB
            return copies + budget, copies + gradients + budget
        if not plan.rows:  # dlogits of the chunk's columns; the compensation of dE's rounding
            lost = {"kahan": 1, "fp32": FP32, "bf16": 0}[config.accumulate] if compute < FP32 else 0
            return copies, copies + gradients + hidden * lost + n_tokens * plan.columns * compute
        held = copies + sum(stored_bytes(problem, plan.rows, MULTIPROCESSORS, _options(config)))
        apart = config.accumulate == "fp32" and plan.rows < n_tokens  # else the gradients' own memory holds the sums
        return held + (0 if apart else gradients), held + gradients

    @classmethod
    def products(cls, config: CceKahanLossConfig, *sizes: int) -> int:
        _, plan, filtered = planned(config, *sizes)
        return 3 if plan.rows else 4 + (filtered and _on_one_gradient(config))  # logits of either threshold

    def compute(self, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self._call(hidden_ND, weight_VD, labels_N), {}

    def _call(self, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, **options: Any) -> Any:
        """Call the kernels. Only here is the batch's shape known, and with it the workspace that it needs.

        Raises:
            ConfigError: `workspace_mib` is too small for the batch.
        """
        if self._sharded:
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
        try:
            _options(config)
        except ValueError as error:
            raise ConfigError(f"loss.{error}", "use a value in this range, or loss=cce_kahan for no filter") from error

    def compute(self, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self._call(hidden_ND, weight_VD, labels_N, return_stats=True)
