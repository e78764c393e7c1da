"""A causal language model taken apart: its decoder, its head, the loss that it computes now, the line that switches.

Nothing here depends on a class. Every causal model of transformers and FLA, patched by Liger or not, calls its decoder
once and computes logits and loss from the decoder's hidden states.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..huggingface.checks import innermost, of_fla, source
from ..huggingface.fla_backend import is_registered_in_fla
from ..huggingface.patch import is_patched, patch

_GIVE = "give a causal language model of transformers or FLA (…ForCausalLM), before it is wrapped or compiled"
PATCH = "cce_kernels.patch(model)"
NOTHING = "nothing to switch, the loss is cce_kernels' already"


class _Reached(Exception):
    """The decoder has returned."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


class CausalModel:
    """A model and a batch, whose decoder, head and loss can run one without the other."""

    def __init__(self, model: Any, batch: Any) -> None:
        """batch: token ids (B, T), or a mapping with the arguments of the model's forward.

        Raises:
            TypeError, ValueError: the model is no causal language model, or computes no loss.
        """
        here = f"model: a {type(model).__name__}"
        if not hasattr(model, "get_output_embeddings") or hasattr(model, "get_base_model"):
            raise TypeError(f"{here} cannot be measured; {_GIVE} (with PEFT: model.get_base_model())")
        if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None:
            raise TypeError(f"{here} is compiled; {_GIVE}")
        if getattr(model.config, "is_encoder_decoder", False) or not model.can_generate():
            raise TypeError(f"{here} is no causal language model; {_GIVE}")
        head = model.get_output_embeddings()
        if not isinstance(getattr(head, "weight", None), Tensor):
            raise TypeError(f"{here} has no head with a weight; {_GIVE}")
        self.model, self.head, self.decoders = model, head, _decoders(model)
        self.batch = _arguments(model, batch)

    def loss(self) -> Tensor:
        """The model's own loss."""
        loss = getattr(self.model(**self.batch), "loss", None)
        if not isinstance(loss, Tensor) or loss.dim():
            raise ValueError(
                f"model: a {type(self.model).__name__} returned no loss for a batch with labels; its forward must "
                "return an output with a scalar .loss (return_dict=True)"
            )
        return loss

    def decoded(self) -> Any:
        """The decoder's output. The model's own forward runs, and stops before head and loss."""
        while self.decoders:
            hook = self.decoders[0].register_forward_hook(_stop)
            try:
                self.model(**self.batch)
            except _Reached as reached:
                return reached.output
            finally:
                hook.remove()
            del self.decoders[0]  # the model's forward does not call this one
        raise ValueError(f"model: the forward of a {type(self.model).__name__} does not call its decoder")

    @contextmanager
    def without_decoder(self, output: Any) -> Iterator[None]:
        """The decoder returns `output` and computes nothing. After `decoded`, which finds the decoder."""
        decoder = self.decoders[0]
        replaced = vars(decoder).get("forward")
        decoder.forward = lambda *_, **__: output
        try:
            yield
        finally:
            del decoder.forward
            if replaced is not None:
                decoder.forward = replaced

    def options(self) -> dict[str, Any]:
        """What the configuration says about logits, as options of `linear_cross_entropy`; the head's bias."""
        config, bias, scale = self.model.config, getattr(self.head, "bias", None), 1.0
        if isinstance(getattr(config, "logit_scale", None), float):  # Cohere
            scale = config.logit_scale
        elif getattr(config, "logits_scaling", None):  # Granite
            scale = 1 / config.logits_scaling
        if bias is not None and scale != 1:  # linear_cross_entropy scales the product alone
            bias = bias * scale
        return {"softcap": getattr(config, "final_logit_softcapping", None), "logit_scale": scale, "bias": bias}

    def targets(self) -> tuple[Tensor, int]:
        """The targets (B, T), and by how many places the loss shifts them."""
        if self.batch.get("shift_labels") is not None:
            return self.batch["shift_labels"], 0
        return self.batch["labels"], 1

    def calls_head(self, run: Callable[[], object]) -> bool:
        """Whether `run` computes logits with the head. Fused losses take the head's weight instead."""
        if is_patched(self.model):  # its head must have no hook
            return False
        called = []
        hook = self.head.register_forward_hook(lambda *_: called.append(True))
        try:
            run()
        finally:
            hook.remove()
        return bool(called)

    def diagnosis(self, logits: bool, output: Any) -> tuple[str, str]:
        """What computes the loss now, and the line that switches to this package.

        logits: what `calls_head` says of a training step. output: the decoder's, for a trial of the line.
        """
        model, how = self.model, "on logits" if logits else "fused with the head"
        kind = vars(type(model)).get("_cce_kind", type(model))
        if is_patched(model):
            return "cce_kernels (patch)", NOTHING
        if "liger_kernel" in _packages(model.forward):
            return f"Liger's forward, {how}", self._without_liger(kind, output)
        if of_fla(kind):
            return self._of_fla(how, logits, output)
        losses = importlib.import_module("transformers.loss.loss_utils")
        own = getattr(model, "loss_function", None)
        name = "transformers' default" if own is losses.ForCausalLMLoss else f"its own, {source(own or model.forward)}"
        return f"{name}, {how}", self._tried(model, output)

    def _without_liger(self, kind: Any, output: Any) -> str:
        if "liger_kernel" in _packages(kind.forward):
            return f"load the model without Liger's fused_linear_cross_entropy, then {PATCH}"
        bare = copy.copy(self.model)
        del bare.forward
        return self._tried(bare, output, f"del model.forward; {PATCH}")

    def _of_fla(self, how: str, logits: bool, output: Any) -> tuple[str, str]:
        model, criterion = self.model, getattr(self.model, "criterion", None)
        if criterion is not None:
            package, name = type(criterion).__module__.split(".")[0], type(criterion).__name__
            if package == "cce_kernels":
                return f"cce_kernels (criterion), {how}", NOTHING
            line = f"model.criterion = None; {PATCH}"
            return f"{package}'s {name} as criterion, {how}", line
        if getattr(model.config, "use_l2warp", False):
            return f"FLA's with L2Warp, {how}", f"model.config.use_l2warp = False; {PATCH}"
        if logits:
            return f"FLA's default, {how}", self._tried(model, output)
        if is_registered_in_fla():
            return f"cce_kernels (backend of FLA), {how}", NOTHING
        return f"FLA's, {how}", "cce_kernels.register_in_fla()"

    def _tried(self, model: Any, output: Any, line: str = PATCH) -> str:
        """`line`, if a patched copy of the model computes a loss; else what it says, and the function to call.

        output: the decoder's; only head and loss are computed.
        """
        try:
            with self.without_decoder(output), torch.no_grad():
                patch(copy.copy(model))(**self.batch)
        except (TypeError, ValueError) as error:
            return f"cce_kernels.linear_cross_entropy in a loop of your own, because patch refuses: {error}"
        return line


