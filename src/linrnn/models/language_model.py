"""One of FLA's causal language models without its loss: token ids in, hidden states out."""

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from linrnn.core.errors import ConfigError
from linrnn.data import Batch
from linrnn.models.chunk_size import set_chunk_size
from linrnn.models.facts import Architecture, facts_of
from linrnn.models.fla_any import backbone_of, parts_of, reads_documents

# Operations whose results selective checkpointing keeps: the products of linear layers, without and with a bias.
KEPT_PRODUCTS = ("aten.mm.default", "aten.addmm.default")


class LanguageModel(nn.Module):
    """FLA's backbone and head, which can be called separately.

    Attributes:
        hf: FLA's model, a transformers `PreTrainedModel`; checkpoints use the names of its state dict.
        arch: the dimensions of the model.
        checkpointing: what the blocks keep, as :meth:`set_activation_checkpointing` was told.
    """

    def __init__(self, hf: Any, arch: Architecture) -> None:
        super().__init__()
        self.hf = hf
        self.arch = arch
        self._compiled = "none"
        self._compiled_backbone: Callable[..., Any] | None = None
        self.checkpointing = "none"
        self._head_as: Callable[[nn.Parameter, torch.dtype], Tensor] = lambda weight, dtype: weight.to(dtype)
        if (chunks := facts_of(arch.model).chunks) is not None and arch.chunk_size is not None:
            for mixer in self.mixers:
                set_chunk_size(mixer, chunks, arch.chunk_size)
        self._set_block_forwards()

    def forward(self, input_ids_BT: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Hidden states after the final norm, (B, T, D).

        Args:
            input_ids_BT: token ids, int64.
            cu_seqlens: (n_documents + 1,) int32 or int64, document bounds in the flattened batch: 0, …, B·T. They must
                include the ends of the B rows. State, convolutions and attention do not cross them. None: each row
                is one document.

        Raises:
            ConfigError: `cu_seqlens` is given, and FLA's model does not read it.
        """
        options = {"use_cache": False, "return_dict": False}
        backbone = self._compiled_backbone or self.backbone
        if cu_seqlens is None:
            return backbone(input_ids=input_ids_BT, **options)[0]
        if not self.arch.matched and not reads_documents(self.backbone):
            raise ConfigError(
                f"data.reset_at_document=true: FLA's {self.arch.kind} cannot keep documents of one row apart",
                "use data.reset_at_document=false",
            )
        hidden_1ND = backbone(input_ids=input_ids_BT.reshape(1, -1), cu_seqlens=cu_seqlens, **options)[0]
        return hidden_1ND.view(*input_ids_BT.shape, -1)

    @property
    def backbone(self) -> Any:
        """FLA's model without its head."""
        return backbone_of(self.hf)

    @property
    def norms(self) -> list[nn.Module]:
        """The norms over the hidden size: those of each layer, and the final one."""
        final = self.backbone.norm if hasattr(self.backbone, "norm") else self.backbone.norm_f
        return [*self._of_blocks("norms"), final]

    @property
    def mixers(self) -> list[nn.Module]:
        """The layers' token mixers."""
        return self._of_blocks("mixers")

    @property
    def mlps(self) -> list[nn.Module]:
        """The layers' MLPs. A model may have none."""
        return self._of_blocks("mlps")

    def _of_blocks(self, kind: str) -> list[nn.Module]:
        return [module for block in self.blocks for module in parts_of(block)[kind]]

    @property
    def head_weight(self) -> nn.Parameter:
        """(V, D): logits are hidden states times its transpose. It is the embedding itself if the two are tied."""
        return self.hf.lm_head.weight

    def head(self, dtype: torch.dtype) -> Tensor:
        """The head for a loss, in `dtype`: (V, D), or the result of the function given to :meth:`set_head`."""
        return self._head_as(self.head_weight, dtype)

    def set_head(self, weight: nn.Parameter, head_as: Callable[[nn.Parameter, torch.dtype], Tensor]) -> None:
        """Replace the head's parameter. `head_as(weight, dtype)` turns it into what a loss takes."""
        self.hf.lm_head.weight = weight
        self._head_as = head_as

    def set_softcap(self, softcap: float | None) -> None:
        """Cap the logits of `hf`, from which text is sampled. A loss with `loss.softcap` caps its own."""
        if softcap is not None:
            self.hf.lm_head.register_forward_hook(lambda head, inputs, logits: _capped(logits, softcap))

    @property
    def embedding(self) -> nn.Module:
        """Token ids (…) to vectors (…, D)."""
        return self.backbone.embeddings

    def set_embedding(self, module: nn.Module) -> None:
        """Replace the embedding by another module."""
        self.backbone.embeddings = module

    @property
    def blocks(self) -> nn.ModuleList:
        """The layers. Each has a mixer and an MLP, with their norms."""
        return self.backbone.layers

    def set_activation_checkpointing(self, mode: str) -> None:
        """Choose what the blocks keep for the backward pass. They recompute the rest.

        Args:
            mode: `none` keeps every activation, `full` each block's input, `selective` each block's input and the
                results of its linear layers (`KEPT_PRODUCTS`).
        """
        self.checkpointing = mode
        self._set_block_forwards()

    def set_compile(self, mode: str) -> None:
        """Choose what torch.compile compiles: `none`, each of the `blocks`, or the whole `model` without its head.

        FLA's recurrent kernels stay outside the graphs.
        """
        if mode != "none":
            # FLA's layers read their number, `layer_idx`. torch 2.11 compiles a layer anew for each number, eight times
            # at most, and runs all further layers uncompiled. As a variable, the number serves all layers.
            torch._dynamo.config.allow_unspec_int_on_nn_module = True
        self._compiled = mode
        whole = MethodType(type(self.backbone).forward, self.backbone)  # a compiled module would be a part of this one
        self._compiled_backbone = torch.compile(whole) if mode == "model" else None
        self._set_block_forwards()

    def _set_block_forwards(self) -> None:
        """Compose each block's forward: compiled, then checkpointed."""
        for block in self.blocks:
            forward: Callable[..., Any] = MethodType(type(block).forward, block)
            if self._compiled == "blocks":
                forward = torch.compile(forward)
            again = partial(checkpoint, forward, use_reentrant=False)
            contexts = partial(create_selective_checkpoint_contexts, _keeps)
            of_modes: dict[str, Callable[..., Any]] = {
                "none": forward,
                "full": again,
                "selective": partial(again, context_fn=contexts),
            }
            block.forward = of_modes[self.checkpointing]


def _capped(logits: Tensor, softcap: float) -> Tensor:
    return (softcap * (logits.float() / softcap).tanh()).to(logits.dtype)


def _keeps(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Whether selective checkpointing keeps the result of an operation."""
    kept = str(operation) in KEPT_PRODUCTS
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


# ------------------------------------------------------------------------------------------------------- precision
def parameter_dtype(precision: str) -> torch.dtype:
    """The dtype of parameters, and so of gradients and optimizer state."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


def compute_dtype(precision: str) -> torch.dtype:
    """The dtype of matrix products, and of a loss backend's hidden states and weight."""
    return torch.float32 if precision == "fp32" else torch.bfloat16


def loss_inputs(model: Any, batch: Batch, precision: str, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The three inputs of every loss backend: hidden (N, D) and weight (V, D) in the compute dtype, labels (N,).

    Args:
        model: a LanguageModel, or a replica of one.
        batch: (sequences, tokens), on any device.
        precision: `trainer.precision` without `auto`.
    """
    dtype = compute_dtype(precision)
    cu_seqlens = None if batch.cu_seqlens is None else _sent(batch.cu_seqlens, device)
    input_ids, labels = _sent(batch.input_ids, device), _sent(batch.labels, device)
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16_autocast"):
        hidden_BTD = model(input_ids, cu_seqlens=cu_seqlens)
    return hidden_BTD.flatten(0, 1).to(dtype), model.head(dtype), labels.flatten()


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy `tensor` to the device; to a GPU from pinned memory.

    From other memory the host might wait until the GPU has finished all earlier work.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
