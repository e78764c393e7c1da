"""Models of transformers with another loss: their own, Liger's or ours, for `linrnn.bench.models`.

Each loss is put into a model as a user would: by Liger's function or by `cce_kernels.patch`. Nothing else of the model
changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from linrnn.config.schema import LossConfig
from linrnn.core.errors import ConfigError, UnsupportedError
from linrnn.losses.cce import CceFilterLossConfig, CceKahanLossConfig, filters
from linrnn.losses.liger import LigerLossConfig
from linrnn.losses.registry import check_loss

if TYPE_CHECKING:
    import torch


# What each loss is in a model of transformers.
MEANINGS = (
    ("standard", "the model's own loss: transformers' ForCausalLMLoss on logits"),
    ("liger", "Liger's `apply_liger_kernel_to_…` with `fused_linear_cross_entropy=True` and its other kernels off"),
    ("cce_…", "`cce_kernels.patch(model)` with the loss's options"),
)


def build_published(name: str, overrides: dict[str, str], dtype: torch.dtype, device: torch.device) -> Any:
    """A model of transformers with random weights: a preset of `cce_kernels.doctor` or a model type.

    Raises:
        ConfigError: there is no such model, or its configuration has no such key.
    """
    from cce_kernels.doctor.presets import build

    try:
        return build(name, overrides, dtype, device)
    except ValueError as error:
        raise ConfigError(f"models: {error}", "see python -m cce_kernels.doctor --help") from error


@contextmanager
def model_loss(model: Any, loss: LossConfig, device: torch.device) -> Iterator[None]:
    """Let `model(…, labels=labels)` compute its loss with `loss`, as long as the context lasts.

    Raises:
        ConfigError: an option has no counterpart in a Hugging Face model.
        UnsupportedError: the loss cannot run here, or has no form for Hugging Face models.
    """
    if loss.name == "standard":
        yield
        return
    check_loss(loss, device)
    if isinstance(loss, CceKahanLossConfig):
        import cce_kernels

        cce_kernels.patch(model, **_options(loss))
        try:
            yield
        finally:
            cce_kernels.unpatch(model)
    elif isinstance(loss, LigerLossConfig):
        from cce_kernels.doctor.presets import apply_liger

        if loss.accumulate != "native":
            raise ConfigError("liger accumulate=fp32: Liger's models cannot choose it", "write liger")
        apply_liger(model)
        try:
            yield
        finally:
            del model.forward
    else:
        raise UnsupportedError(
            f"{loss.name} has no form for Hugging Face models", "choose liger, cce_kahan, cce_filter"
        )


def _options(loss: CceKahanLossConfig) -> dict[str, Any]:
    """The options of `cce_kernels.patch`."""
    options: dict[str, Any] = {"accumulate": loss.accumulate, "workspace_mib": loss.workspace_mib}
    if isinstance(loss, CceFilterLossConfig) and filters(loss):
        options |= {
            "filter_eps": loss.filter_eps, "filter_unbiased": loss.filter_unbiased, "filter_mass": loss.filter_mass,
            "filter_c": loss.filter_c, "filter_if_faster": loss.filter_if_faster,
        }  # fmt: skip
    return options
