"""The loss as a torch.nn.Module, in two call orders: this package's, and flash-linear-attention's.

Neither has parameters: the head's weight is an argument of the call.
"""

from __future__ import annotations

import difflib
import inspect
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from .api import linear_cross_entropy, try_options
from .arguments import as_integer
from .parallel.api import vocabulary_parallel_linear_cross_entropy

# The keywords of linear_cross_entropy that are no tensors: what a module may store.
OPTIONS = tuple(
    p.name
    for p in inspect.signature(linear_cross_entropy).parameters.values()
    if p.kind is p.KEYWORD_ONLY and "Tensor" not in str(p.annotation)
)


class LinearCrossEntropyLoss(nn.Module):
    """`linear_cross_entropy` as a module: options at construction, tensors at the call.

    It takes hidden states and the head's weight where torch.nn.CrossEntropyLoss takes logits.
    """

    def __init__(self, *, reduction: str = "mean", ignore_index: int = -100, **options: Any) -> None:
        """Check and store the options.

        Args:
            reduction: "mean", "sum" or "none"; may be set on the module later, as FLA does.
            ignore_index: targets with this value add nothing to the loss.
            options: the other options of `linear_cross_entropy`, except tensors.

        Raises:
            TypeError: no option has this name, or a value has the wrong type.
            ValueError: a value is out of range.
        """
        super().__init__()
        for name in options:
            if name not in OPTIONS:
                near = difflib.get_close_matches(name, OPTIONS, n=1)
                meant = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(OPTIONS)}"
                raise TypeError(f"{name}: is no option of {type(self).__name__}{meant}")
        self.reduction, self.ignore_index, self.options = reduction, ignore_index, options
        try_options(**{**options, "reduction": reduction, "ignore_index": ignore_index, "shift": 0})
        if as_integer("shift", options.get("shift", 0)) < 0:
            raise ValueError(f"shift: must not be negative, got {options['shift']}")

    def forward(self, e: Tensor, c: Tensor, targets: Tensor, bias: Tensor | None = None, **tensors: Any) -> Any:
        """The loss of hidden states e (..., D), weight c (V, D), targets (...) and bias (V,).

        Args:
            tensors: further tensors of `linear_cross_entropy`, such as main_grad_c.

        Returns:
            What `linear_cross_entropy` returns: the loss in fp32, or a tuple if an option return_… is set.
        """
        return linear_cross_entropy(
            e, c, targets, bias=bias, **tensors, reduction=self.reduction, ignore_index=self.ignore_index,
            **self.options,
        )  # fmt: skip

    def extra_repr(self) -> str:
        options = {"reduction": self.reduction, "ignore_index": self.ignore_index, **self.options}
        return ", ".join(f"{name}={value!r}" for name, value in options.items())


class FusedLinearCrossEntropyLoss(LinearCrossEntropyLoss):
    """In place of `fla.modules.FusedLinearCrossEntropyLoss` (FLA 0.6.0): its options, and its order of arguments.

    It fits `model.criterion` of FLA's models whose configuration says fuse_linear_cross_entropy=True.
    """

    def __init__(
        self, ignore_index: int = -100, label_smoothing: float = 0.0, logit_scale: float = 1.0,
        logit_softcapping: float | None = None, num_chunks: int = 8, reduction: str = "mean",
        use_l2warp: bool = False, l2_penalty_factor: float = 1e-4, accumulate_grad_in_fp32: bool = True,
        process_group: dist.ProcessGroup | None = None, **options: Any,
    ) -> None:  # fmt: skip
        """Translate FLA's options; the signature is wide because FLA's is.

        Args:
            logit_scale: multiplies the product and the bias, as in FLA. logit_softcapping: `softcap`.
            num_chunks, l2_penalty_factor: no value but FLA's default. use_l2warp: must be False.
            accumulate_grad_in_fp32: False for accumulate="bf16".
            process_group: its ranks hold equal shards of weight and bias, and the same rows; None for one device.
            options: further options of `linear_cross_entropy`.

        Raises:
            TypeError, ValueError: as in `LinearCrossEntropyLoss`, or FLA's option is not supported here.
        """
        if use_l2warp:
            raise ValueError("use_l2warp: must be False, this loss has no L2Warp penalty; keep FLA's loss for it")
        if num_chunks != 8:
            raise ValueError(
                f"num_chunks: must be 8 here, got {num_chunks}; give workspace_mib, which bounds the memory"
            )
        if l2_penalty_factor != 1e-4:
            raise ValueError("l2_penalty_factor: must be 1e-4, this loss has no L2Warp penalty")
        if not accumulate_grad_in_fp32:
            options = {"accumulate": "bf16", **options}
        super().__init__(
            reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing, logit_scale=logit_scale,
            softcap=logit_softcapping, **options,
        )  # fmt: skip
        self.process_group = process_group

    def forward(  # type: ignore[override]  # FLA's order
        self, x: Tensor, target: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Any:
        """The loss (fp32) of x (..., D), target (...), weight (V, D) and bias (V,); with process_group the rank's V
        / ranks.
        """
        scale = self.options["logit_scale"]
        if bias is not None and scale != 1:  # linear_cross_entropy scales the product alone
            bias = bias.float() * scale
        if self.process_group is None:
            return super().forward(x, weight, target, bias)
        return vocabulary_parallel_linear_cross_entropy(
            x, weight, target, bias=bias, reduction=self.reduction, ignore_index=self.ignore_index,
            shards=[weight.shape[0]] * dist.get_world_size(self.process_group), group=self.process_group,
            **self.options,
        )  # fmt: skip
