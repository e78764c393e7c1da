"""This package in place of TRL's fused head (TRL 1.16): in SFT, DPO, GRPO and TRL's other trainers that use it.

TRL's trainers score tokens with one autograd function, which `trl.trainer.utils` holds under a private name.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from torch import Tensor

from ..arguments import checked
from ..operators import cross_entropy
from .checks import imported

_NAME = "_ChunkedLogProbFunction"


def register_in_trl() -> None:
    """Let TRL's fused head compute log-probabilities, entropies and argmax with this package, in this whole process.

    What TRL asks for beside them stays TRL's own: `use_weighting` of DPO, and mean logits under a softcap.

    Raises:
        ModuleNotFoundError: TRL is missing.
        ValueError: TRL has no such function; its version is not 1.16.
    """
    utils = imported("trl.trainer.utils", "trl==1.16.0")
    if not hasattr(utils, _NAME):
        raise ValueError(f"trl: its trainer.utils has no {_NAME}; register_in_trl knows TRL 1.16")
    setattr(utils, _NAME, FusedHead)


class FusedHead:
    """In place of `trl.kernels.ChunkedLogProbFunction`."""

    @staticmethod
    def apply(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, chunk_size: int,
        softcap: float | None = None, logit_scale: float = 1.0, outputs: Sequence[str] = ("log_probs",),
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """TRL's arguments and results; the signature is wide because TRL's is. chunk_size is not used here.

        Returns:
            log-probabilities, entropies, log Σ p², mean logits, each (N,) fp32, whether the target is the argmax (N,);
            None for what is not in `outputs`.
        """
        wanted = set(outputs)
        if "log_sum_sq_probs" in wanted or (softcap and "mean_logits" in wanted) or not targets.numel():
            own = importlib.import_module("trl.kernels").ChunkedLogProbFunction
            return own.apply(
                hidden, weight, bias, targets, temperature, chunk_size, softcap, logit_scale, outputs
            )  # fmt: skip
        if bias is not None:  # our logit_scale scales the product alone
            bias = bias.float() * (logit_scale / temperature)
        cap = None if softcap is None else softcap / temperature
        options = {"softcap": cap, "logit_scale": logit_scale / temperature}
        with_metrics = not wanted.isdisjoint(("entropy", "is_top1"))
        inputs, call, _ = checked(
            hidden, weight, targets, bias, None, None, options, reduction="none", return_metrics=with_metrics
        )
        losses, _, metrics = cross_entropy(inputs, call)
        correct, entropies = (None, None) if metrics is None or not with_metrics else (metrics[0] > 0, metrics[1])
        mean_logits = None
        if "mean_logits" in wanted:
            mean_logits = hidden.detach().float() @ weight.detach().float().mean(0) * (logit_scale / temperature)
            if bias is not None:
                mean_logits = mean_logits + bias.detach().mean()
        return (
            -losses, entropies if "entropy" in wanted else None, None, mean_logits,
            correct if "is_top1" in wanted else None,
        )  # fmt: skip
