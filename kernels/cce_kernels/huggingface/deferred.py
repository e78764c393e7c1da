"""A model's forward run as it stands, with a head that keeps its logits uncomputed until the loss asks for them.

Nothing here knows a class of models. The forward runs with a `View` in place of `self`. The view is the model, except
that its head returns `DeferredLogits`, and its loss gets them. Whatever a forward does beside (a decoder of another
name, an auxiliary loss of experts) stays its own. An operation on logits that the loss has no option for is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..api import linear_cross_entropy
from ..log_probs import predicted_tokens


def causal_lm_loss(
    hidden: Tensor, weight: Tensor, labels: Any, shift_labels: Tensor | None, ignore_index: int, items: Any,
    **options: Any,
) -> Tensor:  # fmt: skip
    """transformers' `ForCausalLMLoss` of hidden states (..., T, D) and the head's weight (V, D), in place of logits.

    Targets (..., T) are `shift_labels`, or where they are None the labels moved by one.

    Returns:
        The mean over the targets that are not ignored, or the sum divided by `items`; fp32.
    """
    shift = int(shift_labels is None)
    targets = (labels if shift_labels is None else shift_labels).to(hidden.device)
    loss = linear_cross_entropy(
        hidden, weight, targets, shift=shift, ignore_index=ignore_index,
        reduction="mean" if items is None else "sum", **options,
    )  # fmt: skip
    if items is None:  # without any target torch's mean is NaN, linear_cross_entropy's 0
        return torch.where((targets[..., shift:] != ignore_index).any(), loss, torch.nan)
    return loss / (items.to(loss.device) if isinstance(items, Tensor) else items)


class LogitsNeeded(ValueError):
    """A model's forward does something with its logits that `linear_cross_entropy` has no option for."""

    def __init__(self, what: str) -> None:
        super().__init__(f"model: its forward {what}, which patch cannot do without logits")


