"""Backends by name: a loss's file registers its class, and `loss=NAME` finds it."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import TYPE_CHECKING

from linrnn.config.compose import offer
from linrnn.config.schema import SCHEMAS, LossConfig
from linrnn.core.errors import ConfigError, UnsupportedError
from linrnn.losses.base import LossBackend

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

_BACKENDS: dict[str, type[LossBackend]] = {}
UNLISTED: dict[str, type[LossBackend]] = {}  # further backends for build_loss; no run can choose them


def register_loss(
    name: str, options: type[LossConfig] = LossConfig
) -> Callable[[type[LossBackend]], type[LossBackend]]:
    """Class decorator: registers this backend as `loss=NAME`. `--help` shows the first paragraph of its docstring.

    Args:
        options: a dataclass below LossConfig whose every field is a :func:`linrnn.config.schema.option`.

    Raises:
        ValueError: another module has registered this name.
    """

    def register(backend: type[LossBackend]) -> type[LossBackend]:
        if name in _BACKENDS and _BACKENDS[name].__module__ != backend.__module__:
            raise ValueError(f"loss={name} is registered already, by {_BACKENDS[name].__module__}")
        offer("loss", options(name), " ".join((backend.__doc__ or "").split("\n\n")[0].split()))
        _BACKENDS[name] = backend
        return backend

    return register


def loss_names() -> tuple[str, ...]:
    """Every backend that a run can choose, whether it can run here or not."""
    return tuple(_BACKENDS)


def check_loss(config: LossConfig, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Reject a loss that cannot run here. Call it before a model or a data set is built.

    Args:
        config: the loss's name and options.
        device: where the tensors will be.
        dtype: the compute dtype (of hidden states and weight), if it is known.

    Raises:
        ConfigError: the name is unknown. The error offers the nearest names.
        UnsupportedError: this hardware or these versions cannot run it. The error says what to install or choose.
            Also as :func:`check_objective`.
    """
    check_objective(config)
    find_loss(config.name).check(config, device, dtype)


def check_objective(config: LossConfig) -> None:
    """Reject a loss that cannot compute its z_loss, softcap or label_smoothing, on whatever machine.

    Raises:
        UnsupportedError: it cannot. The error names losses that compute all three.
    """
    for key, why in find_loss(config.name).lacks(config).items():
        if value := getattr(config, key):
            able = [name for name, backend in _BACKENDS.items() if not backend.lacks(SCHEMAS["loss"][name](name))]
            raise UnsupportedError(
                f"loss={config.name} loss.{key}={value:g}: {why}",
                f"choose loss={' or loss='.join(able)}, or leave loss.{key} out",
            )


def check_vocabulary_parallel(config: LossConfig) -> None:
    """Raise an UnsupportedError for a loss that needs all rows of the head on one rank."""
    why = "needs the whole head on every rank, and parallel=vocab spreads its rows over them"
    _require("vocabulary_parallel", config, why, "parallel=fsdp")
    if not getattr(config, "filter_if_faster", True) and getattr(config, "filter_mass", None) != 0:
        raise UnsupportedError(
            f"loss={config.name} loss.filter_if_faster=false: parallel=vocab has no filter",
            "use loss.filter_if_faster=true (every step is exact then), or parallel=fsdp",
        )


def check_capturable(config: LossConfig) -> None:
    """Raise an UnsupportedError for a loss whose host may wait for the GPU."""
    why = "may let its host wait for the GPU, so a CUDA graph cannot hold it"
    _require("capturable", config, why, "trainer.cuda_graph=false")


def _require(ability: str, config: LossConfig, why: str, otherwise: str) -> None:
    if not getattr(find_loss(config.name), ability):
        able = [name for name, backend in _BACKENDS.items() if getattr(backend, ability)]
        raise UnsupportedError(f"loss={config.name} {why}", f"choose loss={' or loss='.join(able)}, or {otherwise}")


def build_loss(
    config: LossConfig,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    vocabulary: tuple[dist.ProcessGroup, list[int]] | None = None,
) -> LossBackend:
    """The backend that `config` names. Arguments and errors as in :func:`check_loss`.

    Args:
        vocabulary: the ranks that share the head's rows, and the number of rows of each. Every rank then calls the
            backend with its own hidden states and labels and its rows of the head. It gets the loss of its own labels.

    Raises:
        UnsupportedError: also as :func:`check_vocabulary_parallel`.
    """
    check_loss(config, device, dtype)
    backend = find_loss(config.name)(config, device)
    if vocabulary is not None:
        check_vocabulary_parallel(config)
        backend.shard_vocabulary(*vocabulary)
    return backend


def find_loss(name: str) -> type[LossBackend]:
    """The class of a loss, or a ConfigError that offers the nearest names."""
    if name in UNLISTED:
        return UNLISTED[name]
    if name not in _BACKENDS:
        near = difflib.get_close_matches(name, _BACKENDS, n=3, cutoff=0)
        raise ConfigError(
            f"loss={name}: there is no such loss",
            f"nearest: {', '.join(near)}; all: {', '.join(_BACKENDS)}",
        )
    return _BACKENDS[name]
