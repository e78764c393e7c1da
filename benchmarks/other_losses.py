"""Other libraries' losses, and variants of the CCE paper: losses that only benchmarks run. None has options.

They take too few versions or shapes to train with.

* `compiled_max_autotune` and `compiled_auto_chunker`: torch.compile with its GEMM templates, and with its chunking of
  the logits (torch >= 2.12).
* `liger_sm90`: liger-kernel 0.8.5 with CuTe DSL, for Hopper; it stores N x V.
* `quack`: QuACK's chunked loss, also in CuTe for Hopper; `quack/1024` has chunks of 1024 tokens in place of 4096.
* `liger_flsce`, `liger_cutile`, `trl`, `unsloth`, `verl`: what these libraries compute with their default settings. Of
  verl and Unsloth one module is imported, without the package around it, which wants Ray or changes transformers.
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
from typing import Any, ClassVar

import torch
from torch import Tensor

from linrnn.config.schema import LossConfig
from linrnn.core.errors import UnsupportedError
from linrnn.losses.base import IGNORE_INDEX, LossBackend
from linrnn.losses.registry import UNLISTED
from linrnn.losses.requirements import require_cuda, require_own_kernels, require_package, require_torch_compile
from linrnn.losses.standard import Compiled

_QUACK_CHUNKS = (512, 1024, 2048, 8192, 16384)  # tokens; `quack` itself has QuACK's default, 4096
_PAPER_VARIANTS = ("cce", "cce_kahan", "cce_kahan_full_c", "cce_kahan_full_e", "cce_exact")


class CompiledMaxAutotune(Compiled):
    """torch.compile in its mode `max-autotune-no-cudagraphs`. Tuning may take minutes per shape."""

    # The options of that mode (torch._inductor.list_mode_options()): torch.compile takes a mode or options, not both.
    inductor_options: ClassVar[dict[str, Any]] = {"max_autotune": True, "coordinate_descent_tuning": True}


class CompiledAutoChunker(Compiled):
    """torch.compile with TORCHINDUCTOR_AUTO_CHUNKER. A shape that it would not chunk is an error."""

    inductor_options: ClassVar[dict[str, Any]] = {**Compiled.inductor_options, "auto_chunker.enable": True}

    @classmethod
    def check(cls, config: LossConfig, device: torch.device, dtype: torch.dtype | None) -> None:
        if not hasattr(import_module("torch._inductor.config"), "auto_chunker"):
            raise UnsupportedError(
                f"loss={config.name}: torch {torch.__version__} has no auto chunker", 'pip install "torch>=2.12,<2.14"'
            )
        require_torch_compile(device, f"loss={config.name}")

    def __init__(self, config: LossConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._chunked: set[tuple[int, int]] = set()  # (N, V)

    def compute(self, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        metrics, shape = import_module("torch._inductor.metrics"), (len(hidden_ND), len(weight_VD))
        before = metrics.num_auto_chunking
        # A graph from AOTAutograd's cache skips the chunking pass, and the pass's count would say nothing.
        with import_module("torch._functorch.config").patch(enable_autograd_cache=False):
            result = super().compute(hidden_ND, weight_VD, labels_N)
        if torch.is_grad_enabled() and shape not in self._chunked:
            if metrics.num_auto_chunking == before:
                raise UnsupportedError(
                    f"loss={self.config.name}: torch found nothing to chunk at this shape",
                    "choose a shape with more logits: above 2^20 and above 8 times the entries of either factor",
                )
            self._chunked.add(shape)
        return result


class LigerSm90(LossBackend):
    """Liger's CuTe function for Hopper: three products, N x V logits in bf16; N % 128 and V % 256 must be 0."""

    _module = "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90"

    def __init__(self, config: LossConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._loss = import_module(self._module).liger_fused_linear_cross_entropy_sm90

    @classmethod
    def check(cls, config: LossConfig, device: torch.device, dtype: torch.dtype | None) -> None:
        what = f"loss={config.name}"
        require_cuda(device, what, "choose loss=cce_kahan")
        if torch.cuda.get_device_capability(device) != (9, 0):
            raise UnsupportedError(f"{what} is for Hopper alone (compute capability 9.0)", "choose loss=liger")
        if dtype not in (None, torch.bfloat16):
            raise UnsupportedError(f"{what} takes bf16 alone, not {dtype}", "choose loss=liger")
        require_package(cls._module, "nvidia-cutlass-dsl", what, "liger-kernel[cutedsl]==0.8.5")

    def compute(self, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        if len(hidden_ND) % 128 or len(weight_VD) % 256:
            raise UnsupportedError(
                f"loss={self.config.name} takes N in multiples of 128 and V in multiples of 256, "
                f"not {len(hidden_ND)} and {len(weight_VD)}",
                "choose loss=liger",
            )
        return self._loss(hidden_ND, weight_VD, labels_N, IGNORE_INDEX, "sum"), {}


class Quack(LossBackend):
    """QuACK's chunked loss: chunks of 4096 tokens or of the name's, weight gradient summed in fp32.

    On Hopper in bf16 with V % 128 == 0 and D % 8 == 0, QuACK takes its scaled exponentials for any N. Its other path
    takes multiples of 8 alone.
    """

    def __init__(self, config: LossConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._quack = import_module("quack.linear_cross_entropy")
        self._chunk = int(config.name.partition("/")[2] or 4096)

    @classmethod
    def check(cls, config: LossConfig, device: torch.device, dtype: torch.dtype | None) -> None:
        require_cuda(device, f"loss={config.name}", "choose loss=cce_kahan")
        # QuACK 0.6.5 makes a key from all that a kernel's function refers to. Outside of a folder site-packages these
        # are CUTLASS's loggers, too, which have no key; this is QuACK's own way to give them one.
        setattr(logging.Logger, "__quack_semantic_key__", lambda logger: logger.name)  # noqa: B010
        require_package("quack.linear_cross_entropy", "quack-kernels", f"loss={config.name}", "quack-kernels")

    def compute(self, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        sizes = len(hidden_ND), hidden_ND.shape[1], len(weight_VD)
        scaled = self._quack.scaled_exp_lce_supported(hidden_ND, weight_VD, self._chunk, "sum")
        if not scaled and any(size % 8 for size in sizes):
            raise UnsupportedError(
                f"loss={self.config.name} takes N, D and V in multiples of 8 (any N if V is a multiple of 128), "
                f"not {sizes[0]}, {sizes[1]} and {sizes[2]}",
                "choose loss=cce_kahan",
            )
        loss = self._quack.chunked_linear_cross_entropy(
            hidden_ND, weight_VD, labels_N, chunk_size=self._chunk, ignore_index=IGNORE_INDEX, reduction="sum"
        )
        return loss, {}


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


Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def _liger_flsce() -> Loss:
    function = import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")
    import_module("liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90")  # else it would fall back in silence
    return lambda *tensors: function.LigerFusedLinearScaledCrossEntropyFunction.apply(*tensors).sum()


def _liger_cutile() -> Loss:
    function = import_module("liger_kernel.ops.cutile.ops.fused_linear_cross_entropy")
    loss = function.LigerFusedLinearCrossEntropyFunction
    return lambda *tensors: loss.apply(*tensors, None, None, IGNORE_INDEX, 0.0, 0.0, "sum")[0]


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
    "liger_flsce": (_liger_flsce, "liger-kernel[cutedsl]==0.8.5"),
    "liger_cutile": (_liger_cutile, "cuda-tile[tileiras]"),
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
    "compiled_max_autotune": CompiledMaxAutotune,
    "compiled_auto_chunker": CompiledAutoChunker,
    "liger_sm90": LigerSm90,
    "quack": Quack,
    **{f"quack/{chunk}": Quack for chunk in _QUACK_CHUNKS},
    **dict.fromkeys(_LIBRARIES, OfLibrary),
    **{f"paper/{variant}": PaperVariant for variant in _PAPER_VARIANTS},
}
UNLISTED.update(OTHER_LOSSES)  # where build_loss finds them