class DeferredLogits:
    """The logits o · (k · (e cᵀ + b)), or o · tanh(k · (e cᵀ + b)), of a head that was not computed."""

    def __init__(
        self, hidden: Tensor, head: nn.Linear, times: Any = 1.0, over: Any = 1.0, capped: bool = False, outer: Any = 1.0
    ) -> None:
        """hidden: (..., D) for the head (V, D). k = times / over; outer: o, which is 1 until there is a tanh."""
        self.hidden, self.head, self.times, self.over = hidden, head, times, over
        self.capped, self.outer = capped, outer
        self.device = hidden.device

    def _scaled(self, factor: Any, divisor: Any) -> DeferredLogits:
        if self.capped:
            return DeferredLogits(self.hidden, self.head, self.times, self.over, True, self.outer * factor / divisor)
        return DeferredLogits(self.hidden, self.head, self.times * factor, self.over * divisor)

    def __mul__(self, factor: Any) -> DeferredLogits:
        return self._scaled(factor, 1.0)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> DeferredLogits:
        return self._scaled(1.0, divisor)

    def tanh(self) -> DeferredLogits:
        if self.capped:
            raise LogitsNeeded("takes a second tanh of its logits")
        return DeferredLogits(self.hidden, self.head, self.times, self.over, True)

    def _same(self, *_: Any, **__: Any) -> DeferredLogits:
        return self

    float = to = contiguous = _same  # the loss computes in fp32 anyway

    @classmethod
    def __torch_function__(cls, function: Any, _: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function is torch.tanh and not kwargs:
            return args[0].tanh()
        if function in (torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__, torch.mul) and not kwargs:
            return args[0] * args[1] if isinstance(args[0], cls) else args[1] * args[0]
        raise LogitsNeeded(f"calls {getattr(function, '__name__', function)} on its logits")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise LogitsNeeded(f"uses .{name} of its logits")

    def __getitem__(self, _: Any) -> Any:
        raise LogitsNeeded("takes a part of its logits")

    def __setitem__(self, *_: Any) -> None:
        raise LogitsNeeded("changes a part of its logits")

    def _refuse(self, *_: Any) -> Any:
        raise LogitsNeeded("adds to its logits, compares them, or computes something else with them")

    # Python looks these up on the class, not by __getattr__.
    __add__ = __radd__ = __sub__ = __rsub__ = __neg__ = __abs__ = __rtruediv__ = __pow__ = __rpow__ = _refuse
    __matmul__ = __rmatmul__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse

    def options(self) -> dict[str, Any]:
        """What the model does to its logits, as options of `linear_cross_entropy`, which scales e cᵀ, not the bias."""
        if self.capped:  # o · tanh(k x) = o · tanh((k o) x / o)
            scale = {"logit_scale": self.times * self.outer / self.over, "softcap": self.outer}
        else:
            scale = {"logit_scale": self.times / self.over}
        if isinstance(scale["logit_scale"], float) and scale["logit_scale"] == 1:
            del scale["logit_scale"]
        bias = self.head.bias
        if bias is not None and "logit_scale" in scale:
            bias = bias.float() * scale["logit_scale"]
        return {**scale, "bias": bias}

    def loss(
        self, labels: Any, shift_labels: Tensor | None, ignore_index: int, items: Any, options: dict[str, Any]
    ) -> Tensor:
        """The `causal_lm_loss` of these logits."""
        return self._in_head(
            lambda hidden: causal_lm_loss(
                hidden, self.head.weight, labels, shift_labels, ignore_index, items, **self.options(), **options
            )
        )

    def predictions(self) -> Tensor:
        """The tokens (...) with the largest logits, int64."""

        def largest(hidden: Tensor) -> Tensor:
            options = {name: x for name, x in self.options().items() if name != "softcap"}
            return predicted_tokens(hidden, self.head.weight, **options)

        return self._in_head(largest)

    def _in_head(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """`function` of the hidden states, where the head's weight is whole.

        ZeRO-3 gathers it around the head's forward, in both passes. So `function` then runs as that forward.
        """
        if not of_zero3(self.head):
            return function(self.hidden)
        vars(self.head)["forward"] = function
        try:
            return self.head(self.hidden)
        finally:
            del vars(self.head)["forward"]


def of_zero3(head: nn.Module) -> bool:
    """Whether DeepSpeed's ZeRO-3 shards a head. It gathers the weight in hooks around the head's forward."""
    return hasattr(head.weight, "ds_id")


class DeferredHead:
    """A head that returns `DeferredLogits`. Attributes, such as the weight's dtype, are those of the head."""

    def __init__(self, head: nn.Linear) -> None:
        self._head = head

    def __call__(self, hidden: Tensor) -> DeferredLogits:
        return DeferredLogits(hidden, self._head)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)


class View:
    """A model with another head and loss, for one call of its forward.

    Attributes read through to the model. Methods run with the view as `self`. Nothing is written to the model, so that
    threads and copies do not see the view. `lost` says whether the forward has asked for its loss.
    """

    def __init__(self, model: Any, options: dict[str, Any]) -> None:
        """options: those of `linear_cross_entropy` that the model does not know of."""
        self._model, self._options, self._head = model, options, model.get_output_embeddings()
        self._deferred, self.lost = DeferredHead(self._head), False

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._model, name)
        if value is self._head:
            return self._deferred
        if name == "loss_function":
            return self._loss
        if isinstance(value, MethodType) and value.__self__ is self._model:
            return MethodType(value.__func__, self)
        return value

    def _loss(
        self, logits: Any, labels: Tensor, vocab_size: int | None = None, num_items_in_batch: Any = None,
        ignore_index: int = -100, shift_labels: Tensor | None = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        """In place of transformers' `ForCausalLMLoss`."""
        if not isinstance(logits, DeferredLogits):
            raise LogitsNeeded("computes its logits elsewhere than in its head")
        self.lost = True
        return logits.loss(labels, shift_labels, ignore_index, num_items_in_batch, self._options)
