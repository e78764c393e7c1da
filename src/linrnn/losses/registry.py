"""Backends by name: `loss=<name>`."""

import difflib

import torch
import torch.distributed as dist

from linrnn.config.schema import LossConfig
from linrnn.core.errors import ConfigError, UnsupportedError
from linrnn.losses.base import LossBackend
from linrnn.losses.cce import CceFilter, CceKahan
from linrnn.losses.cce_apple import CceApple
from linrnn.losses.fla import Fla
from linrnn.losses.liger import Liger
from linrnn.losses.rivals import RIVALS
from linrnn.losses.standard import Compiled, Standard
from linrnn.losses.torch_native import TorchNative

_BACKENDS: dict[str, type[LossBackend]] = {
    "standard": Standard,
    "compiled": Compiled,
    "liger": Liger,
    "fla": Fla,
    "torch_native": TorchNative,
    "cce_kahan": CceKahan,
    "cce_filter": CceFilter,
    "cce_apple": CceApple,
}


def loss_names() -> tuple[str, ...]:
    """Every backend that a run can choose, whether it can run here or not."""
    return tuple(_BACKENDS)


def rival_names() -> tuple[str, ...]:
    """Backends without options that scripts/bench_loss.py knows beside those."""
    return tuple(RIVALS)


def check_loss(config: LossConfig, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Refuse a loss that cannot run here; meant to be called before a model or a data set is built.

    Args:
        config: the loss's name and options.
        device: where the tensors will be.
        dtype: the compute dtype (of hidden states and weight), if it is known.

    Raises:
        ConfigError: an unknown name; the nearest ones are offered.
        UnsupportedError: this hardware or these versions cannot run it; says what to install or choose.
    """
    _find(config.name).check(config, device, dtype)


def check_vocabulary_parallel(config: LossConfig) -> None:
    """Refuse a loss that needs all rows of the head in one place.

    Raises:
        UnsupportedError: it does; names those that do not.
    """
    if not _find(config.name).vocabulary_parallel:
        able = [name for name, backend in _BACKENDS.items() if backend.vocabulary_parallel]
        raise UnsupportedError(
            f"loss={config.name} needs the whole head on every rank, and parallel=vocab spreads its rows over them",
            f"choose loss={' or loss='.join(able)}, or parallel=fsdp",
        )


def build_loss(
    config: LossConfig,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    vocabulary: tuple[dist.ProcessGroup, list[int]] | None = None,
) -> LossBackend:
    """The backend that `config` names. Arguments and errors as :func:`check_loss`.

    Args:
        vocabulary: ranks that hold some rows of the head each, and how many. The backend then takes a rank's own hidden
            states and labels and its rows of the head, and gives the loss of its own labels; all ranks call it.

    Raises:
        UnsupportedError: also as :func:`check_vocabulary_parallel`.
    """
    check_loss(config, device, dtype)
    backend = _find(config.name)(config, device)
    if vocabulary is not None:
        check_vocabulary_parallel(config)
        backend.spread(*vocabulary)
    return backend


def _find(name: str) -> type[LossBackend]:
    if name in RIVALS:
        return RIVALS[name]
    if name not in _BACKENDS:
        near = difflib.get_close_matches(name, _BACKENDS, n=3, cutoff=0)
        raise ConfigError(
            f"loss={name}: there is no such loss",
            f"nearest: {', '.join(near)}; all: {', '.join(_BACKENDS)}",
        )
    return _BACKENDS[name]
