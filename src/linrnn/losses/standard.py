"""`standard` (eager) and `compiled` (torch.compile of the same): logits in memory, cross-entropy in fp32.

Source: torch.nn.functional.linear and cross_entropy. Memory: N x V logits in the compute dtype; eager torch adds three
such tensors in fp32 (logits, log-softmax, gradient). Compute: 6 N D V FLOPs forward and backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from linrnn.config.schema import LossConfig
from linrnn.core.errors import UnsupportedError
from linrnn.core.requirements import require_torch_compile
from linrnn.losses.base import FP32, IGNORE_INDEX, Bytes, LossBackend
from linrnn.losses.registry import register_loss

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def linear_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    z_loss: float = 0.0,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Sum of -log softmax(hidden weightᵀ)[label]: the product in the inputs' dtype, the rest in fp32."""
    import torch.nn.functional as F

    logits_NV = F.linear(hidden_ND, weight_VD).float()
    if softcap is not None:
        logits_NV = softcap * (logits_NV / softcap).tanh()
    loss = F.cross_entropy(logits_NV, labels_N, reduction="sum", label_smoothing=label_smoothing)
    if z_loss:
        loss = loss + z_loss * logits_NV.logsumexp(-1).square().where(labels_N != IGNORE_INDEX, 0).sum()
    return loss


@register_loss("standard")
class Standard(LossBackend):
    """Eager torch: the full logits are stored and converted to fp32. The reference; it needs the most memory."""

    capturable = True
    lacking: ClassVar = {}

    def compute(self, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return linear_cross_entropy(hidden_ND, weight_VD, labels_N, **self.objective), {}

    @classmethod
    def memory(cls, config: LossConfig, n_tokens: int, d: int, vocab: int, compute: int) -> Bytes:
        """Forward: fp32 logits and log-softmax. Backward: log-softmax and two fp32 gradients.

        A softcap keeps its tanh. z_loss keeps the logits, and has a gradient of its own.
        """
        logits, capped, z_loss = n_tokens * vocab, config.softcap is not None, config.z_loss > 0
        copy = compute if compute < FP32 else 0
        gradients = (n_tokens + vocab) * d * compute
        forward, backward = 2 + capped + z_loss, 3 + capped + 2 * z_loss
        return logits * forward * FP32, max(logits * backward * FP32, logits * (copy + FP32) + gradients)


@register_loss("compiled")
class Compiled(LossBackend):
    """torch.compile of the standard loss: the baseline of every verdict. On CPU it needs a C++ compiler.

    One graph per shape. It never falls back to eager silently.
    """

    capturable = True
    lacking: ClassVar = {}

    def __init__(self, config: LossConfig, device: torch.device) -> None:
        import torch
        from torch._dynamo.exc import FailOnRecompileLimitHit

        super().__init__(config, device)
        self._limit_hit = FailOnRecompileLimitHit
        self._compiled = torch.compile(
            linear_cross_entropy,
            dynamic=False,
            fullgraph=True,  # code that cannot be compiled raises, and so does a shape beyond the recompile limit
            options={"compile_threads": 1},  # few kernels are compiled: no pool of compiler processes is needed
        )

    @classmethod
    def check(cls, config: LossConfig, device: torch.device, dtype: torch.dtype | None) -> None:
        require_torch_compile(device, f"loss={config.name}")

    @classmethod
    def memory(cls, config: LossConfig, n_tokens: int, d: int, vocab: int, compute: int) -> Bytes:
        """The logits are stored once. Their gradient overwrites them."""
        logits = n_tokens * vocab * compute
        return logits, logits + (n_tokens + vocab) * d * compute

    def compute(self, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        try:
            return self._compiled(hidden_ND, weight_VD, labels_N, **self.objective), {}
        except self._limit_hit as error:
            import torch

            limit = torch._dynamo.config.recompile_limit
            raise UnsupportedError(
                f"loss={self.config.name}: torch.compile has reached its limit of {limit} compiled shapes",
                "keep batch_size and seq_len constant, or choose loss=standard",
            ) from error


@register_loss("compiled_nudged")
class CompiledNudged(Compiled):
    """`compiled`, the gradient of the hidden states moved by one unit in the last place: the noise-floor run.

    The distance between this loss's curve and compiled's shows how far moved last bits drive equal losses apart.
    Entries move by a whole unit in one pattern, where a kernel's rounding follows no pattern. So this run can shift
    a loss one way, as it does in fine-tuning (docs/study/appendix/e_filters.md).
    """

    def compute(self, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        if hidden_ND.requires_grad:
            hidden_ND = hidden_ND.view_as(hidden_ND)
            hidden_ND.register_hook(_nudged)
        return super().compute(hidden_ND, weight_VD, labels_N)


def _nudged(gradient: Tensor) -> Tensor:
    """Every second entry moves up by one unit in the last place, the others move down. Zeros stay."""
    import torch

    down = torch.arange(gradient.numel(), device=gradient.device).view_as(gradient) % 2 == 1
    moved = torch.nextafter(gradient, torch.where(down, -torch.inf, torch.inf).to(gradient.dtype))
    return torch.where(gradient == 0, gradient, moved)