def _decoders(model: Any) -> list[Any]:
    """The parts of the model that may compute its hidden states, the outer one first (OPT calls the inner one)."""
    found = [x for x in (model.base_model, model.get_decoder()) if isinstance(x, nn.Module) and x is not model]
    if not found:
        raise TypeError(f"model: a {type(model).__name__} has no decoder of its own; {_GIVE}")
    return found


def _arguments(model: Any, batch: Any) -> dict[str, Any]:
    """The arguments of a training step's forward: labels as Trainer gives them, no cache of keys and values."""
    if isinstance(batch, Tensor):
        if batch.dim() != 2 or batch.is_floating_point():
            raise ValueError(f"batch: must be token ids (B, T), got {batch.dtype} of shape {tuple(batch.shape)}")
        batch = {"input_ids": batch}
    if not isinstance(batch, Mapping):
        raise TypeError(f"batch: must be token ids (B, T) or a mapping of the model's arguments, got {type(batch)}")
    arguments = dict(batch)
    if arguments.get("labels") is None:
        if arguments.get("input_ids") is None:
            raise ValueError("batch: has neither labels nor input_ids; give one of them")
        arguments["labels"] = arguments["input_ids"]
    if "use_cache" in inspect.signature(model.forward).parameters:
        arguments.setdefault("use_cache", False)
    return arguments


def _stop(_module: Any, _inputs: Any, output: Any) -> None:
    raise _Reached(output)


def hidden_of(output: Any) -> Tensor:
    """The hidden states (..., D) in a decoder's output."""
    return output if isinstance(output, Tensor) else output[0]


def with_hidden(output: Any, hidden: Tensor) -> Any:
    """A decoder's output with other hidden states, and without the graph of everything else."""
    first = hidden_of(output)
    return tree_map(lambda x: hidden if x is first else x.detach() if isinstance(x, Tensor) else x, output)


def _packages(function: Any) -> set[str]:
    """The packages of a function and of all that it wraps."""
    found, function = set(), innermost(function)
    while function is not None:
        found.add(source(function).split(".")[0])
        function = getattr(function, "__wrapped__", None)
    return found
