"""Other libraries' losses, and variants of the CCE paper: losses that only benchmarks run. None has options.

They take too few versions or shapes to train with.

* `liger_sm90`: liger-kernel 0.8.5 with CuTe DSL, for Hopper; it stores N x V.
* `quack`: QuACK's chunked loss, also in CuTe for Hopper; `quack/1024` has chunks of 1024 tokens in place of 4096.
* `liger_flsce`, `trl`, `unsloth`, `verl`: what these libraries compute with their default settings. Of verl and Unsloth
  one module is imported, without the package around it, which wants Ray or changes transformers.
* `paper/…`: this repository's kernels with the flags of the variants in Wijmans et al., "Cut Your Losses in
  Large-Vocabulary Language Models", ICLR 2025.
"""

import logging
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from linrnn.config.schema import LossConfig
from linrnn.core.errors import UnsupportedError
from linrnn.core.requirements import require_cuda, require_package
from linrnn.losses.base import IGNORE_INDEX, LossBackend
from linrnn.losses.cce import require_own_kernels
from linrnn.losses.registry import UNLISTED

_QUACK_CHUNKS = (1024, 2048, 8192)  # tokens; `quack` itself has QuACK's default, 4096
_PAPER_VARIANTS = ("cce", "cce_kahan", "cce_kahan_full_c", "cce_kahan_full_e", "cce_exact")
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # hidden (N, D), weight (V, D), labels (N,) -> their sum in nats


def _alone(name: str) -> Any:
    """A module of a package, imported without the code of the packages that hold it."""
    parents, path = name.split(".")[:-1], None
    for i in range(len(parents)):
        parent = ".".join(parents[: i + 1])
        spec = PathFinder.find_spec(parent, path)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {parent!r}", name=parent)
        path = list(spec.submodule_search_locations or ())
        empty = ModuleType(parent)
        empty.__path__ = path
        sys.modules.setdefault(parent, empty)
    return import_module(name)


def _liger_sm90() -> Loss:
    function = import_module("liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90")

    def loss(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> Tensor:
        if len(hidden_ND) % 128 or len(weight_VD) % 256:
            raise UnsupportedError(
                f"loss=liger_sm90 takes N in multiples of 128 and V in multiples of 256, not {len(hidden_ND)} and "
                f"{len(weight_VD)}",
                "choose loss=liger",
            )
        return function.liger_fused_linear_cross_entropy_sm90(hidden_ND, weight_VD, labels_N, IGNORE_INDEX, "sum")

    return loss


def _quack(chunk: int) -> Loss:
    # QuACK 0.6.5 makes a key from all that a kernel's function refers to. Outside of a folder site-packages these are
    # CUTLASS's loggers, too, which have no key; this is QuACK's own way to give them one.
    setattr(logging.Logger, "__quack_semantic_key__", lambda logger: logger.name)  # noqa: B010
    function = import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy
    return partial(function, chunk_size=chunk, ignore_index=IGNORE_INDEX, reduction="sum")


def _liger_flsce() -> Loss:
    function = import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")
    import_module("liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90")  # else it would fall back in silence
    return lambda *tensors: function.LigerFusedLinearScaledCrossEntropyFunction.apply(*tensors).sum()


def _trl() -> Loss:
    function, chunk = import_module("trl.kernels"), import_module("trl.trainer.utils")._CHUNKED_LOGPROB_CHUNK_SIZE

    def loss(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> Tensor:
        arguments = hidden_ND, weight_VD, None, labels_N, 1.0, chunk, None, 1.0, ()
        return -function.ChunkedLogProbFunction.apply(*arguments)[0].sum()

    return loss


def _unsloth() -> Loss:
    function = _alone("unsloth_zoo.fused_losses.chunked_logprob").unsloth_chunked_ce_loss
    return lambda hidden, weight, labels: function(hidden, weight, None, labels, n_items=1, shift_labels=False)


def _verl() -> Loss:
    _alone("verl.utils.kernel.kernels")
    function = _alone("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy
    return lambda *tensors: -function(*tensors, 1.0, "sum")[0]


# What imports a library's loss, and what installs it.
_LIBRARIES: dict[str, tuple[Callable[[], Loss], str]] = {
    "liger_sm90": (_liger_sm90, "liger-kernel[cutedsl]==0.8.5"),
    "liger_flsce": (_liger_flsce, "liger-kernel[cutedsl]==0.8.5"),
    "quack": (partial(_quack, 4096), "quack-kernels"),
    **{f"quack/{chunk}": (partial(_quack, chunk), "quack-kernels") for chunk in _QUACK_CHUNKS},
    "trl": (_trl, "trl==1.16.0"),
    "unsloth": (_unsloth, "unsloth_zoo==2026.10.9"),
    "verl": (_verl, "verl==0.9.1"),
}


class OfLibrary(LossBackend):
    """The loss of another library, with its default settings, on labels of which none is ignored."""

    def __init__(self, config: LossConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._loss = _LIBRARIES[config.name][0]()

    @classmethod
    def check(cls, config: LossConfig, device: torch.device, dtype: torch.dtype | None) -> None:
        require_cuda(device, f"loss={config.name}", "choose loss=cce_kahan")
        load, install = _LIBRARIES[config.name]
        package = install.partition("==")[0].partition("[")[0]
        require_package(package, package, f"loss={config.name}", install, lambda _: load())

    def compute(self, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self._loss(hidden_ND, weight_VD, labels_N), {}


class PaperVariant(LossBackend):
    """This repository's kernels with the flags of a variant of the paper."""

    capturable = True

    def __init__(self, config: LossConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._loss = partial(
            import_module("cce_kernels").linear_cross_entropy,
            ignore_index=IGNORE_INDEX,
            reduction="sum",
            preset=config.name,
        )

    @classmethod
    def check(cls, config: LossConfig, device: torch.device, dtype: torch.dtype | None) -> None:
        require_own_kernels(device, f"loss={config.name}")

    def compute(self, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self._loss(hidden_ND, weight_VD, labels_N), {}


OTHER_LOSSES: dict[str, type[LossBackend]] = {
    **dict.fromkeys(_LIBRARIES, OfLibrary),
    **{f"paper/{variant}": PaperVariant for variant in _PAPER_VARIANTS},
}
UNLISTED.update(OTHER_LOSSES)  # where build_loss finds them
