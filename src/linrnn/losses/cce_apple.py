"""`cce_apple`: Apple's Cut Cross-Entropy, in the installed version of `cut_cross_entropy`.

Source: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", ICLR 2025. Two packages have this name.
The one on PyPI (25.1.1) is a fork with only the variants `cce` and `torch_compile`. The original repository's releases
(25.6.4) also have `cce_kahan_full_c`, `cce_exact` and more; with Triton >= 3.2 their "Kahan" is an fp32 buffer. Only
the installed package's variants are offered.

The Triton variants take only bf16 and fp16. All but `cce_exact` drop gradient entries below eps/32 of the dtype (2^-12
in bf16).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar

from linrnn.config.schema import LossConfig, option
from linrnn.core.errors import UnsupportedError
from linrnn.core.requirements import require_cuda, require_package, require_torch_compile, require_triton, version_of
from linrnn.losses.base import FP32, IGNORE_INDEX, Bytes, LossBackend
from linrnn.losses.registry import register_loss
from linrnn.losses.standard import Compiled

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_PACKAGE = "cut-cross-entropy"
_ORIGINAL = "cut-cross-entropy @ git+https://github.com/apple/ml-cross-entropy"
# The only variant in plain torch: it runs on CPU and in fp32.
_TORCH_VARIANT = "torch_compile"


def apple_variants() -> tuple[str, ...]:
    """The variants that the installed cut_cross_entropy offers, in its order.

    Raises:
        UnsupportedError: cut_cross_entropy is not installed.
    """
    require_package("cut_cross_entropy", _PACKAGE, "loss=cce_apple", _PACKAGE)
    return tuple(member.name.lower() for member in import_module("cut_cross_entropy").LinearCrossEntropyImpl)


@dataclass
class CceAppleLossConfig(LossConfig):
    variant: str = option(
        "cce",
        "cce (filtered) | torch_compile (runs on CPU) | with the original release also cce_exact, cce_kahan_full_c, …",
    )


@register_loss("cce_apple", CceAppleLossConfig)
class CceApple(LossBackend):
    """Apple's Cut Cross-Entropy, in the installed version; `python scripts/doctor.py` lists its variants."""

    config: CceAppleLossConfig
    lacking: ClassVar = dict.fromkeys(("z_loss", "label_smoothing"), "cut_cross_entropy has no such argument")

    def __init__(self, config: CceAppleLossConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._loss = import_module("cut_cross_entropy").linear_cross_entropy

    @classmethod
    def check(cls, config: LossConfig, device: torch.device, dtype: torch.dtype | None) -> None:
        import torch

        assert isinstance(config, CceAppleLossConfig)
        variants, version = apple_variants(), version_of(_PACKAGE)
        what = f"loss=cce_apple loss.variant={config.variant}"
        if config.variant not in variants:
            raise UnsupportedError(
                f"{what}: cut_cross_entropy {version} has no such variant",
                f'choose from {", ".join(variants)}; the original has more: pip install "{_ORIGINAL}"',
            )
        if config.variant == _TORCH_VARIANT:
            require_torch_compile(device, what)
            return
        require_cuda(device, what, f"choose loss.variant={_TORCH_VARIANT} or loss=cce_filter, which run on CPU")
        require_triton(what)
        if dtype not in (None, torch.bfloat16, torch.float16):
            raise UnsupportedError(
                f"{what}: its backward pass takes bf16 or fp16, not fp32",
                f"use trainer.precision=bf16_autocast or bf16, or loss.variant={_TORCH_VARIANT}",
            )

    @classmethod
    def memory(cls, config: CceAppleLossConfig, n_tokens: int, d: int, vocab: int, compute: int) -> Bytes:
        """torch_compile stores the logits. cce sums gradients in the compute dtype, other variants in fp32."""
        if config.variant == _TORCH_VARIANT:
            return Compiled.memory(config, n_tokens, d, vocab, compute)
        summed, rounded = (compute, 0) if config.variant == "cce" else (FP32, vocab * d * compute)
        return 0, (n_tokens + vocab) * d * summed + rounded

    @classmethod
    def products(cls, config: CceAppleLossConfig, *sizes: int) -> int:
        return 3 if config.variant == _TORCH_VARIANT else 4

    def compute(self, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        if not (labels_N != IGNORE_INDEX).any():
            # The library selects the rows with a label (and waits for the device to count them). It fails on zero rows.
            return (hidden_ND[:1].sum() + weight_VD[:1].sum()) * 0, {}
        options = {"ignore_index": IGNORE_INDEX, "softcap": self.config.softcap, "reduction": "sum"}
        return self._loss(hidden_ND, weight_VD, labels_N, impl=self.config.variant, **options), {}
