"""Backends by name: `loss=<name>`."""

import difflib

import torch

from linrnn.config.schema import LossConfig
from linrnn.errors import ConfigError
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


def build_loss(config: LossConfig, *, device: torch.device, dtype: torch.dtype | None = None) -> LossBackend:
    """The backend that `config` names. Arguments and errors as :func:`check_loss`."""
    check_loss(config, device, dtype)
    return _find(config.name)(config, device)


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
