"""Build a model with deterministic weights from an `Architecture`."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from linrnn.core.errors import ConfigError
from linrnn.models import cpu_ops
from linrnn.models.architecture import Architecture
from linrnn.models.attention import install_sdpa
from linrnn.models.facts import matched
from linrnn.models.fla_any import FlaArchitecture, build_hf
from linrnn.models.fla_import import fla_classes
from linrnn.models.language_model import KEPT_IN_FP32, LanguageModel
from linrnn.models.layers.shared_projection import share_projections


def build_model(
    arch: Architecture,
    *,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    seed: int | None = None,
) -> LanguageModel:
    """Build FLA's model for `arch`, initialised as FLA does.

    Weights are drawn on the CPU in fp32, so that a seed gives the same weights on every device. The generator's state
    is restored.

    Args:
        dtype: of the parameters, fp32 or bf16; A_log and dt_bias stay in fp32.
        seed: of the weights; None: continue from the CPU generator's state.

    Raises:
        ConfigError: another dtype.
        UnsupportedError: the model has no CPU form, and `device` is a CPU.
    """
    device = torch.device(device)
    prepare(arch, device, dtype)
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        hf = initialised(arch)
    cast_parameters(hf, dtype)
    return LanguageModel(hf.to(device), arch).train()


def prepare(arch: Architecture, device: torch.device, dtype: torch.dtype) -> None:
    """Check what cannot be built, and replace those of FLA's functions that `device` does not have.

    Raises:
        ConfigError: parameters are to be neither fp32 nor bf16.
        UnsupportedError: the model has no CPU form, and `device` is a CPU.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise ConfigError(f"parameters in {dtype} are not supported", "use fp32 or bf16 parameters")
    install_sdpa()
    if device.type == "cpu":
        cpu_ops.check_model(arch.kind)
        cpu_ops.install()


def initialised(arch: Architecture) -> Any:
    """FLA's model on the CPU in fp32, with the weights that FLA draws from the CPU generator."""
    if isinstance(arch, FlaArchitecture):
        with one_thread():
            return build_hf(arch.fla, arch.settings, "cpu")
    with without_torchs_own_draws():
        hf = fla_classes(arch.model)[0](fla_config(arch))
    if arch.shared_projection_rank is not None:
        share_projections(hf, arch.shared_projection_rank)
    return hf


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Inside the block, torch computes on one thread here, and in threads that begin in it.

    RWKV's initial matrices are orthogonal, through a QR decomposition. Its last bits depend on the number of threads,
    and initial weights must not depend on the number of cores.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def without_torchs_own_draws() -> Iterator[None]:
    """Inside the block, torch gives new linear layers and embeddings memory but no values.

    FLA draws all of them by its own rule afterwards. Torch's draws would take two thirds of the time to build a model.
    """
    with contextlib.ExitStack() as patches:
        for layer in (nn.Linear, nn.Embedding):
            patches.enter_context(patch.object(layer, "reset_parameters", lambda self: None))
        yield


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast all parameters but A_log and dt_bias in place. Buffers, ties and attributes stay as they are."""
    for name, parameter in module.named_parameters():
        parameter.data = parameter.data.to(kept_dtype(name, parameter, dtype))


def kept_dtype(name: str, parameter: nn.Parameter, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a parameter in a model whose parameters are kept in `dtype`."""
    return parameter.dtype if name.endswith(KEPT_IN_FP32) else dtype


def fla_config(arch: Architecture) -> Any:
    """FLA's configuration. Settings not named here keep FLA's default (initializer_range 0.02, norm_eps 1e-6)."""
    shared = {
        "hidden_size": arch.hidden_size,
        "num_hidden_layers": arch.num_layers,
        "num_heads": arch.num_heads,
        "intermediate_size": arch.intermediate_size,
        "vocab_size": arch.vocab_size,
        "tie_word_embeddings": arch.tie_embeddings,
        "use_cache": False,
    }
    return fla_classes(arch.model)[1](**shared, **matched(arch.model).settings(arch))
